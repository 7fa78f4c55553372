"""What the model is told inside the step: kernels, dtypes, losses, how to run its layers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxdist.core import attention, losses
from jaxdist.core.parallel import fsdp
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import Layout
from jaxdist.core.step.config import TrainConfig
from jaxdist.core.step.layer_scan import make_run_layers
from jaxdist.core.types import Array, Context, Model, Params, Sums

_LOGITS_BYTES = 64 * 2**20


def make_context(
    model: Model,
    layout: Layout,
    config: TrainConfig,
    precision: PrecisionConfig,
    stages: PipelineConfig | None = None,
) -> Context:
    """What the model is told inside the step on this layout.

    The first device of the mesh says the platform; `stages` is None without a pipeline.
    """
    device = layout.mesh.devices.flat[0]
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    dtype = precision.resolve(platform)
    split_vocabulary = TENSOR in layout.used
    chunk = config.loss_chunk_tokens or default_loss_chunk(
        model.dims.get("vocab", 0) // layout.size(TENSOR)
    )

    def token_loss(
        x: Array, kernel: Array, targets: Array, weights: Array, vocab_size: int
    ) -> Sums:
        """As `losses.token_cross_entropy`: x [batch, seq, d_model] -> Sums."""
        vocabulary = losses.Vocabulary(vocab_size, TENSOR.name if split_vocabulary else None, chunk)
        return losses.token_cross_entropy(x, kernel, targets, weights, vocabulary)

    # Then the pipeline gathers a stage's weights itself, before the first tick.
    once = layout.size(PIPELINE) > 1 and stages is not None and stages.gather == "step"
    capability = str(getattr(device, "compute_capability", ""))
    hooks = _hooks(layout)
    head_shard = {key: hooks[key] for key in ("tensor_index",) if key in hooks}
    attend = attention.make_attend(platform=platform, compute_capability=capability, **head_shard)
    return Context(
        dtype=dtype,
        token_loss=token_loss,
        label_loss=losses.label_cross_entropy,
        run_layers=make_run_layers(model, layout, config, precision, platform, gather=not once),
        platform=platform,
        compute_capability=capability,
        gather=make_gather(layout, model, dtype, precision),
        **{"attend": attend, **hooks},
    )


def _hooks(layout: Layout) -> dict[str, Any]:
    """What the axes in use give a model to call."""
    return {
        name: hook
        for axis in layout.used
        for name, hook in axis.hooks(layout.sequence_parallel).items()
    }


def make_gather(layout: Layout, model: Model, dtype: Any, precision: PrecisionConfig) -> Any:
    """A function that makes all but the stacked layers whole, in the compute dtype."""
    specs = layout.gather_specs(model.axes)

    def gather(params: Params) -> Params:
        outer = {name: tree for name, tree in params.items() if name != "layers"}
        outer_specs = {name: specs[name] for name in outer}
        whole = fsdp.gather(
            outer, outer_specs, dtype=dtype, reduce_dtype=jnp.dtype(precision.reduce_dtype)
        )
        return {**params, **whole}

    return gather


def default_loss_chunk(vocab_shard: int) -> int:
    """Tokens whose logits exist at once where the settings leave it open; 0 = all."""
    return max(128, _LOGITS_BYTES // (4 * vocab_shard)) if vocab_shard else 0
