"""Adapters against PEFT in PyTorch, one device, and complete weights."""

import dataclasses
import functools
import itertools
import math
import re
import signal
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import (
    MESHES,
    RATE,
    ROWS,
    SEQ,
    VOCAB,
    adapter_run,
    batches,
    check_equal_to_peft,
    check_merged,
    check_mesh,
    train,
)
from commands import Fork, losses, records, run_here
from decoders import FAMILIES
from hf_models import rewrite_tensors, write_model
from refusals import refused

from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import RunConfig
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.types import Context
from jaxdist.core.weights import frozen
from jaxdist.models.adapted_weights import LoraWeight, TokenRows, keep_mask, with_dropout
from jaxdist.models.adapters import LoraConfig, num_trained
from jaxdist.models.huggingface import peft as peft_format
from jaxdist.run.setup import assemble
from jaxdist.settings import problems_of
from jaxdist.tools.convert.__main__ import main as convert


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """Return a function: family -> directory of a model with random weights."""
    folder = tmp_path_factory.mktemp("base")

    def make(family):
        path = folder / family
        if not path.exists():
            config = FAMILIES.get(family) or dataclasses.replace(FAMILIES["qwen3"], num_layers=4)
            config = dataclasses.replace(config, vocab_size=VOCAB, max_seq_len=SEQ)
            write_model(path, config, scale=0.1)
        return path

    return make


def config_of(path, mesh="dp=1", microbatches=0, virtual=1, **lora) -> RunConfig:
    return adapter_run(
        path, rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches, virtual=virtual,
        lora=lora,
    )  # fmt: skip


CASES = {
    "llama2": dict(
        targets=["attention", "mlp"],
        ranks=["q_proj=8", "down_proj=2"],
        variant="rslora",
        token_ids=[7, 95, 2],
    ),
    "gpt2": dict(targets=["attention", "mlp"], variant="dora", token_ids=[95, 3]),
    "qwen2": dict(targets=["q_proj", "v_proj", "gate_proj"]),
}


# transformers 5.23 warns of what PEFT 0.21 calls.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    "family",
    ["gpt2", *(pytest.param(name, marks=pytest.mark.product) for name in ("llama2", "qwen2"))],
)
def test_twenty_steps_equal_peft_in_pytorch(base_of, family):
    config = config_of(base_of(family), **CASES[family])
    check_equal_to_peft(config, train(config), base_of(family))


MESH_LORA = dict(ranks=["v_proj=3"], token_ids=[90, 3])  # on both devices of tp=2


@pytest.fixture(scope="module")
def alone(base_of):
    return functools.cache(
        lambda variant: train(config_of(base_of("mesh"), **MESH_LORA, variant=variant))[0]
    )


@pytest.mark.parametrize(
    "mesh, variant",
    [
        ("fsdp=2,tp=2", "dora"),
        pytest.param("pp=2,cp=2", "lora", marks=pytest.mark.product),
        *(
            pytest.param(mesh, variant, marks=pytest.mark.product)
            for mesh, variant in itertools.product([*MESHES][2:], ["lora", "dora"])
        ),
    ],
)
def test_a_mesh_trains_the_same_adapters_as_one_device(base_of, alone, mesh, variant):
    options = MESHES[mesh]
    config = config_of(base_of("mesh"), mesh, **MESH_LORA, variant=variant, **options)
    _, parts, before, after = check_mesh(config, alone(variant))
    changed = jax.tree.map(lambda x, y: not np.array_equal(x, y), before, after)
    base = jax.tree.leaves(frozen(after, parts.model.axes))
    assert sum(jax.tree.leaves(changed)) == len(jax.tree.leaves(after)) - len(base)


