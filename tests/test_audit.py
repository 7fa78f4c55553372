"""The mesh audit rejects planted faults by axis, parameter and line, and accepts correct steps."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import audit_mutants
import jax
import jax.numpy as jnp
import pytest
from commands import run
from jax.sharding import PartitionSpec as P
from refusals import missing, refused
from test_block_sums import WIDTH, make_batch, make_model, make_parts
from test_block_sums import Case as BlockCase

from jaxdist import runtime, train
from jaxdist.config import RunConfig, read_run
from jaxdist.core import collectives
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig, make_value_and_grad
from jaxdist.models import CnnConfig, DecoderConfig
from jaxdist.plan.audit import audit_program, step
from jaxdist.plan.audit.states import (
    CONSTANT,
    EQUAL,
    INDEX,
    PARTIAL,
    ROW,
    VARYING,
    ZERO,
    join,
    split,
)
from jaxdist.plan.audit.step import find_manual
from jaxdist.run import startup
from jaxdist.run.audit import audit_parts, check_mesh, differences
from jaxdist.run.program import Program
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError
from jaxdist.tools.audit import __main__ as command


def parts_of(mesh="dp=2,tp=2", *, model=None, zero=0, sequence=True, **train):
    config = RunConfig(
        model=model
        or DecoderConfig(
            d_model=32, num_layers=4, num_heads=4, mlp_dim=64, vocab_size=64, bias=["out"]
        ),
        mesh=MeshConfig(shape=mesh, zero=zero),
        train=TrainConfig(
            **{"global_batch_size": 32, "seq_len": 16, "num_microbatches": 2, **train}
        ),
    )
    built = config.build_model()
    built = dataclasses.replace(built, sequence=built.sequence and sequence)
    return assemble(config, jax.devices()[: MeshSpec.parse(mesh).num_devices], model=built)


def test_join_is_commutative_and_adds_no_claim():
    states = [ZERO, CONSTANT, EQUAL, INDEX, PARTIAL, VARYING, split(0), split(0, 1), split(2)]
    states += [split(0) | ROW, split(0, 1) | ROW]
    for a, b in itertools.product(states, repeat=2):
        assert join(a, b) == join(b, a)
        assert join(a, join(a, b)) == join(a, b)
        assert join(ZERO, a) == a and join(VARYING, a) == VARYING
    assert join(PARTIAL, EQUAL) == VARYING
    assert join(split(0), split(2)) == VARYING and join(split(0, 1), split(0)) == split(0)


@pytest.mark.parametrize(
    "mesh, options",
    [
        ("dp=4", {"zero": 1}),
        ("dp=4", {"zero": 3}),
        ("dp=2,fsdp=2,tp=2", {}),
        ("dp=2,fsdp=2,tp=2", {"sequence": False, "zero": 2}),
        ("pp=2,dp=2,tp=2", {}),
        ("cp=2,fsdp=2,tp=2", {}),
        ("fsdp=4,tp=2", {"model": CnnConfig(mlp_dim=32)}),
        (
            "dp=2,tp=2",
            {
                "model": DecoderConfig(
                    d_model=32, num_layers=2, num_heads=4, mlp_dim=64, vocab_size=64, dropout=0.1,
                    positions="learned", tie_embeddings=True, attention_dropout=0.1, max_seq_len=16,
                )
            },
        ),
    ],
)  # fmt: skip
def test_correct_step_has_no_violation(mesh, options):
    audit = audit_parts(parts_of(mesh, **options))
    assert audit.violations == []
    assert audit.num_parameters and audit.transfers


def test_one_row_per_device_has_no_false_positive():
    """A reshape that drops the batch dim leaves one term of the gradient's sum over rows."""
    model = ["--model=custom", "--model.factory", "jaxdist.models.example:build"]
    flags = [*model, "--mesh", "dp=8", "--train.global_batch_size", "8", "--train.seq_len", "16"]
    assert audit_parts(assemble(read_run(flags, command="test"), jax.devices())).violations == []


@pytest.mark.parametrize(
    "mesh, sequence, kind",
    [
        ("tp=2", False, "omitted"),
        ("dp=2,fsdp=2", True, "wrong axis"),
        ("fsdp=4", True, "bfloat16"),
    ],
)
def test_fault_at_any_collective_is_rejected(mesh, sequence, kind):
    """`scripts/bench/audit_mutants.py` plants every kind on every mesh."""
    counts, survivors = audit_mutants.try_case(
        audit_mutants.Case(mesh, sequence=sequence), kinds=(kind,)
    )
    assert survivors == []
    assert counts[kind, "audit"] > 0


