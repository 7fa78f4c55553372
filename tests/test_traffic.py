"""The compiled collectives of each strategy move exactly the bytes of the theory.

Theory (complete arrays, float32; M microbatches; Rajbhandari et al. 2020, Korthikanti et al. 2022):

    data      one all-reduce of the gradients a step, for any M
    ZeRO-1    one reduce-scatter of the gradients, one all-gather of the new parameters
    ZeRO-2    a reduce-scatter per microbatch, one all-gather of the new parameters
    ZeRO-3    per microbatch: layers gathered forward and again backward, gradients
    = fsdp    reduce-scattered; embedding and head gathered once a step (the compiler moves their
              gathers out of the loop over microbatches)
    tensor    per layer and microbatch, forward and backward alike, with sequence parallelism: two
              all-gathers and two reduce-scatters of the activations; without: two all-reduces

Vectors (norm scales, biases) are never sharded by data or fsdp: one all-reduce a step.
"""

import math
import re
from collections import Counter

import jax
import pytest
from tiny import ROWS, SEQ, Case, initial_state, layout_of, model_of, step_of, text_batch

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.plan.compiled.collectives import read_collectives
from jaxdist.plan.compiled.hlo import UnknownHLO

TENSOR_DIMS = {"vocab", "heads", "kv_heads", "mlp"}


def lowered(case: Case, **options):
    step, state = step_of(case, **options)
    return step.train.lower(state, jax.device_put(text_batch(), step.batch_sharding), math.inf)


def traffic(text: str, mesh: dict[str, int]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (kind, "data+fsdp") -> (instructions run, bytes of complete arrays), per step.

    Raises:
        UnknownHLO: an instruction is unknown, or a collective may or may not run.
    """
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for c in read_collectives(text, mesh):
        if c.in_branch:
            raise UnknownHLO(f"collectives inside a conditional: {c}")
        key = (c.kind, "+".join(c.axes))
        count, moved = totals.get(key, (0, 0))
        totals[key] = (count + c.count, moved + c.count * c.bytes)
    return totals


def parameter_bytes(case: Case) -> Counter:
    """Return the bytes of one tensor device's part: layer matrices, other matrices, and vectors."""
    spec, model = MeshSpec.parse(case.mesh), model_of(case.model)
    total = Counter()
    leaves = jax.tree_util.tree_leaves_with_path(model.axes)
    for (path, dims), value in zip(
        leaves, jax.tree.leaves(initial_state(case.model).params), strict=True
    ):
        split = spec["tensor"] if TENSOR_DIMS & set(dims) else 1
        is_matrix = "d_model" in dims and len(set(dims) - {"layers"}) > 1
        kind = ("layers" if path[0].key == "layers" else "outer") if is_matrix else "vector"
        kind += "_split" if not is_matrix and split > 1 else ""
        total[kind] += value.nbytes // split
    return total


def theory(case: Case) -> dict[tuple[str, str], int]:
    spec, size = MeshSpec.parse(case.mesh), parameter_bytes(case)
    matrices = size["layers"] + size["outer"]
    moved: Counter = Counter()

    def add(kind: str, axes: tuple[str, ...], amount: int) -> None:
        axes = tuple(axis for axis in axes if spec.sizes[axis] > 1)
        if axes:
            moved[kind, "+".join(axes)] += amount

    shard = ("data", "fsdp") if case.zero == 3 else ("fsdp",)
    add("all-gather", shard, 2 * case.microbatches * size["layers"] + size["outer"])
    add("reduce-scatter", shard, case.microbatches * matrices)

    if case.zero == 0:
        add("all-reduce", ("data",), matrices // spec["fsdp"])
    elif case.zero < 3:
        times = case.microbatches if case.zero == 2 else 1
        add("reduce-scatter", ("data",), times * matrices // spec["fsdp"])
        add("all-gather", ("data",), matrices // spec["fsdp"])

    sequence = case.sequence and spec["tensor"] > 1
    everyone = ("data", "fsdp", "tensor") if sequence else ("data", "fsdp")
    add("all-reduce", everyone, size["vector"])
    add("all-reduce", ("data", "fsdp"), size["vector_split"])

    rows = ROWS // spec.num_replicas
    activations = 4 * rows * SEQ * 32
    num_layers = model_of(case.model).num_layers
    # Embedding and head once, each layer twice; forward and backward.
    times = 2 * (1 + 2 * num_layers)
    if sequence:
        add("all-gather", ("tensor",), times * activations)
        add("reduce-scatter", ("tensor",), times * activations)
    else:
        add("all-reduce", ("tensor",), times * activations)
    # Sharded vocabulary: largest logit, sum of exponentials, target's logit of each token.
    add("all-reduce", ("tensor",), 3 * 4 * rows * SEQ)
    return {key: amount for key, amount in moved.items() if amount}


CASES = [
    Case("rotary", "dp=8"),
    Case("rotary", "dp=4", microbatches=4),
    Case("rotary", "dp=4", zero=1, microbatches=2),
    Case("rotary", "dp=4", zero=2, microbatches=2),
    Case("rotary", "dp=4", zero=3, microbatches=2),
    Case("rotary", "fsdp=4", microbatches=2),
    Case("rotary", "dp=2,fsdp=4"),
    Case("rotary", "dp=2,fsdp=4", zero=1),
    Case("rotary", "tp=4"),
    Case("rotary", "tp=4", sequence=False),
    Case("rotary", "dp=2,fsdp=2,tp=2", microbatches=2),
    pytest.param(Case("rotary", "dp=2,fsdp=2,tp=2", zero=1), marks=pytest.mark.slow),
    pytest.param(Case("rotary", "dp=2,fsdp=2,tp=2", zero=3), marks=pytest.mark.slow),
    pytest.param(Case("rotary", "dp=2,tp=4", zero=2, microbatches=2), marks=pytest.mark.slow),
]
"""`test_estimate_traffic` compiles these and compares them with their theory and the estimate."""


def test_data_parallelism_is_one_collective_per_step():
    case = Case("rotary", "dp=2", microbatches=4)
    totals = traffic(lowered(case).compile().as_text(), layout_of(case).mesh_spec.sizes)
    assert [(kind, count) for (kind, _), (count, _) in totals.items()] == [("all-reduce", 1)]


@pytest.mark.parametrize("setting, reduced", [("auto", "bf16"), ("float32", "f32")])
def test_weights_are_gathered_in_the_compute_dtype_and_gradients_in_reduce_dtype(setting, reduced):
    """By default gradients keep the dtype of their product."""
    # In the traced program: XLA:CPU widens every bfloat16 collective to float32, GPUs do not.
    precision = PrecisionConfig(compute_dtype="bfloat16", reduce_dtype=setting)
    text = lowered(Case("rotary", "fsdp=2"), precision=precision).as_text()
    gathered = re.findall(r'"stablehlo.all_gather".*-> tensor<[\dx]*(\w+)>', text)
    assert set(gathered) == {"bf16"}
    scattered = re.findall(r'"stablehlo.reduce_scatter"(?:.|\n)*?-> tensor<[\dx]*(\w+)>', text)
    assert set(scattered) == {reduced}
