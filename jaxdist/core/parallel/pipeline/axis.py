"""The pipeline axis: each device holds the layers of one stage; microbatches pass through all."""

from __future__ import annotations

from jaxdist.core.axis import Axis, Workload, allowed_sizes


def _problems(size: int, workload: Workload) -> list[str]:
    num_layers = workload.dims.get("layers", 0)
    if not num_layers:
        return [
            f"mesh pp={size}: this model has no stacked layers to cut into stages. "
            "Use pp=1 and give the devices to another axis."
        ]
    total = size * workload.num_virtual_stages
    if workload.num_virtual_stages == 1 or not num_layers % total:
        return []
    allowed = "1" if num_layers % size else allowed_sizes(num_layers // size)
    return [
        f"mesh pp={size} × pipeline.num_virtual_stages={workload.num_virtual_stages} cuts the "
        f"model into {total} virtual stages, which do not divide {workload.named('layers')}. "
        f"Use pipeline.num_virtual_stages={allowed}, or {-(-num_layers // total) * total} layers."
    ]


PIPELINE = Axis(
    name="pipeline",
    short="pp",
    help="stages of layers",
    moves="activations and their gradients between stages, once per microbatch",
    weights="split",
    dims=("layers",),
    # Only the first stage embeds and only the last computes the loss.
    sums_gradients="always",
    sums_loss=True,
    complexity=3,
    divides="each stage holds an equal number of layers",
    problems=_problems,
)
