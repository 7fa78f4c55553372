"""Frozen weights in NF4 and int8 blocks: values of bitsandbytes, meshes, PEFT, merged weights."""

import dataclasses
import functools
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import (
    ROWS,
    SEQ,
    VOCAB,
    adapter_run,
    batches,
    check_equal_to_peft,
    check_mesh,
    named,
    train,
)
from commands import run_here
from decoders import FAMILIES
from hf_models import rewrite_tensors, write_model
from refusals import refused

from jaxdist.config import RunConfig
from jaxdist.core.block_weights import BLOCK, DYNAMIC, NF4, BlockLayout
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.weights import base_of
from jaxdist.models.adapters import LoraConfig, merge
from jaxdist.models.huggingface.families import family_of
from jaxdist.models.huggingface.tensors import pieces
from jaxdist.models.weights import num_params
from jaxdist.run.setup import assemble
from jaxdist.run.trained_run import open_run
from jaxdist.tools.convert.__main__ import main as convert

WIDTH = 2 * BLOCK  # each of two shards of every dim has a block
SIZES = dict(vocab_size=VOCAB, max_seq_len=SEQ, d_model=WIDTH, num_heads=2, mlp_dim=2 * WIDTH)


def reference(w: np.ndarray) -> dict[str, np.ndarray]:
    """Quantize a tensor [outputs, inputs] as bitsandbytes does on CPUs, written in float64.

    Blocks and groups of 256 scales follow the flattened tensor; only rounding to float32 matters.
    """
    blocks = w.astype(np.float32).reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(1)
    middles = (NF4[1:] + NF4[:-1]) / np.float32(2)
    codes = np.searchsorted(middles, blocks * (np.float32(1) / absmax)[:, None])
    mean = np.float32(absmax.astype(np.float64).mean())
    rest = absmax - mean
    ranges = np.array([np.abs(rest[i : i + 256]).max() for i in range(0, len(rest), 256)])
    ranges = np.repeat(ranges, 256)[: len(rest)]
    # On CPUs, shares are rounded to 65,536 steps first.
    shares = np.floor((rest / ranges + 1) * 32767.5 + 0.5) / 32767.5 - 1
    scale = np.abs(DYNAMIC[None] - shares[:, None]).argmin(1)
    return {
        "codes": codes.reshape(w.shape),
        "values": (NF4[codes] * (DYNAMIC[scale] * ranges + mean)[:, None]).reshape(w.shape),
    }


def unpacked(codes: np.ndarray) -> np.ndarray:
    pairs = np.stack([codes >> 4, codes & 15], 2)
    return pairs.reshape(codes.shape[0], -1, *codes.shape[2:])


def tensors(array: str, w: np.ndarray) -> list[np.ndarray]:
    """Split an array [*inputs, *outputs] of a layer into Hugging Face's tensors [outputs, inputs].

    Heads of queries, keys and values are apart in Hugging Face's tensors.
    """
    if array == "qkv":
        split = [w[:, :, :-2], w[:, :, -2:-1], w[:, :, -1:]]
    elif array == "up":
        split = [w[:, :1], w[:, 1:]]
    else:
        split = [w.reshape(-1, w.shape[-1])]
    return [x.reshape(x.shape[0], -1).T for x in split]


SHAPES = {  # sizes of one layer: 24 blocks per output, so that groups of 256 scales end inside rows
    "qkv": ((1536,), (2, 4, 12), (2, 1, 1), 1),
    "up": ((1536,), (2, 56), (1, 1), 0),
    "out": ((24, 64), (56,), (56,), 0),
}


@pytest.mark.parametrize("array", SHAPES)
def test_nf4_has_the_values_of_bitsandbytes(array):
    inputs, outputs, parts, dim = SHAPES[array]
    random = np.random.default_rng(3)
    w = random.standard_normal((2, *inputs, *outputs)).astype(np.float32)
    w *= np.exp(random.standard_normal((2, *[1] * len(inputs), *outputs))).astype(np.float32)
    made = jax.jit(BlockLayout("nf4", inputs, parts, dim).quantize)(w)
    codes, values = unpacked(np.asarray(made.codes)), np.asarray(made.astype(jnp.float32))
    for layer in range(2):
        expected = [reference(x) for x in tensors(array, w[layer])]
        flat = (len(codes[layer]), *outputs)
        ours = tensors("out" if array == "out" else array, codes[layer].reshape(flat))
        for code, value, other in zip(ours, tensors(array, values[layer]), expected, strict=True):
            np.testing.assert_array_equal(code, other["codes"])
            # A mean of another order of sums moves every scale by a last bit, and may move a scale
            # in the middle of two codes to the other one.
            assert np.mean(np.abs(value - other["values"]) > 1e-6 * np.abs(value).max()) < 1e-3
            np.testing.assert_allclose(value, other["values"], rtol=0.05, atol=1e-6)


