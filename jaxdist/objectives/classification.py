"""Cross-entropy with one label per row."""

from __future__ import annotations

from jaxtyping import Float

from jaxdist.core.losses import Regularizers, label_cross_entropy
from jaxdist.core.types import Array, Batch, Context, Sums


def classification(
    output: Float[Array, "batch classes"],
    batch: Batch,
    context: Context,
    regularizers: Regularizers | None = None,
) -> Sums:
    """Return the cross-entropy of logits and the arg-max hits, summed with `weights`."""
    del context
    return label_cross_entropy(output, batch["labels"], batch["weights"], regularizers)
