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
    check_equal_to_peft,
    check_merged,
    check_mesh,
    train,
)
from decoders import VARIANTS
from hf_models import rewrite_tensors, write_model
from refusals import refused
from test_quantized import SIZES, in_hugging_face

from jaxdist.core.block_weights import BLOCK
from jaxdist.core.weights import base_of as base_weights
from jaxdist.models.adapters import LoraConfig
from jaxdist.models.huggingface import peft as peft_format

FAMILY = "qwen3_moe"
MIXED = dict(num_layers=5, dense_layers=[0, 1, 3], dense_mlp_dim=40, num_experts=4)
MODELS = {
    FAMILY: VARIANTS[FAMILY],
    # A dense first layer, then a block of a dense layer and one with experts and a shared one.
    "mixed": dataclasses.replace(VARIANTS["qwen2_moe"], **MIXED),
    "dots1": VARIANTS["dots1"],
    "gpt_oss": VARIANTS["gpt_oss"],
}
EVERY = {
    "targets": ["attention", "mlp", "router", "shared_expert_gate"],
    "ranks": ["mlp.down_proj=2", "down_proj=3", "shared_expert.down_proj=5", "router=1"],
}
LINEAR = {"targets": ["attention", "mlp.up_proj", "mlp.down_proj", "shared_expert.up_proj"]}
CASES = {
    "all": (FAMILY, {}),
    "mixed": ("mixed", EVERY),
    "down": (FAMILY, {"targets": ["down_proj"], "variant": "rslora"}),
    "dora": ("mixed", {**LINEAR, "variant": "dora", "ranks": []}),
    "dots1": ("dots1", {"targets": ["gate_up_proj", "router"], "ranks": ["router=2"]}),
    "gpt_oss": ("gpt_oss", {"targets": ["attention", "router"]}),
}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """Return a function: name in `MODELS` -> directory of the model with random weights."""
    folder = tmp_path_factory.mktemp("base")

    def make(name):
        if not (folder / name).exists():
            config = dataclasses.replace(MODELS[name], vocab_size=VOCAB, max_seq_len=SEQ)
            write_model(folder / name, config, scale=0.1)
        return folder / name

    return make


@pytest.fixture(scope="module")
def base(base_of):
    return base_of(FAMILY)


def config_of(path, mesh="dp=1", microbatches=0, **lora):
    """Return a run without balance loss, which PEFT's loss does not have."""
    lora = dict(targets=["attention", "mlp"], ranks=["q_proj=8"]) | lora
    run = adapter_run(path, rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches, lora=lora)
    router = {**run.model.router, "balance_loss": 0.0}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, router=router))


# transformers 5.23 warns of what PEFT 0.21 calls; PEFT uses ranks of parameters, but warns of them.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize(
    "case", [*[*CASES][:2], *(pytest.param(n, marks=pytest.mark.product) for n in [*CASES][2:])]
)
def test_twenty_steps_equal_peft_in_pytorch(base_of, case):
    name, lora = CASES[case]
    config = config_of(base_of(name), **lora)
    check_equal_to_peft(config, train(config), base_of(name))


@pytest.fixture(scope="module")
def alone(base_of):
    run = lambda name, dropout: train(config_of(base_of(name), **MESH_LORA[name, dropout]))[0]
    return functools.cache(run)


DROPPING = {**LINEAR, "ranks": [], "dropout": 0.3}
MESH_LORA = {(FAMILY, 0): {}, ("mixed", 0): EVERY, ("mixed", 1): DROPPING}


@pytest.mark.parametrize(
    ("mesh", "microbatches", "name", "dropout"),
    [
        ("fsdp=2,ep=2,tp=2", 0, "mixed", 0),
        *(
            pytest.param(*case, marks=pytest.mark.product)
            for case in [
                ("fsdp=2,ep=2,tp=2", 0, FAMILY, 0),
                ("pp=2,ep=2,cp=2", 2, FAMILY, 0),
                ("dp=2,ep=2", 2, FAMILY, 0),
                ("pp=2,ep=2,cp=2", 2, "mixed", 0),
                ("pp=2,tp=2", 4, "mixed", 0),
                ("fsdp=4", 0, "mixed", 0),
                ("dp=2,cp=2", 2, "mixed", 0),
                ("pp=2,tp=2", 2, "mixed", 1),
                ("fsdp=2,cp=2", 0, "mixed", 1),
            ]
        ),
    ],
)
def test_a_mesh_trains_the_same_adapters_as_one_device(
    base_of, alone, mesh, microbatches, name, dropout
):
    config = config_of(base_of(name), mesh, microbatches, **MESH_LORA[name, dropout])
    check_mesh(config, alone(name, dropout))