def test_codes_equal_a_file_of_bitsandbytes():
    """The file was written by bitsandbytes 0.50.2 on a CPU, from weights [8, 160]."""
    stored = np.load(Path(__file__).parent / "nf4_bitsandbytes.npz")
    np.testing.assert_array_equal(NF4, stored["nf4"])
    np.testing.assert_array_equal(DYNAMIC, stored["dynamic"])
    w = stored["weights"].reshape(1, -1, 1)
    quantize = jax.jit(BlockLayout("nf4", (w.size,), (1,), 0).quantize)
    made = jax.device_get(quantize(w))
    pack = lambda made: np.asarray(made.codes).reshape(-1, 1)
    np.testing.assert_array_equal(pack(made), stored["codes"])
    np.testing.assert_array_equal(
        pack(quantize(jnp.asarray(w, jnp.bfloat16))), stored["codes_of_bfloat16"]
    )
    np.testing.assert_array_equal(made.scales["absmax"].reshape(-1), stored["absmax"])
    # PyTorch's mean adds in another order: one unit in the last place, which moves the range too.
    np.testing.assert_allclose(made.scales["mean"].item(), stored["mean"], rtol=2e-7)
    np.testing.assert_allclose(made.scales["range"].max(), stored["range"][0], rtol=1e-6)


@pytest.mark.parametrize("base_format", ["nf4", "int8"])
def test_each_expert_is_quantized_by_itself(base_format):
    w = np.random.default_rng(5).standard_normal((2, 3, 192, 2, 5)).astype(np.float32)
    layout = BlockLayout(base_format, (192,), (1, 1), 0)
    made = dataclasses.replace(layout, has_experts=True).quantize(jnp.array(w))
    for expert in range(3):
        alone = layout.quantize(jnp.array(w[:, expert]))
        ours = jax.tree.map(lambda x, i=expert: x[:, i], made)
        jax.tree.map(np.testing.assert_array_equal, ours, alone)
        values = made.astype(jnp.float32)[:, expert]
        np.testing.assert_array_equal(values, alone.astype(jnp.float32))


def test_int8_rounds_to_127_steps_of_the_largest_weight_of_a_block():
    w = np.random.default_rng(4).standard_normal((2, 192, 3)).astype(np.float32)
    w[0, :64, 1] = 0
    made = jax.device_get(jax.jit(BlockLayout("int8", (192,), (3,), 0).quantize)(w))
    blocks = w.reshape(2, 3, 64, 3)
    step = np.abs(blocks).max(2, keepdims=True) / 127
    expected = np.round(blocks / np.where(step > 0, step, 1)) * step
    np.testing.assert_allclose(made.astype(jnp.float32), expected.reshape(w.shape), rtol=1e-6)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")

    def make(family="qwen3"):
        path = folder / family
        if not path.exists():
            sizes = {**SIZES, "head_dim": BLOCK} if family == "qwen3" else SIZES
            config = dataclasses.replace(FAMILIES[family], num_layers=2, **sizes)
            write_model(path, config, scale=0.1)
        return path

    return functools.cache(make)


def config_of(path, mesh="dp=1", microbatches=0, **lora) -> RunConfig:
    return adapter_run(
        path, rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches,
        lora={"base_format": "nf4", **lora},
    )  # fmt: skip


SLOW = pytest.param("fsdp=2,pp=2", "int8", {"microbatches": 2}, marks=pytest.mark.product)
CASES = [("fsdp=2,tp=2", "nf4", {}), SLOW]
MORE_CASES = [
    (mesh, base_format, {"microbatches": 2} if "pp" in mesh else {})
    for mesh in ("dp=2", "fsdp=2", "tp=2", "pp=2", "dp=2,cp=2", "pp=2,tp=2",
                 "dp=2,fsdp=2,tp=2", "cp=2,tp=2", "pp=2,cp=2", "dp=2,fsdp=2,pp=2")
    for base_format in ("nf4", "int8")
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(base):
    def run(base_format):
        losses, parts, before, _ = train(config_of(base(), base_format=base_format))
        return losses, parts.base["digest"], base_of(before)

    return functools.cache(run)


@pytest.mark.parametrize(
    "mesh, base_format, options",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.product) for case in MORE_CASES)],
)
def test_a_mesh_has_the_same_quantized_weights_and_losses(base, alone, mesh, base_format, options):
    losses, digest, expected = alone(base_format)
    config = config_of(base(), mesh, base_format=base_format, **options)
    _, parts, before, after = check_mesh(config, losses)
    for tree in (before, after):  # every bit, before and after training
        jax.tree.map(np.testing.assert_array_equal, base_of(tree), expected)
    assert parts.base["digest"] == digest


