"""Cross-entropy of next tokens."""

from __future__ import annotations

from jaxdist.core.types import Batch, Context, Sums, TokenHead


def cross_entropy(output: TokenHead, batch: Batch, context: Context) -> Sums:
    """Sum the cross-entropy of `targets`, and arg-max hits (`correct`), with `weights`."""
    return context.token_loss(output, batch["targets"], batch["weights"])
