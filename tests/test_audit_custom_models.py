"""Custom models with wrong sums are refused at the start of a run, with axis, line and fix."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import missing, refused
from test_block_sums import ROWS, SEQ, VOCAB, make_model

import jaxdist
from jaxdist.config import RunConfig
from jaxdist.core import collectives
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.data.packing import text_fields
from jaxdist.models import CustomConfig
from jaxdist.objectives import cross_entropy
from jaxdist.run import audit as deep
from jaxdist.run import startup
from jaxdist.run.audit import check_mesh, check_model
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError


def config_on(mesh, num_microbatches=1):
    return RunConfig(
        model=CustomConfig(factory="none:none"),
        mesh=MeshConfig(shape=mesh),
        train=TrainConfig(global_batch_size=ROWS, seq_len=SEQ, num_microbatches=num_microbatches),
    )


def scanned(layer):
    def head(params, _, batch, context):
        x = context.split(params["table"][batch["tokens"]])
        body = lambda x, weights: (layer(weights, x, context), None)
        x, _ = jax.lax.scan(body, x, params["layers"])
        return make_model().head(params, x, batch, context)

    return head


@scanned
def a_loop_without_its_sum(weights, x, context):
    return x + jnp.tanh(context.enter(x) @ weights["up"]) @ weights["down"]


@scanned
def a_branch_without_its_sum(weights, x, context):
    layer = lambda x: x + jnp.tanh(context.enter(x) @ weights["up"]) @ weights["down"]
    return jax.lax.cond(x[0, 0, 0] > 0, layer, lambda x: x, x)


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, dy: (dy @ kept[1].T, 0 * kept[1]))


@scanned
def a_backward_pass_without_its_sum(weights, x, context):
    return x + context.leave(jnp.tanh(product(x, weights["up"])) @ weights["down"])


def a_head_without_its_sum(params, _, batch, context):
    x = context.enter(params["table"][batch["tokens"]])
    return {}, {"loss": jnp.sum((x @ params["head"]) ** 2), "weight": jnp.sum(batch["weights"])}


def a_loop_that_starts_at_zeros(params, _, batch, context):
    x = params["table"][batch["tokens"]]
    total, _ = jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros(x.shape[1:]), x)
    return make_model().head(params, x + total, batch, context)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "head, axis, code, fix",
    [
        (a_loop_without_its_sum, "tensor", "lax.scan(body", "Context.leave"),
        (a_branch_without_its_sum, "tensor", "lax.cond(", "Context.leave"),
        (a_backward_pass_without_its_sum, "tensor", "", "Context.enter"),
        (a_head_without_its_sum, "tensor", "", "Context.sum"),
        (a_loop_that_starts_at_zeros, "data", "lax.scan(lambda total", "collectives.zeros_like"),
    ],
)
def test_a_model_that_jax_cannot_type_is_refused(head, axis, code, fix, num_microbatches):
    objective = (lambda *_: {}) if head is a_head_without_its_sum else cross_entropy
    model = dataclasses.replace(
        make_model(), head=head, objective=objective, block=None, embed=None, num_layers=0,
        sequence=False,
    )  # fmt: skip
    parts = assemble(config_on("dp=2,tp=2", num_microbatches), jax.devices()[:4], model=model)
    line = head.__code__.co_firstlineno
    if code:
        lines = Path(__file__).read_text().splitlines()
        line = next(number for number, text in enumerate(lines, 1) if code in text)
    with refused(f"over {axis}", f"{__file__}:{line}", code, fix) as error:
        check_mesh(parts)
    assert "pcast" not in str(error.value)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_the_sum_of_an_empty_array_is_no_omitted_sum(mesh):
    def block(params, x, aux, context):
        hidden = jnp.tanh(context.enter(x) @ params["up"])
        hidden = hidden + jnp.sum(hidden[:0])
        return x + jnp.sum(x[:0]) + context.leave(hidden @ params["down"]), {}

    model = dataclasses.replace(make_model(), block=block)
    parts = assemble(
        config_on(mesh), jax.devices()[: MeshSpec.parse(mesh).num_devices], model=model
    )
    assert check_mesh(parts).violations == []


def reduced_by(op):
    def block(params, x, aux, context):
        hidden = jnp.tanh(context.enter(x) @ params["up"])
        return x + collectives.all_reduce(hidden @ params["down"], "tensor", op), {}

    return block


def mean_of_own_tokens(params, x, aux, context):
    return x, {"aux_loss": jnp.mean(jax.nn.softmax(x @ params["router"])[..., 0] ** 2)}


FIELDS = text_fields(SEQ, packed=False)


@pytest.mark.parametrize(
    "block, mesh, value, axis",
    [
        (reduced_by("mean"), "tp=2", "layers/down", "tensor"),
        (mean_of_own_tokens, "dp=2", "'aux_loss'", "data"),
    ],
)
def test_a_mean_or_max_instead_of_a_sum_is_refused(block, mesh, value, axis):
    model = dataclasses.replace(make_model(), block=block, sequence=False)
    parts = assemble(config_on(mesh), jax.devices()[:2], model=model)
    assert check_mesh(parts).is_clean
    with pytest.raises(ConfigError) as error:
        check_model(parts, FIELDS, lambda seq_len: model)
    *others, problem = error.value.problems
    assert any(missing(line, value, f"over {axis}") == [] for line in others)
    assert missing(problem, f"mesh {mesh}", "--override=audit") == []


def test_a_maximum_instead_of_a_sum_is_refused_with_its_line():
    model = dataclasses.replace(make_model(), block=reduced_by("max"), sequence=False)
    parts = assemble(config_on("tp=2"), jax.devices()[:2], model=model)
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if '"tensor", op), {}' in text)
    with refused("omitted sum", f"{__file__}:{line}", "Context.leave"):
        check_mesh(parts)


ROW = {name: np.zeros(shape, dtype) for name, (shape, dtype) in FIELDS.items()}


def test_only_a_new_mesh_of_a_custom_model_is_compared(monkeypatch, tmp_path, capsys):
    compared, planted = [], []

    def differences(config, devices, *_):
        compared.append(config.mesh.shape)
        return planted

    monkeypatch.setattr(deep, "differences", differences)

    def start(name, mesh, **options):
        train = {"global_batch_size": 16, "seq_len": SEQ, "steps": 1}
        quiet = {"eval.interval_steps": 0, "monitoring.tracker": []}
        settings = {"train": train, "mesh": mesh, **quiet}
        jaxdist.train(settings, run_dir=tmp_path / name, progress=False, **options)
        return compared

    rows = [{**ROW, "weights": ROW["weights"] + 1}] * 64
    custom = {"model": make_model(), "data": rows}
    assert start("run", "dp=8", **custom) == ["dp=8"]
    assert "deep audit" in capsys.readouterr().out
    monkeypatch.setattr(startup, "fetch_weights", lambda config: 1 / 0)  # no run starts from here
    built_in = {"d_model": 8, "num_layers": 1, "num_heads": 1, "mlp_dim": 8, "vocab_size": VOCAB}
    for name, program in (("run", custom), ("other", {"model": built_in, "data": rows})):
        with pytest.raises(ZeroDivisionError):
            start(name, "dp=8", **program)
    assert compared == ["dp=8"]
    with pytest.raises(ZeroDivisionError):
        start("run", "dp=4,tp=2", **custom)
    assert compared == ["dp=8", "dp=4,tp=2"]
    planted.append(deep.MeshDifference(value="the sum 'loss'", relative=1.0, axes=("data",)))
    with refused("the sum 'loss'", "over data", "--override=audit", num_problems=2):
        start("new", "dp=8", **custom)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(deep, "MAX_OPERATIONS", 1)
    with pytest.raises(ZeroDivisionError):
        start("new", "dp=8", **custom)
    assert missing(capsys.readouterr().out, "audit --deep", "too many") == []


def test_held_out_rows_that_do_not_fit_the_model_are_refused_before_training(tmp_path):
    model = dataclasses.replace(make_model(), vocab_size=VOCAB)
    held = {**ROW, "targets": ROW["targets"] + VOCAB}
    settings = {"train": {"global_batch_size": 16, "seq_len": SEQ, "steps": 1}, "mesh": "dp=8"}
    with refused(f"{VOCAB + 1} tokens", f"vocab_size={VOCAB}"):
        jaxdist.train(
            settings, model=model, data=([ROW] * 64, [held] * 8), run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
