"""Soft caps of scores and logits: values that approach a bound but never pass it.

Source: Bello et al. 2016, "Neural Combinatorial Optimization with Reinforcement Learning", section
5.1; used by Gemma 2 (Riviere et al. 2024, section 2).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Float

from jaxdist.core.types import Array


def soft_cap(x: Float[Array, "*dims"], cap: float) -> Float[Array, "*dims"]:
    """Return cap · tanh(x / cap) in the dtype of x; x itself if cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def slope_at(capped: Float[Array, "*dims"], cap: float) -> Float[Array, "*dims"] | float:
    """Return the derivative of `soft_cap` from its result; 1 if cap is 0."""
    return 1 - jnp.square(capped / cap) if cap else 1.0