def test_violation_reports_axis_parameter_line_and_fix(monkeypatch):
    real = collectives.reduce_scatter
    halved = lambda x, axes, dim=0: real(collectives.all_reduce(x, axes), axes, dim)
    monkeypatch.setattr(collectives, "reduce_scatter", halved)
    [violation] = [
        v
        for v in audit_parts(parts_of("dp=2", zero=1)).violations
        if v.value == "the gradient of layers/mlp/down"
    ]
    assert (violation.kind, violation.axis) == ("summed twice", "data")
    assert f"{Path(__file__).name}:" in violation.line and violation.fix


def counted_on_every_device(params, x, aux, context):
    """A sum of the result of `enter`: all tensor devices hold the same value and each counts it."""
    y, sums = make_model().block(params, x, aux, context)
    gates = jax.nn.softmax(context.enter(x) @ params["router"])
    return y, {**sums, "first_gate": jnp.sum(gates[..., 0])}


def bias_on_every_device(params, x, aux, context):
    """A bias that every device adds before the sum over devices."""
    del aux
    hidden = jnp.tanh(context.enter(x) @ params["up"])
    return x + context.leave(hidden @ params["down"] + params["router"][:, 0]), {}


def never_summed(params, x, aux, context):
    """A row-parallel product without its all-reduce; the shapes still match."""
    del aux
    hidden = jnp.tanh(context.enter(x) @ params["up"])
    return x + context.split(hidden @ params["down"]), {}


def summed_after_the_nonlinearity(params, x, aux, context):
    """A nonlinear function of each device's term of the sum."""
    del aux
    return x + context.leave(jnp.tanh(context.enter(x) @ params["up"] @ params["down"])), {}


def gathered_then_summed(params, x, aux, context):
    """The hidden units are gathered, and the result computed from all of them is summed again."""
    del aux
    hidden = jnp.tanh(context.enter(x) @ params["up"])
    gathered = collectives.all_gather(hidden, "tensor", dim=2)
    return x + context.leave(gathered @ jnp.ones((gathered.shape[2], x.shape[2]))), {}


def parts_added(params, x, aux, context):
    """Each device's hidden units, added to the different hidden units of the other devices."""
    del aux
    added = collectives.all_reduce(jnp.tanh(context.enter(x) @ params["up"]), "tensor")
    return x + context.split(added), {}


def never_gathered(params, x, aux, context):
    """Each device multiplies its own positions by its own weight columns; the rest is missing."""
    del aux, context
    return x + jnp.tanh(x @ params["up"]) @ params["down"], {}


def a_sum_on_one_device_alone(params, x, aux, context):
    """A sum inside a branch that only the first device of the axis takes."""
    y, sums = make_model().block(params, x, aux, context)
    summed = lambda term: collectives.vary(collectives.all_reduce(term, "tensor"), "tensor")
    is_first = jax.lax.axis_index("tensor") == 0
    total = jax.lax.cond(is_first, summed, lambda term: term, jnp.sum(x))
    return y, {**sums, "first_gate": sums["first_gate"] + total}


def mean_of_means(params, x, aux, context):
    """A balance loss divided by this device's own weight."""
    del context
    gates = jax.nn.softmax(x @ params["router"])
    weights = aux["weights"][..., None]
    balance = jnp.sum(weights * gates**2) / jnp.sum(weights)
    return x, {"aux_loss": balance, "first_gate": jnp.sum(gates[..., 0])}


@pytest.mark.parametrize(
    "block, mesh, sequence, kind, axis",
    [
        (counted_on_every_device, "tp=2", False, "summed twice", "tensor"),
        (counted_on_every_device, "tp=2", True, "gathered, then summed", "tensor"),
        (bias_on_every_device, "dp=2,tp=2", True, "omitted sum", "tensor"),
        (bias_on_every_device, "tp=2", False, "omitted sum", "tensor"),
        (never_summed, "tp=2", True, "omitted sum", "tensor"),
        (summed_after_the_nonlinearity, "tp=2", True, "omitted sum", "tensor"),
        (gathered_then_summed, "tp=2", True, "gathered, then summed", "tensor"),
        (parts_added, "tp=2", True, "parts added", "tensor"),
        (never_gathered, "tp=2", True, "missing gather", "tensor"),
        (a_sum_on_one_device_alone, "tp=2", True, "different order", "tensor"),
        (mean_of_means, "dp=4", False, "omitted sum", "data"),
        (mean_of_means, "pp=2,dp=2", False, "omitted sum", "data"),
    ],
)
def test_wrong_custom_model_is_rejected(block, mesh, sequence, kind, axis):
    model, layout, *rest = make_parts(BlockCase(mesh, sequence=sequence))
    model = dataclasses.replace(model, block=block)
    violations = audit_of(model, layout, *rest).violations
    assert (kind, axis) in {(v.kind, v.axis) for v in violations}
    assert any(f"{Path(__file__).name}:" in v.line for v in violations)


