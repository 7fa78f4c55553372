"""In compiled programs of simulated meshes no collective can overtake a loop or a branch.

Checked in the compiler's output: within each computation, every loop or branch that contains
collectives must reach, or be reached from, every other collective by data dependence.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pipeline_parity
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import (
    Case,
    layout_of,
    model_of,
    optimizer,
    place_state,
    plan_of,
    schedule,
    step_of,
    text_batch,
)

from jaxdist.core import collectives
from jaxdist.core.collective_order import in_order
from jaxdist.core.step import Optimizer, gradients, make_step
from jaxdist.objectives.preference import REFERENCE, Preference
from jaxdist.plan.compiled import hlo
from jaxdist.run import text_generation

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def unordered(text: str) -> list[tuple[str, str]]:
    """Return (loop or branch, other collective) of each pair without a dependence."""
    module, bearing = hlo.parse(text), {}

    def moves(name: str) -> bool:
        if name not in bearing:
            bearing[name] = any(
                x.opcode in KINDS or any(map(moves, module.called(x)))
                for x in module.computations[name]
            )
        return bearing[name]

    pairs = []
    for instructions in module.computations.values():
        bit = {x.name: 1 << i for i, x in enumerate(instructions)}
        before: dict[str, int] = {}  # the instructions that an instruction depends on, as bits
        for x in instructions:
            read = [name for name in x.operand_names if name in before]
            before[x.name] = functools.reduce(
                operator.or_, (before[name] | bit[name] for name in read), 0
            )
        control = [
            x.name
            for x in instructions
            if x.opcode not in KINDS and any(map(moves, module.called(x)))
        ]
        others = [x.name for x in instructions if x.opcode in KINDS] + control
        pairs += [
            (a, b)
            for a in control
            for b in others
            if a != b and not (bit[a] & before[b] or bit[b] & before[a])
        ]
    return pairs


def compiled(function, *arguments) -> str:
    return function.lower(*arguments).compile().as_text()


def train_and_evaluate(mesh: str, **options) -> list[str]:
    made, state = step_of(Case("rotary", mesh, **options))
    batch = jax.device_put(text_batch(), made.batch_sharding)
    return [
        compiled(made.train, state, batch, np.inf),
        compiled(made.evaluate, state.params, batch),
    ]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param("dp=2,tp=2", {}, marks=pytest.mark.product),
        pytest.param("fsdp=4,tp=2", {}, marks=pytest.mark.product),
        ("dp=2,fsdp=2,tp=2", {"microbatches": 2}),
        ("dp=4", {"zero": 2, "microbatches": 2}),
        pytest.param("dp=4", {"zero": 3}, marks=pytest.mark.product),
    ],
)
def test_collectives_of_training_and_evaluation_are_ordered(mesh, options):
    assert [unordered(text) for text in train_and_evaluate(mesh, **options)] == [[], []]


PIPELINES = [
    pytest.param(
        "pp=2,dp=2,fsdp=2;microbatches=3;virtual=2;family=gpt2;rows=12",
        marks=pytest.mark.product,  # half a minute to compile
    ),
    "pp=2,tp=2,fsdp=2;virtual=2",
    pytest.param("pp=2,tp=2;automatic=True", marks=pytest.mark.product),
    "fsdp=2,tp=2;automatic=True",
]


@pytest.mark.parametrize("case", PIPELINES)
def test_collectives_of_pipelines_and_automatic_axes_are_ordered(case):
    parsed = pipeline_parity.parse(case)
    function, arguments = pipeline_parity.lowered(parsed)
    assert unordered(compiled(function, *arguments)) == []


@pytest.mark.parametrize("is_precomputed", [False, True])
def test_collectives_of_several_forward_passes_are_ordered(is_precomputed):
    """Passes of the reference and of mismatched answers do not depend on each other."""
    objective = Preference("kto", 0.1, is_precomputed=is_precomputed)
    case = Case("rotary", "dp=2,tp=2")
    model = dataclasses.replace(model_of(case.model), objective=objective)
    layout, batch = layout_of(case), text_batch(packed=False)
    batch |= {f"kl_{name}": batch[name] for name in ("tokens", "targets", "weights")}
    batch["labels"] = np.arange(len(batch["tokens"]), dtype=np.int32) % 2
    if is_precomputed:
        batch |= dict.fromkeys((REFERENCE, f"kl_{REFERENCE}"), np.ones(len(batch["tokens"]), "f4"))
    step = make_step(
        model, objective, Optimizer(optimizer(), schedule), layout, plan_of(model, layout)
    )
    text = compiled(
        step.evaluate, place_state(case).params, jax.device_put(batch, step.batch_sharding)
    )
    assert unordered(text) == []


def test_the_pass_that_measures_layers_runs_after_the_step():
    step, state = step_of(Case("rotary", "dp=2,tp=2"), layer_statistics_steps=1)
    batch = jax.device_put(text_batch(), step.batch_sharding)
    assert unordered(compiled(step.train, state, batch, np.inf)) == []


def test_removing_dependences_leaves_unordered_pairs(monkeypatch):
    monkeypatch.setattr(gradients, "in_order", lambda function, hidden: function)
    assert all(unordered(text) for text in train_and_evaluate("fsdp=4,tp=2"))
    parsed = pipeline_parity.parse(PIPELINES[1])
    function, arguments = pipeline_parity.lowered(parsed)
    assert unordered(compiled(function, *arguments))


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 2), ("data", "fsdp"), devices=jax.devices()[:4])


def loops_and_branches(x, flags, keys):
    """Use collectives inside and next to a scan, a while loop and a branch, on several dtypes."""
    first = collectives.all_reduce(flags.astype(jnp.int32), "fsdp")
    total, each = lax.scan(
        lambda c, y: (c + collectives.all_reduce(y, "fsdp").sum(), c), jnp.zeros(()), x
    )
    beside = collectives.all_reduce(x, "data")
    rounds = lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, collectives.permute(c[1], "fsdp")), (0, x)
    )[1]
    chosen = lax.cond(
        lax.axis_index("data") == 0,
        lambda: collectives.all_reduce(x, "fsdp"),
        lambda: collectives.all_reduce(2 * x, "fsdp"),
    )
    drawn = jax.random.split(keys)[0]
    last = collectives.all_reduce(first.astype(jnp.float32), "data")
    return total, each, beside, rounds, chosen, jax.random.key_data(drawn), last


def test_ordering_keeps_values(mesh):
    arguments = (
        jax.random.normal(jax.random.key(0), (6, 5)),
        jnp.arange(3) > 1,
        jax.random.key(1),
    )

    def run(function):
        manual = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(manual)

    plain, ordered = run(loops_and_branches), run(in_order(loops_and_branches))
    for a, b in zip(plain(*arguments), ordered(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)
    assert unordered(compiled(plain, *arguments))
    assert unordered(compiled(ordered, *arguments)) == []


def gathers_of_an_unrolled_loop(x, weights):
    """Gather what a loop scans over; XLA unrolls the loop, as that of a stage with one layer."""
    each = lambda c, y: (c + collectives.all_reduce(y * c, "fsdp"), None)
    layer = lambda c, w: (c * collectives.all_gather(w, "fsdp").sum(), None)
    return lax.scan(each, x[0], x)[0], lax.scan(layer, x[1], weights)[0]


def test_a_loop_that_xla_unrolls_stays_in_order(mesh):
    manual = jax.shard_map(
        in_order(gathers_of_an_unrolled_loop),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    text = compiled(jax.jit(manual), jnp.ones((9, 4)), jnp.ones((1, 4)))
    assert unordered(text) == []


def test_collectives_of_generation_are_ordered(monkeypatch):
    case, hidden_flags = Case("rotary", "fsdp=2,tp=2"), []

    def spy(function, *, hidden):
        hidden_flags.append(hidden)
        return in_order(function, hidden=hidden)

    monkeypatch.setattr("jaxdist.run.text_generation.in_order", spy)
    model, layout, (_, state) = model_of("rotary"), layout_of(case), step_of(case)
    greedy = text_generation.TextSettings(temperature=0.0)
    decoder = text_generation.Decoder(model, state.params, layout, plan_of(model, layout), greedy)
    assert len(list(decoder.tokens([np.arange(4), np.arange(2)], max_new_tokens=3))) == 3
    assert hidden_flags == [True]