def test_gathers_move_the_stored_bytes(base):
    """Compare the all-gathers of the layers' weights in the compiled program with their arrays."""
    parts = assemble(config_of(base(), "fsdp=2", targets=["q_proj"]), jax.devices()[:2])
    step = parts.step.train.lower(parts.abstract_state(), parts.abstract_batch(), np.inf).compile()
    gathered = set(re.findall(r"= \(?(u8\[[\d,]*\]).*? all-gather(?:-start)?\(", step.as_text()))
    state = parts.abstract_state().params["layers"]
    for part, array in (("attention", "out"), ("mlp", "up"), ("mlp", "down")):
        shape = ",".join(map(str, state[part][array].codes.shape[1:]))
        assert f"u8[{shape}]" in gathered, (part, array, gathered)


def test_shards_that_would_cut_a_block_are_rejected(base):
    with refused("fsdp=4", "d_model", "64", "quantized"):
        assemble(config_of(base(), "fsdp=4"), jax.devices()[:4])
    config = config_of(base())
    model = dataclasses.replace(config.model, mlp_dim=96)
    problems = config.lora.run_problems(model)
    assert len(problems) == 1 and "96" in problems[0] and "mlp/down" in problems[0]
    # Scales of 24 blocks of an output share their range in fours.
    model = dataclasses.replace(config.model, mlp_dim=24 * BLOCK)
    assert config.lora.block_units(model) == {"d_model": 64, "heads": 1, "mlp": 256}


def test_quantized_weights_count_once(base):
    config = config_of(base())
    dense = dataclasses.replace(config, lora=dataclasses.replace(config.lora, base_format="bf16"))
    assert num_params(config.build_model()) == num_params(dense.build_model())
    assert config.build_model().flops_per_token == dense.build_model().flops_per_token


# transformers 5.23 warns of what PEFT 0.21 calls.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    "family, variant",
    [("llama2", "lora"), pytest.param("gpt2", "dora", marks=pytest.mark.product)],
)
def test_twenty_steps_equal_peft_on_dequantized_weights(base, tmp_path, family, variant):
    config = config_of(base(family), variant=variant)
    trained = train(config)
    folder = tmp_path / "dequantized"
    shutil.copytree(config.init_from, folder)
    rewrite_tensors(folder, lambda values: values.update(in_hugging_face(config, trained[2])))
    check_equal_to_peft(config, trained, folder)


def in_hugging_face(config, params) -> dict[str, np.ndarray]:
    dense = jax.device_get(jax.jit(merge)(base_of(params)))
    flat = {f"params/{named(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(dense)}
    tensors = {}
    for piece in pieces(config.model, family_of(config.model)):
        x = np.asarray(flat[piece.name], np.float32)
        parts = piece.split(x if piece.layer is None else x[piece.layer])
        tensors |= dict(zip(piece.tensor_names, parts, strict=True))
    return tensors


@pytest.mark.slow
def test_from_training_to_merged_weights(base, tmp_path):
    """A run opens on another mesh with the same base, and merged weights compute the same."""
    run, merged = tmp_path / "run", tmp_path / "merged"
    flags = ["--lora.rank=4", "--lora.base-format=nf4", "--data.tokenizer=bytes",
             "--train.seq_len=32", "--train.global_batch_size=8", "--eval.final_max_batches=1",
             "--monitoring.tracker=", "--optim.peak_lr=0.05"]  # fmt: skip
    folder = tmp_path / "base"
    config = dataclasses.replace(FAMILIES["llama2"], num_layers=2, **{**SIZES, "vocab_size": 320})
    write_model(folder, config, scale=0.1)
    start = ["train", "--init-from", folder, "--run-dir", run, *flags, "--train.steps=3"]
    assert run_here(*start, "--mesh=dp=2,fsdp=2,tp=2") == 0
    assert convert(["merge", str(run), str(merged)]) == 0
    trained, complete = open_run(str(run)), open_run(str(merged))
    assert complete.parts.config.lora == LoraConfig()
    batch = {**next(batches()), "tokens": np.arange(ROWS * SEQ, dtype=np.int32).reshape(ROWS, SEQ)}
    losses = [
        float(
            one.parts.step.evaluate(
                one.weights().params, place_batch(batch, one.parts.step.batch_sharding)
            )["loss"]
        )
        for one in (trained, complete)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with refused("lora.base_format", "nf4", "int8"):
        run_here("train", "--resume", run, "--train.steps=5", "--lora.base-format=int8")