@pytest.mark.parametrize(("name", "lora"), [(FAMILY, {}), ("mixed", EVERY)])
def test_merged_experts_compute_the_same_loss(base_of, name, lora):
    check_merged(config_of(base_of(name), **lora))


@pytest.mark.parametrize("name", ["mixed", "dots1"])
def test_settings_and_tensors_survive_pefts_format(base_of, name):
    lora = EVERY if name == "mixed" else dict(targets=["mlp", "router"], ranks=["mlp.up_proj=8"])
    config = config_of(base_of(name), **lora)
    written = peft_format.write_config(config.model, config.lora, "base")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert written["target_parameters"] == ["mlp.gate.weight", *experts]
    shared = f"shared_expert{'s' * (name == 'dots1')}.up_proj"
    assert {"mlp.up_proj", shared} <= {*written["target_modules"]}
    again = peft_format.read_config(written, config.model, "dir")
    assert again.target_modules(config.model) == config.lora.target_modules(config.model)
    # PEFT takes names of other modules for those of experts, but not in the family of "mixed".
    assert bool(peft_format.rename_problems(config.model, config.lora)) == (name == "dots1")
    ends = peft_format.read_config({**written, "target_modules": ["down_proj"]}, config.model, "d")
    assert {"mlp.down_proj", "shared_expert.down_proj"} < {*ends.targets}
    linear = {**written, "target_modules": "all-linear", "target_parameters": None}
    linear = peft_format.read_config(linear, config.model, "dir").targets
    assert ("shared_expert_gate" in linear) == (name == "mixed") and "router" not in linear
    ranks = config.lora.target_modules(config.model)
    rng = np.random.default_rng(0)
    for module in peft_format.modules(config.model, config.lora):
        shapes = module.shapes(config.lora, ranks[module.target])
        tensors = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        back = module.to_peft(module.from_peft(tensors))
        for name, x in tensors.items():
            np.testing.assert_array_equal(back[name], x)
    with refused("target_parameters has mlp.gate.bias", "mlp.experts.gate_up_proj"):
        other = {**written, "target_parameters": ["mlp.gate.bias"]}
        peft_format.read_config(other, config.model, "dir")


@pytest.mark.parametrize("lora", [{"variant": "dora"}, {"dropout": 0.1}])
def test_adapters_of_experts_have_neither_dropout_nor_dora(base, lora):
    config = config_of(base, **lora)
    (problem,) = config.lora.run_problems(config.model)
    assert "gate_up_proj, down_proj" in problem and "--lora.targets attention" in problem
    attention = dataclasses.replace(config.lora, targets=["attention"])
    assert attention.run_problems(config.model) == []


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
    path = tmp_path_factory.mktemp("wide") / "mixed"
    sizes = {**SIZES, "head_dim": BLOCK, "dense_mlp_dim": 4 * BLOCK, "shared_expert_dim": 4 * BLOCK}
    write_model(path, dataclasses.replace(MODELS["mixed"], **sizes), scale=0.1)
    return path


@pytest.fixture(scope="module")
def alone_quantized(wide):
    run = lambda base_format: train(config_of(wide, base_format=base_format, **EVERY))
    return functools.cache(run)


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
    config = config_of(wide, mesh, microbatches, base_format=base_format, **EVERY)
    _, _, before, after = check_mesh(config, losses)
    for layer in (before["first_layers"]["0"], *before["layers"].values()):
        up = layer["mlp"]["up"].base
        assert up.codes.dtype == ("uint8" if base_format == "nf4" else "int8")
    for tree in (before, after):  # every bit, before and after training
        jax.tree.map(np.testing.assert_array_equal, base_weights(tree), base_weights(expected))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
def test_quantized_experts_equal_peft_on_dequantized_weights(wide, alone_quantized, tmp_path):
    config = config_of(wide, base_format="nf4", **EVERY)
    trained = alone_quantized("nf4")
    folder = tmp_path / "dequantized"
    shutil.copytree(config.init_from, folder)
    rewrite_tensors(folder, lambda values: values.update(in_hugging_face(config, trained[2])))
    check_equal_to_peft(config, trained, folder)
