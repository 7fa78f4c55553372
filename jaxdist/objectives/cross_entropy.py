"""Cross-entropy of next-token prediction."""

from __future__ import annotations

from jaxdist.core.losses import Regularizers
from jaxdist.core.types import Batch, Context, Sums, TokenHead


def cross_entropy(
    output: TokenHead, batch: Batch, context: Context, regularizers: Regularizers | None = None
) -> Sums:
    """Return the cross-entropy of `targets` and the arg-max hits, summed with `weights`."""
    more = () if regularizers is None else (regularizers,)
    return context.token_loss(output, batch["targets"], batch["weights"], *more)
