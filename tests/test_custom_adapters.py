"""Adapters of custom models: equal on every mesh, merged, verified, and rejected if impossible."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import (
    MESHES,
    ROWS,
    SEQ,
    VOCAB,
    adapter_run,
    batches,
    check_mesh,
    named,
    train,
    train_on,
)
from commands import run_here, tiny
from dot_model import FFN, LAYER, LAYERS, WIDTH
from refusals import refused

from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import RunConfig
from jaxdist.models import CustomConfig
from jaxdist.models.adapters import LoraConfig, merge, num_trained
from jaxdist.models.configs import CnnConfig
from jaxdist.optim import OptimConfig
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError
from jaxdist.tools.convert.__main__ import main as convert

FACTORY = "dot_model:build"
TARGETS = ["*/query", "*/out:2", "*/up", "*/down"]


def config_of(mesh="dp=1", *, args=None, microbatches=0, virtual=1, **lora) -> RunConfig:
    return adapter_run(
        "", rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches, virtual=virtual,
        model=CustomConfig(factory=FACTORY, args={"vocab": VOCAB, **(args or {})}),
        lora={"alpha": 16.0, "targets": TARGETS, "ranks": ["*/up=3"], **lora},
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """Return a function: (variant, whether layers are stacked) -> losses on one device."""
    return functools.cache(
        lambda variant, stacked: train(config_of(variant=variant, args={"stacked": stacked}))[0]
    )


@pytest.mark.parametrize(
    ("mesh", "variant", "stacked"),
    [
        ("fsdp=2,tp=2", "dora", True),
        ("pp=2,tp=2", "lora", True),
        ("fsdp=2,tp=2", "dora", False),  # XLA partitions the products
        pytest.param("fsdp=2,cp=2", "lora", True, marks=pytest.mark.product),
        pytest.param("dp=2,fsdp=2,pp=2", "dora", True, marks=pytest.mark.product),
        pytest.param("dp=4", "rslora", False, marks=pytest.mark.product),
    ],
)
def test_a_mesh_trains_the_same_adapters_as_one_device(alone, mesh, variant, stacked):
    config = config_of(mesh, variant=variant, args={"stacked": stacked}, **MESHES[mesh])
    _, _, before, after = check_mesh(config, alone(variant, stacked))
    leaves = jax.tree.leaves(jax.tree.map(np.array_equal, before, after))
    assert len(leaves) - sum(leaves) == num_arrays(variant)  # every array of adapters changed


def num_arrays(variant):
    return len(TARGETS) * (3 if variant == "dora" else 2)


@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_are_those_of_the_complete_weights(stacked):
    """With dW of the merged weight W + s·A·B: dA = s·dW·Bᵀ and dB = s·Aᵀ·dW."""
    config = config_of(args={"stacked": stacked}, alpha=8.0, ranks=[])
    plain = OptimConfig(
        optimizer="sgd", momentum=0.0, peak_lr=1.0, schedule="constant", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=0.0,
    )  # fmt: skip
    config = dataclasses.replace(config, optim=plain)
    _, _, before, after = train(config, steps=1)
    merged = jax.device_get(jax.jit(merge)(before))
    flat = {named(path): x for path, x in jax.tree_util.tree_leaves_with_path(merged)}
    start = lambda path, x: jnp.asarray(flat[named(path)])
    complete = dataclasses.replace(config, lora=LoraConfig())
    _, _, _, moved = train_on(complete, batches(), 1, start)
    body = "layers" if stacked else "body"
    for name in LAYER:
        own, new = (tree[body][name].adapters[f"{body}.{name}"] for tree in (before, after))
        a, b = (own[kind] if stacked else own[kind][None] for kind in "ab")
        layers, rank = a.shape[0], a.shape[-1]
        grad = (merged[body][name] - moved[body][name]).reshape(layers, *_matrix(a, b))
        flat_a, flat_b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
        expected = {
            "a": 2.0 * np.einsum("lio,lro->lir", grad, flat_b),
            "b": 2.0 * np.einsum("lir,lio->lro", flat_a, grad),
        }
        for kind, x in expected.items():
            ours = np.asarray(own[kind] - new[kind]).reshape(x.shape)
            np.testing.assert_allclose(ours, x, atol=2e-5 * np.abs(x).max(), err_msg=name)


def _matrix(a, b):
    return np.prod(a.shape[1:-1]), np.prod(b.shape[2:])


@pytest.mark.slow
def test_a_run_is_resumed_merged_and_verified(tmp_path, capsys):
    base, run, out = (tmp_path / name for name in ("base", "run", "merged"))
    job = [flag for flag in tiny("--train.steps=6") if not flag.startswith("--model")]
    model = ["--model=custom", f"--model.factory={FACTORY}", "--data.tokenizer=bytes"]
    assert run_here("train", *job, *model, "--run-dir", base) == 0
    lora = [f"--lora.targets={','.join(TARGETS)}", "--lora.rank=4", "--lora.variant=dora"]
    flags = ["--init-from", base, *lora, "--run-dir", run, "--mesh=fsdp=4,tp=2"]
    assert run_here("train", *job, *model, *flags) == 0
    more = ["--mesh=dp=2,pp=2,tp=2", "--train.steps=8", "--train.num_microbatches=2"]
    assert run_here("train", "--resume", run, *more) == 0
    assert convert(["merge", str(run), str(out)]) == 0
    stored = StoredArrays(run / "checkpoints" / "8")
    adapters = {name for name in stored.entries if name.startswith("params/")}
    assert len(adapters) == num_arrays("dora") and all("/adapters/" in n for n in adapters)
    capsys.readouterr()
    assert run_here("verify.__main__", run, "--json", "--export", out) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert all(checks[name]["is_done"] for name in ("gradients", "changes", "loading", "values"))
    with refused("decoders", "custom"):
        convert(["to-peft", str(run), str(tmp_path / "peft")])
    losses = []
    for folder in (run, out):
        run_here("evaluate", folder, "--json")
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # the base is stored in bf16


@pytest.mark.parametrize(
    ("lora", "args", "facts"),
    [
        (dict(targets=["layers/upp", "table:2"]), {}, ["layers/upp", "layers/up,", "1 to 1"]),
        (dict(ranks=["query=8"]), {}, ["query=8"]),
        (dict(targets=["layers/out"]), {}, ["layers.out", "first 1 dims", "layers/out:2"]),
        (dict(targets=["layers/up"]), {"skip_dot": True}, ["context.dot", "lora.targets"]),
        (dict(targets=["table"]), {}, ["context.dot"]),
        (dict(base_format="nf4", dropout=0.1, token_ids=[3]), {}, ["nf4", "dropout", "token_ids"]),
    ],
)
def test_adapters_that_are_impossible_are_rejected(lora, args, facts):
    config = config_of(args=args, **{"ranks": [], **lora})
    with pytest.raises(ConfigError) as caught:
        if problems := config.lora.run_problems(config.model):
            raise ConfigError(problems)
        parts = assemble(config, jax.devices()[:1])
        jax.eval_shape(parts.step.train, parts.abstract_state(), parts.abstract_batch(), np.inf)
    assert all(fact in str(caught.value) for fact in facts), caught.value


def test_other_models_and_running_averages_have_no_adapters():
    (problem,) = LoraConfig(rank=4).run_problems(CnnConfig())
    assert "Context.dot" in problem and "cnn" in problem


def test_flops_leave_out_gradients_of_frozen_targets():
    config = config_of(targets=["layers/up"], ranks=[])
    parts = assemble(config, jax.devices()[:1])
    targets, trained = LAYERS * WIDTH * FFN, LAYERS * 4 * (WIDTH + FFN)
    assert num_trained(parts.model) == trained
    assert parts.model.flops_per_token["causal"] == 1e6 + 6 * trained - 2 * targets
