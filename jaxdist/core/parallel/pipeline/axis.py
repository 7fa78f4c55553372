"""The pipeline axis: each device holds the layers of one stage; microbatches pass through all."""

from __future__ import annotations

from jaxdist.core.axis import Axis, Workload


def _problems(size: int, workload: Workload) -> list[str]:
    num_layers = workload.dims.get("layers", 0)
    if not num_layers:
        return [
            f"mesh pp={size}: this model has no stacked layers to cut into stages. "
            "Use pp=1 and give the devices to another axis."
        ]
    depths = workload.layers_per_stage
    virtual = workload.num_virtual_stages or max(1, len(depths) // size)
    layers = workload.named("layers")
    most = -(-num_layers // size)
    if size > num_layers:
        return [
            f"mesh pp={size}: some stages of {layers} would have no layer. "
            f"Use pp={num_layers} or less."
        ]
    if virtual > most:
        return [
            f"mesh pp={size} × pipeline.num_virtual_stages={virtual} cuts {layers} "
            f"into {size * virtual} virtual stages, one layer or none in each. Use "
            f"pipeline.num_virtual_stages={most} or less."
        ]
    if depths and (len(depths) != size * virtual or sum(depths) != num_layers):
        return [
            f"pipeline.layers_per_stage={','.join(map(str, depths))} has {sum(depths)} layers in "
            f"{len(depths)} virtual stages. Name {size * virtual} numbers (pp={size} × "
            f"num_virtual_stages={virtual}) with the sum {layers}, or auto."
        ]
    return []


PIPELINE = Axis(
    name="pipeline",
    short="pp",
    help="stages of layers",
    moves="activations and their gradients between stages, for each microbatch",
    weights="split",
    dims=("layers",),
    # Only the first stage embeds and only the last computes the loss.
    sums_gradients="always",
    sums_loss=True,
    complexity=3,
    problems=_problems,
)