def test_no_byte_of_the_base_is_reduced(base_of):
    parts = assemble(config_of(base_of("mesh"), "dp=2"), jax.devices()[:2])
    step = parts.step.train.lower(parts.abstract_state(), parts.abstract_batch(), np.inf).compile()
    results = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)\(", step.as_text())
    shapes = re.findall(r"f32\[([\d,]*)\]", " ".join(results))
    reduced = sum(math.prod(int(d) for d in dims.split(",") if d) for dims in shapes)
    number = num_trained(parts.model)
    assert number <= reduced <= number + 64  # and scalars


FLAGS = [
    "--lora.rank=4", "--lora.variant=dora", "--lora.base_format=float32", "--data.tokenizer=bytes",
    "--train.seq_len=32", "--train.global_batch_size=8", "--eval.final_max_batches=1",
    "--monitoring.tracker=", "--model.vocab_size=320",
]  # fmt: skip


def last_logits(model, torch) -> np.ndarray:
    tokens = torch.from_numpy(next(batches())["tokens"]).long()
    with torch.no_grad():
        return model(tokens).logits.numpy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_from_training_to_peft_and_merged_weights(tmp_path):
    """Adapters survive a resume on another mesh and every export, with equal logits."""
    base, run = tmp_path / "base", tmp_path / "run"
    config = dataclasses.replace(FAMILIES["llama2"], vocab_size=320, num_layers=4)
    write_model(base, config, scale=0.1)
    start = ["--init-from", base, "--run-dir", run, *FLAGS, "--optim.peak_lr=0.05"]
    assert run_here("train", *start, "--mesh=dp=2,fsdp=2,tp=2", "--train.steps=6") == 0
    more = ["--mesh=dp=2,cp=2,pp=2", "--pipeline.num_virtual_stages=2", "--train.steps=8"]
    assert run_here("train", "--resume", run, *more) == 0
    stored = StoredArrays(run / "checkpoints" / "8")
    adapters = {name for name in stored.entries if name.startswith("params/")}
    assert adapters and all("/adapters/" in name for name in adapters)

    assert convert(["to-peft", str(run), str(tmp_path / "peft")]) == 0
    assert convert(["from-peft", str(tmp_path / "peft"), str(tmp_path / "again")]) == 0
    imported = StoredArrays(tmp_path / "again" / "checkpoints" / "0")
    assert adapters == imported.entries.keys()
    for name in adapters:
        np.testing.assert_array_equal(stored.read(name), imported.read(name), err_msg=name)
    assert convert(["merge", str(run), str(tmp_path / "merged")]) == 0
    assert convert(["to-hf", str(tmp_path / "merged"), str(tmp_path / "hf")]) == 0
    with refused("to-peft", "merge"):
        convert(["to-hf", str(run), str(tmp_path / "no")])

    changed = lambda values: values.update({n: x * 1.01 for n, x in values.items() if "q_pr" in n})
    rewrite_tensors(base, changed)
    with refused("init-from", "other weights"):
        run_here("train", "--resume", run, "--train.steps=9", "--mesh=dp=8")
    rewrite_tensors(base, lambda values: values.update(
        {n: x / np.float32(1.01) for n, x in values.items() if "q_pr" in n}
    ))  # fmt: skip

    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    peft = pytest.importorskip("peft", reason="needs the reference extra (peft)")
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(base, dtype=torch.float32).eval()
    before = last_logits(plain, torch)
    with_adapters = last_logits(peft.PeftModel.from_pretrained(plain, tmp_path / "peft"), torch)
    merged = last_logits(load(tmp_path / "hf", dtype=torch.float32).eval(), torch)
    assert np.abs(with_adapters - before).max() > 0.05
    np.testing.assert_allclose(with_adapters, merged, atol=5e-6 * np.abs(merged).max())


@pytest.mark.slow
def test_a_killed_run_continues_on_another_mesh_as_if_undisturbed(tmp_path, monkeypatch):
    base, run, other = (tmp_path / name for name in ("base", "killed", "undisturbed"))
    config = dataclasses.replace(FAMILIES["llama2"], vocab_size=320, num_layers=4)
    write_model(base, config, scale=0.1)
    rate, steps = RATE, 8
    flags = [
        *FLAGS,
        "--init-from",
        base,
        "--data.sources=faulty_dataset:rows",
        f"--train.steps={steps}",
    ]
    flags += ["--mesh=dp=2,fsdp=2,tp=2", "--checkpoint.save_interval_steps=2"]
    flags += [f"--optim.peak_lr={rate}", "--optim.eps=1e-4", "--monitoring.log_interval_steps=1"]
    (tmp_path / "pace").write_text("0.1")  # of each row: the kill is in the middle
    arguments = map(str, [*flags, "--run-dir", run, "--simulate=8"])
    process = Fork("jaxdist.train", *arguments, FAULT_FOLDER=str(tmp_path))
    while process.poll() is None and not (run / "checkpoints" / "4").exists():
        time.sleep(0.05)
    process.kill()
    output = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert not (run / "checkpoints" / str(steps)).exists()

    monkeypatch.setenv("FAULT_FOLDER", str(tmp_path / "none"))
    more = ["--mesh=dp=2,cp=2,pp=2", "--pipeline.num_virtual_stages=2"]
    assert run_here("train", "--resume", run, *more) == 0
    (start,) = (e["step"] for e in records(run, "event") if e["event"] == "restore")
    assert 0 < start < steps
    assert run_here("train", *flags, "--run-dir", other) == 0
    ours, expected = (
        [float.fromhex(loss) for loss, _ in losses(folder).values()] for folder in (run, other)
    )
    assert len(ours) == steps
    np.testing.assert_allclose(ours, expected, rtol=2e-5)
    stored, undisturbed = (StoredArrays(f / "checkpoints" / str(steps)) for f in (run, other))
    assert stored.entries.keys() == undisturbed.entries.keys()
    assert stored.document["meta"]["base"] == undisturbed.document["meta"]["base"]
    for name in stored.entries:
        if name.startswith("params/"):
            # Adam divides small gradients by small numbers.
            x, y = stored.read(name), undisturbed.read(name)
            np.testing.assert_allclose(x, y, atol=2e-2 * steps * rate, err_msg=name)


def test_merged_weights_compute_the_same_logits(base_of):
    before = check_merged(config_of(base_of("qwen3"), variant="dora"))
    flat = jax.tree_util.tree_leaves(before, is_leaf=lambda x: isinstance(x, LoraWeight))
    assert sum(isinstance(x, LoraWeight) for x in flat) == 4


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_token_rows_need_no_index_per_weight(dim):
    """Without unique indices, jax differentiates a scatter with an integer array of its size."""
    base, rows = jnp.ones((50, 50), jnp.bfloat16), jnp.zeros((3, 50))
    # Device 1 of two has tokens 50 to 99.
    loss = lambda rows: jnp.sum(TokenRows(base, rows, (3, 60, 7), dim).complete(50) * 2.0)
    gradient = jax.make_jaxpr(jax.grad(loss))(rows)
    shapes = {(str(v.aval.dtype), v.aval.shape) for eqn in gradient.eqns for v in eqn.outvars}
    assert ("bfloat16", (50, 50)) in shapes
    assert not any("int" in dtype and math.prod(shape) >= base.size for dtype, shape in shapes)
    expected = np.zeros((3, 50))
    expected[1] = 2
    np.testing.assert_array_equal(jax.grad(loss)(rows), expected)


def test_invalid_settings_are_reported_together(base_of):
    config = config_of(base_of("llama2"), targets=["q_prj", "lm_head"], ranks=["v_proj", "x=3"])
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, freeze=["embed"]))
    problems = [*problems_of(config.lora, "lora"), *config.problems()]
    for name in ("q_prj", "q_proj", "lm_head", "'v_proj'", "'x'", "optim.freeze"):
        assert any(name in problem for problem in problems), name
    (group,) = LoraConfig(rank=4, ranks=["attention=8"]).run_problems(config.model)
    assert "q_proj" in group and "Did you mean attention" not in group
    alone = problems_of(LoraConfig(targets=["mlp"], alpha=2.0), "lora")
    assert len(alone) == 2 and all("lora.rank" in problem for problem in alone)


