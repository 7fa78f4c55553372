"""Cross-entropy: of the next token, or of one label per row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Float

from jaxdist.core.losses import Regularizers, label_cross_entropy
from jaxdist.core.types import Array, Batch, Context, Sums, TokenHead


def cross_entropy(
    output: TokenHead, batch: Batch, context: Context, regularizers: Regularizers | None = None
) -> Sums:
    """Return the cross-entropy of `targets` and the arg-max hits, summed with `weights`."""
    more = () if regularizers is None else (regularizers,)
    return context.token_loss(output, batch["targets"], batch["weights"], *more)


def classification(
    output: Float[Array, "batch classes"],
    batch: Batch,
    context: Context,
    regularizers: Regularizers | None = None,
) -> Sums:
    """Return the cross-entropy of logits and the arg-max hits, summed with `weights`."""
    del context
    return label_cross_entropy(output, batch["labels"], batch["weights"], regularizers)


def real_rows(batch: Batch, context: Context) -> Array:
    """Return 1 for rows with a token of weight above 0, else 0: float32 [batch].

    Devices that split the positions of rows return the same result.
    """
    return (context.sum(jnp.sum(batch["weights"], axis=1), "seq") > 0).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class TextClassification:
    """`classification` of rows of text, whose `weights` [batch, seq] mark the last token."""

    regularizers: Regularizers | None = None

    unit: ClassVar[str] = "examples"

    def __call__(
        self, output: Float[Array, "batch labels"], batch: Batch, context: Context
    ) -> Sums:
        """Return the sums of `classification`; each row except padding counts once."""
        rows = {**batch, "weights": real_rows(batch, context)}
        return classification(output, rows, context, self.regularizers)