def audit_of(model, layout, plan, context):
    function = make_value_and_grad(model, layout, plan, context)
    params = jax.eval_shape(model.init, jax.random.key(0))
    program = jax.make_jaxpr(function)(params, make_batch(), jax.random.key(0), jnp.float32(1))
    return audit_program(program.jaxpr, model, layout)


def own_value(x):
    return jnp.square(collectives.mark_device_local(jnp.sum(x)))


def test_intentionally_device_local_value_passes():
    model, layout, *rest = make_parts(BlockCase("dp=4"))
    plain = lambda params, x, aux, context: (x, {"spread": jnp.square(jnp.sum(x))})
    meant = lambda params, x, aux, context: (x, {"spread": own_value(x)})
    for block, is_clean in ((plain, False), (meant, True)):
        audit = audit_of(dataclasses.replace(model, block=block), layout, *rest)
        assert audit.is_clean == is_clean


def test_traffic_table_counts_collectives_and_bytes():
    audit = audit_parts(parts_of("fsdp=4"))
    moved = {(t.purpose, t.kind): t for t in audit.transfers}
    gathers = moved["parameter gather", "all-gather"]
    matrices = 4 * (32 * 3 * 4 * 8 + 4 * 8 * 32 + 3 * 32 * 64)
    # Two microbatches, forward and backward; the table and the head are gathered once each.
    assert gathers.num_bytes == 4 * 2 * (2 * matrices + 2 * 64 * 32)
    scattered = moved["gradient reduction, sharded", "reduce-scatter"]
    assert scattered.num_bytes == 4 * 2 * (matrices + 2 * 64 * 32)
    assert not gathers.at_most and gathers.axes == ("fsdp",)


@pytest.mark.parametrize("is_printed", [False, True])
def test_unused_values_are_not_communicated(is_printed):
    def backward(x, dy):
        y, pull = jax.vjp(lambda x: collectives.all_gather(2 * x, "tensor"), x)
        if is_printed:
            jax.debug.print("{}", y[0])
        return pull(collectives.vary(dy, "tensor"))[0]

    mesh, split = MeshSpec(tensor=2).build(jax.devices()[:2]), P("tensor")
    mapped = jax.shard_map(backward, mesh=mesh, in_specs=(split, P()), out_specs=split)
    traced = jax.make_jaxpr(mapped)(jnp.ones(8), jnp.ones(8)).jaxpr
    body = find_manual(traced).params["jaxpr"]
    moved = {t.kind for t in step.transfers_of(body, {"tensor": 2})}
    assert moved == {"reduce-scatter", *(["all-gather"] if is_printed else [])}


@pytest.mark.parametrize("file", ["context_parallel.py", "ring.py"])
def test_attention_traffic_is_named_in_every_file(file):
    package = Path(step.__file__).parents[2]
    frame = SimpleNamespace(
        file_name=str(package / "core" / "attention" / file), line_num=1, function_name="send"
    )
    equation = SimpleNamespace(
        primitive=SimpleNamespace(name="ppermute"),
        source_info=SimpleNamespace(traceback=SimpleNamespace(frames=[frame])),
    )
    assert step.purpose_of(equation) == "attention over split rows"