def test_peft_settings_that_are_not_supported_are_reported(base_of):
    config = config_of(base_of("llama2"))
    good = peft_format.write_config(config.model, config.lora, "base")
    assert peft_format.read_config(good, config.model, "dir").rank == 4
    for pattern in ("q_proj", "self_attn.q_proj", r"model.layers.\d.self_attn.q_proj"):
        ranked = peft_format.read_config({**good, "rank_pattern": {pattern: 8}}, config.model, "d")
        assert ranked.ranks == ["q_proj=8"]
    everything = {**good, "target_modules": "all-linear"}
    assert len(peft_format.read_config(everything, config.model, "dir").targets) == 7
    for key, value in (
        ("bias", "all"), ("modules_to_save", ["lm_head"]), ("new_key", 3),
        ("init_lora_weights", "pissa"), ("peft_type", "IA3"), ("target_modules", ["lm_head"]),
        ("layers_to_transform", [0]), ("alpha_pattern", {"q_proj": 3}),
    ):  # fmt: skip
        with refused(key if key != "target_modules" else "lm_head"):
            peft_format.read_config({**good, key: value}, config.model, "dir")
    for key, value in (
        ("r", "x"), ("lora_alpha", [3]), ("rank_pattern", ["q_proj"]), ("target_modules", [3]),
        ("target_modules", "("), ("target_parameters", 5), ("modules_to_save", True),
        ("rank_pattern", {"(": 3}),
        ("trainable_token_indices", 5), ("trainable_token_indices", ["x"]),
    ):  # fmt: skip
        with refused(f"{key}={value!r}"):
            peft_format.read_config({**good, key: value}, config.model, "dir")
    with refused("use_dora", "use_rslora"):
        both = {**good, "use_dora": True, "use_rslora": True}
        peft_format.read_config(both, config.model, "dir")


