"""Adapters of experts against PEFT in PyTorch, one device, and complete weights."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
from adapter_runs import (
    ROWS,
    SEQ,
    VOCAB,
    adapter_run,
    batches,
    check_equal_to_peft,
    train,
    train_with_peft,
)
from decoders import VARIANTS
from hf_models import rewrite_tensors, write_model
from refusals import refused
from test_quantized import SIZES, in_hugging_face

from jaxdist.core.block_weights import BLOCK
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.weights import base_of, frozen
from jaxdist.models.adapters import LoraConfig, merge
from jaxdist.models.huggingface import peft as peft_format
from jaxdist.run.setup import assemble

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the directory of a model with random weights."""
    path = tmp_path_factory.mktemp("base") / FAMILY
    config = dataclasses.replace(VARIANTS[FAMILY], vocab_size=VOCAB, max_seq_len=SEQ)
    write_model(path, config, scale=0.1)
    return path


def config_of(path, mesh="dp=1", microbatches=0, **lora):
    """Return a run without balance loss, which PEFT's loss does not have."""
    lora = dict(targets=["attention", "mlp"], ranks=["q_proj=8"]) | lora
    run = adapter_run(path, rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches, lora=lora)
    router = {**run.model.router, "balance_loss": 0.0}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, router=router))


# transformers 5.23 warns of what PEFT 0.21 calls.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    "lora",
    [{}, pytest.param({"targets": ["down_proj"], "variant": "rslora"}, marks=pytest.mark.product)],
    ids=["all", "down"],
)
def test_twenty_steps_equal_peft_in_pytorch(base, lora):
    config = config_of(base, **lora)
    losses, _, before, after = train(config)
    expected, end = train_with_peft(config, base, before)
    check_equal_to_peft(config, losses, after, expected, end)
    assert losses[0] - losses[-1] != 0


@pytest.fixture(scope="module")
def alone(base):
    return functools.cache(lambda: train(config_of(base))[0])


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        ("fsdp=2,ep=2,tp=2", 0),
        pytest.param("pp=2,ep=2,cp=2", 2, marks=pytest.mark.product),
        pytest.param("dp=2,ep=2", 2, marks=pytest.mark.product),
    ],
)
def test_a_mesh_trains_the_same_adapters_as_one_device(base, alone, mesh, microbatches):
    losses, parts, before, after = train(config_of(base, mesh, microbatches))
    np.testing.assert_allclose(losses[0], alone()[0], rtol=1e-6)
    np.testing.assert_allclose(losses, alone(), rtol=2e-5)
    start, end = (frozen(tree, parts.model.axes) for tree in (before, after))
    jax.tree.map(np.testing.assert_array_equal, start, end)  # every bit of the base stayed


def test_merged_experts_compute_the_same_loss(base):
    config = config_of(base)
    _, parts, before, _ = train(config, steps=0)
    complete = assemble(dataclasses.replace(config, lora=LoraConfig()), jax.devices()[:1])
    batch = next(batches())
    losses = [
        float(one.step.evaluate(params, place_batch(batch, one.step.batch_sharding))["loss"])
        for one, params in ((parts, before), (complete, jax.jit(merge)(before)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_settings_and_tensors_survive_pefts_format(base):
    config = config_of(base, ranks=[])
    written = peft_format.write_config(config.model, config.lora, "base")
    assert written["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    again = peft_format.read_config(written, config.model, "dir")
    assert again.target_modules(config.model) == config.lora.target_modules(config.model)
    rng = np.random.default_rng(0)
    for module in peft_format.modules(config.model, config.lora):
        shapes = module.shapes(config.lora, 4)
        tensors = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        back = module.to_peft(module.from_peft(tensors))
        for name, x in tensors.items():
            np.testing.assert_array_equal(back[name], x)
    with refused("target_parameters has mlp.gate.weight", "mlp.experts.gate_up_proj"):
        other = {**written, "target_parameters": ["mlp.gate.weight"]}
        peft_format.read_config(other, config.model, "dir")


@pytest.mark.parametrize("lora", [{"variant": "dora"}, {"dropout": 0.1}])
def test_adapters_of_experts_have_neither_dropout_nor_dora(base, lora):
    config = config_of(base, **lora)
    (problem,) = config.lora.run_problems(config.model)
    assert "gate_up_proj, down_proj" in problem and "--lora.targets attention" in problem
    attention = dataclasses.replace(config.lora, targets=["attention"])
    assert attention.run_problems(config.model) == []


def test_adapters_of_routers_and_shared_experts_are_rejected(base):
    config = config_of(base, targets=["mlp.gate", "mlp.shared_expert.up_proj"], ranks=[])
    problems = config.lora.run_problems(config.model)
    assert len(problems) == 2
    assert all("routers and shared experts" in p and "gate_up_proj" in p for p in problems)


def test_flops_count_the_experts_of_a_token(base):
    """Adapters of attention save the weight gradients of active weights, a third of the work."""
    config = config_of(base, targets=["attention"], ranks=[])
    adapted, complete = (
        run.build_model().flops_per_token["causal"]
        for run in (config, dataclasses.replace(config, lora=LoraConfig()))
    )
    assert 0.6 * complete < adapted < complete


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return the directory of a model whose widths are multiples of a block."""
    path = tmp_path_factory.mktemp("wide") / FAMILY
    write_model(path, dataclasses.replace(VARIANTS[FAMILY], **SIZES, head_dim=BLOCK), scale=0.1)
    return path


@pytest.fixture(scope="module")
def alone_quantized(wide):
    return functools.cache(lambda base_format: train(config_of(wide, base_format=base_format)))


@pytest.mark.parametrize(
    ("mesh", "base_format", "microbatches"),
    [
        ("dp=2,ep=2,tp=2", "nf4", 0),
        pytest.param("pp=2,ep=2,tp=2", "int8", 2, marks=pytest.mark.product),
    ],
)
def test_a_mesh_has_the_same_quantized_experts(
    wide, alone_quantized, mesh, base_format, microbatches
):
    losses, _, expected, _ = alone_quantized(base_format)
    trained, _, before, after = train(config_of(wide, mesh, microbatches, base_format=base_format))
    up = before["layers"]["mlp"]["up"].base
    assert up.codes.dtype == ("uint8" if base_format == "nf4" else "int8")
    for tree in (before, after):  # every bit, before and after training
        jax.tree.map(np.testing.assert_array_equal, base_of(tree), base_of(expected))
    np.testing.assert_allclose(trained[0], losses[0], rtol=1e-6)
    np.testing.assert_allclose(trained, losses, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_quantized_experts_equal_peft_on_dequantized_weights(wide, alone_quantized, tmp_path):
    config = config_of(wide, base_format="nf4")
    losses, _, before, after = alone_quantized("nf4")
    folder = tmp_path / "dequantized"
    shutil.copytree(config.init_from, folder)
    rewrite_tensors(folder, lambda values: values.update(in_hugging_face(config, before)))
    expected, end = train_with_peft(config, folder, before)
    check_equal_to_peft(config, losses, after, expected, end)