def test_command_prints_one_json_object_and_exits_with_0():
    done = run("audit", "--mesh=pp=2,tp=2", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["violations"] == [] and record["mesh"] == "pp=2,tp=2"
    assert {"tensor", "pipeline"} == {axis for t in record["transfers"] for axis in t["axes"]}
    scatters = [t for t in record["transfers"] if t["kind"] == "reduce-scatter"]
    # 9 ticks of forwards and 9 of backwards, each through 4 layers with 2 scatters; the embedding
    # adds one to each forward, the head to each backward.
    assert sum(t["times"] for t in scatters) == 2 * 9 * (1 + 2 * 4)


SMALL = [
    *("--model.d_model=32", "--model.num_heads=4", "--model.num_layers=2", "--model.mlp_dim=64"),
    *("--train.global_batch_size=8", "--train.seq_len=16", "--mesh=dp=2"),
]


all_reduce, permute = collectives.all_reduce, collectives.permute


def doubled(x, axes, op="sum"):
    return all_reduce(all_reduce(x, axes, op), axes, op)


def test_removed_flag_names_its_replacement():
    with refused("compiled", "removed", "audit_sound.py"):
        command.main(["--mesh=fsdp=2", "--compiled"])


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_deep_detects_wrong_formula_behind_right_collective(monkeypatch, capsys, factor):
    monkeypatch.setattr(runtime, "simulate", lambda count: None)

    def wrong(x, axes, op="sum"):
        return all_reduce(x, axes, op) * (factor if op == "sum" and x.ndim else 1.0)

    monkeypatch.setattr(collectives, "all_reduce", wrong)
    assert command.main([*SMALL, "--deep", "--json"]) == (0 if factor == 1 else 2)
    record = json.loads(capsys.readouterr().out)
    assert record["violations"] == []
    gradients = [one for one in record["differences"] if "layers/mlp" in one["value"]]
    assert {tuple(one["axes"]) for one in gradients} == (set() if factor == 1 else {("data",)})


def test_deep_takes_quantized_weights_and_objectives_that_add_fields(tmp_path):
    (tmp_path / "a.jsonl").touch()
    flags = ["--objective.kind=kto", "--data.records=labeled", f"--data.sources={tmp_path}"]
    flags += ["--model.d_model=64", "--model.num_layers=1", "--train.seq_len=8", "--mesh=dp=2"]
    flags += ["--model.mlp_dim=64", "--lora.rank=2", "--lora.base_format=nf4"]
    assert differences(read_run(flags, command="test"), jax.devices()[:2]) == []


@pytest.mark.slow
def test_deep_reports_an_axis_on_which_tracing_fails(monkeypatch):
    """jax's own types reject an exchange over another axis if only the pipeline axis is traced."""
    monkeypatch.setattr(collectives, "permute", lambda x, axis, shift=1: permute(x, "data", shift))
    config = read_run([*SMALL[:-1], "--mesh=pp=2,dp=2"], command="test")
    result = differences(config, jax.devices())
    assert {one.axes for one in result if "layers" in one.value} == {("pipeline",)}


def test_rejected_run_starts_only_with_override(monkeypatch):
    class Reached(Exception):
        """Raised if the run continues past the audit."""

    def reached(config):
        raise Reached

    monkeypatch.setattr(collectives, "all_reduce", doubled)
    monkeypatch.setattr(startup, "fetch_weights", reached)
    job = SimpleNamespace(host_of={}, process_id=0)
    monkeypatch.setattr(train, "start_devices", lambda *_: job)
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    start = lambda *flags: train.run(
        read_run([*SMALL, *flags], command="test"), Program(), None, lambda: False
    )
    with pytest.raises(ConfigError) as refused:
        start()
    assert any(missing(line, "summed twice", "data") == [] for line in refused.value.problems)
    with pytest.raises(ConfigError):
        start("--override=memory")
    with pytest.raises(Reached):
        start("--override=audit")


def a_loop_from_a_literal(params, x, aux, context):
    """A nonlinear function of a device's own count, in a loop whose counter starts at a literal."""
    del params, aux, context
    count = jnp.bincount((x[..., 0] > 0).astype(jnp.int32).reshape(-1), length=WIDTH)
    add = lambda c: (c[0] + 1, c[1] + jnp.maximum(c[0] + jnp.cumsum(count), 0))
    count = jax.lax.while_loop(lambda c: c[0] < 3, add, (jnp.int32(0), count * 0))[1]
    return x + count.astype(x.dtype), {}


def test_violation_in_loop_with_literal_start_is_reported():
    model, layout, *rest = make_parts(BlockCase("dp=2"))
    report = audit_of(dataclasses.replace(model, block=a_loop_from_a_literal), layout, *rest)
    assert {(v.kind, v.axis) for v in report.violations} == {("omitted sum", "data")}


def test_internal_audit_error_stops_the_run(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("internal")

    monkeypatch.setattr("jaxdist.plan.audit.step.transfers_of", fail)
    for check in (check_mesh, audit_parts):
        with pytest.raises(ConfigError) as error:
            check(parts_of("dp=2"))
        [problem] = error.value.problems
        assert missing(problem, "ZeroDivisionError: internal", "--override=audit", "dp=2") == []


def test_value_without_dtype_does_not_stop_the_audit():
    model, layout, *rest = make_parts(BlockCase("dp=2"))

    def head(params, x, batch, context):
        jax.lax.after_all(jax.lax.create_token(x))
        return model.head(params, x, batch, context)

    audit = audit_of(dataclasses.replace(model, head=head), layout, *rest)
    assert audit.is_clean and audit.axes == {"data": 2}