def test_kept_inputs_are_random_and_belong_to_their_indices():
    numbers = jnp.arange
    mask = np.asarray(keep_mask(jax.random.key(3), 0.3, numbers(8), numbers(64), numbers(96)))
    deviation = math.sqrt(0.3 * 0.7)
    assert abs(mask.mean() - 0.7) < 4 * deviation / math.sqrt(mask.size)
    for dim, size in enumerate(mask.shape):  # no row, position or input is dropped more often
        others = tuple(i for i in range(3) if i != dim)
        bound = 5 * deviation / math.sqrt(mask.size / size)
        assert np.abs(mask.mean(others) - 0.7).max() < bound
    other = np.asarray(keep_mask(jax.random.key(4), 0.3, numbers(8), numbers(64), numbers(96)))
    shifted = (np.roll(mask, 1, dim) for dim in range(3))
    for pair in (other, *shifted):  # independent masks agree in 0.7² + 0.3² of the elements
        assert abs((mask == pair).mean() - 0.58) < 0.01
    part = keep_mask(jax.random.key(3), 0.3, numbers(2, 6), numbers(9, 40), numbers(48, 96))
    np.testing.assert_array_equal(part, mask[2:6, 9:40, 48:])


DROPPING = {"dropout": 0.3, "ranks": ["v_proj=3"]}
DROPOUT_MESHES = ["cp=2,tp=2", "fsdp=2,tp=2", "pp=2,cp=2", "dp=2", "pp=2,tp=2"]


DROPOUT_STEPS = 4


@pytest.fixture(scope="module")
def dropping_alone(base_of):
    return train(config_of(base_of("mesh"), **DROPPING), steps=DROPOUT_STEPS)


@pytest.mark.parametrize(
    "mesh",
    [
        DROPOUT_MESHES[0],
        *(pytest.param(mesh, marks=pytest.mark.product) for mesh in DROPOUT_MESHES[1:]),
    ],
)
def test_every_mesh_drops_the_same_inputs(base_of, dropping_alone, mesh):
    options = {"microbatches": 2} if "pp" in mesh else {}
    config = config_of(base_of("mesh"), mesh, **DROPPING, **options)
    losses, _, _, after = train(config, steps=DROPOUT_STEPS)
    expected, _, _, alone = dropping_alone
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    # B has gradients of the dropped inputs from the first step on.
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-2 * DROPOUT_STEPS * RATE)
    jax.tree.map(close, after, alone)


def test_dropout_equals_masks_in_a_second_implementation(base_of):
    """The step's loss is that of the masks, applied with NumPy; evaluation drops nothing."""
    config = config_of(base_of("llama2"), dropout=0.5, targets=["q_proj", "down_proj"])
    plain = dataclasses.replace(config, lora=dataclasses.replace(config.lora, dropout=0.0))
    (losses, parts, before, _), (without, _, _, _) = (train(c, steps=1) for c in (config, plain))
    assert abs(losses[0] / without[0] - 1) > 1e-4
    batch = place_batch(next(batches()), parts.step.batch_sharding)
    sums = parts.step.evaluate(before, batch)
    assert float(sums["loss"] / sums["weight"]) == pytest.approx(without[0], rel=1e-6)

    # y = x·W + (alpha / rank)·(mask·x / 0.5)·A·B of one product
    weight = jax.tree.map(lambda x: x[0], before["layers"]["mlp"]["down"])
    x = np.random.default_rng(0).standard_normal((2, 3, weight.base.shape[0])).astype(np.float32)
    key = jax.random.key(9)
    dims = "batch seq mlp, mlp d_model -> batch seq d_model"
    context = with_dropout(Context(dropout_key=key), 0.5, jnp.array([4, 1]))
    ours = context.dot(dims, jnp.asarray(x), weight)
    own = jax.random.fold_in(key, zlib.crc32(b"down_proj") & 0x7FFFFFFF)
    mask = keep_mask(own, 0.5, jnp.array([4, 1]), jnp.arange(3), jnp.arange(x.shape[-1]))
    adapter = {name: np.asarray(values) for name, values in weight.adapters["down_proj"].items()}
    dropped = np.asarray(mask) * x * 2
    expected = x @ np.asarray(weight.base) + 2.0 * dropped @ adapter["a"] @ adapter["b"]
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    (part,) = weight.parts  # a layer of a block of several has its own mask
    other = dataclasses.replace(weight, parts=(dataclasses.replace(part, layer="layers/1"),))
    assert np.abs(context.dot(dims, jnp.asarray(x), other) - ours).max() > 0.01
