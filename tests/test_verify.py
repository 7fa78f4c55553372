"""`jaxdist verify`: each planted silent failure is named, and healthy runs cause no alarm."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import records, run_here, tiny
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path
from refusals import refused, snapshot

from jaxdist.checkpoint import Checkpointer
from jaxdist.checkpoint.streaming_io import CheckpointWriter, StoredArrays
from jaxdist.core.state import TrainState
from jaxdist.core.types import Dims
from jaxdist.data.tokenizer import FileTokenizer
from jaxdist.models import example
from jaxdist.models.adapted_weights import LoraWeight
from jaxdist.models.huggingface import peft as peft_format
from jaxdist.models.huggingface import safetensors
from jaxdist.run.gradient_checks import without_gradient
from jaxdist.run.setup import Parts
from jaxdist.run.trained_run import open_run
from jaxdist.runtime.storage import locate
from jaxdist.tools.convert.__main__ import main as convert
from jaxdist.tools.verify.training import named as leaves_of

STEPS = 6
EMBED, UP, QKV = "embed/table", "layers/mlp/up", "layers/attention/qkv"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    job = tiny(
        "--model.num_layers=4",
        f"--train.steps={STEPS}",
        "--eval.final_max_batches=1",
        "--checkpoint.export=hf",
    )
    assert run_here("train", *job, "--run-dir", folder / "full", "--optim.freeze=embed") == 0
    assert convert(["to-hf", str(folder / "full"), str(folder / "hf")]) == 0
    lora = ["--lora.rank=4", "--optim.peak_lr=0.01"]
    start = [flag for flag in job if not flag.startswith("--model")]
    run = folder / "adapted"
    assert run_here("train", *start, "--init-from", folder / "hf", "--run-dir", run, *lora) == 0
    assert convert(["to-peft", str(run), str(folder / "peft")]) == 0
    assert convert(["merge", str(run), str(folder / "merged")]) == 0
    assert convert(["to-hf", str(folder / "merged"), str(folder / "merged-hf")]) == 0
    return folder


@pytest.fixture
def copied(made, tmp_path):
    def copy(name):
        return shutil.copytree(made / name, tmp_path / name, dirs_exist_ok=True)

    return copy


def verify(capsys, run, export=None, **more):
    capsys.readouterr()
    flags = [f"--{name}={value}" for name, value in more.items()]
    flags += [f"--export={export}"] if export else []
    code = run_here("verify.__main__", run, "--json", *flags)
    result = json.loads(capsys.readouterr().out)
    assert result["healthy"] == (code == 0)
    return code, {check["name"]: check["problems"] for check in result["checks"]}


def rewrite(run, change, step=STEPS, checksums=True):
    source = StoredArrays(run / "checkpoints" / str(step))
    arrays = {name: source.read(name) for name in source.entries}
    document, entries = source.document, source.entries
    change(arrays)
    writer = CheckpointWriter(run / "checkpoints" / str(step), 0)
    for name, x in arrays.items():
        x = np.asarray(x)
        writer.write(name, entries[name], x.shape, [(tuple(slice(0, n) for n in x.shape), x)])
        if not checksums:  # keep those of the devices
            writer.entries[name]["checksum"] = entries[name]["checksum"]
    writer.finish(document["meta"])


@pytest.mark.parametrize(
    ("run", "export", "done"),
    [
        ("full", "hf", {"checkpoint", "gradients", "changes", "effect", "loading", "tokenizer"}),
        ("adapted", "peft", {"changes", "effect", "export", "values", "logits", "tokenizer"}),
        ("adapted", "merged", {"values", "logits"}),
        ("adapted", "merged-hf", {"values", "logits", "tokenizer"}),
    ],
)
def test_healthy_runs_and_exports_have_no_problem(made, capsys, run, export, done):
    code, problems = verify(capsys, made / run, made / export)
    assert (code, [*filter(None, problems.values())]) == (0, [])
    assert done <= problems.keys()


def test_a_run_writes_the_exports_of_the_commands_at_its_end(made):
    for run, export in [("full", "hf"), ("adapted", "peft")]:
        assert snapshot(made / run / "export" / str(STEPS)) == snapshot(made / export)
    card = (made / "peft" / "README.md").read_text()
    assert 'library_name: "peft"' in card and f"| initial weights | {made / 'hf'} |" in card


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--model.kind=resnet"], ["resnet", "Only decoders"]),
        (["--lora.rank=2"], ["init_from"]),
        (["--model.positions=learned"], ["families"]),
    ],
)
def test_a_run_that_cannot_be_exported_does_not_start(tmp_path, flags, facts):
    num_problems = 1 + ("resnet" in facts)  # no images
    with refused("checkpoint.export=hf", *facts, num_problems=num_problems):
        run_here("train", "--run-dir", tmp_path / "run", "--checkpoint.export=hf", *flags)
    assert not (tmp_path / "run").exists()


def zero(name, layer=None):
    def change(arrays):
        for moment in arrays:
            if moment.startswith("opt_state/") and moment.endswith(name):
                arrays[moment] = np.array(arrays[moment])
                arrays[moment][slice(None) if layer is None else layer] = 0

    return change


def set_value(name, value, index=0):
    def change(arrays):
        arrays[name] = np.array(arrays[name])
        arrays[name].reshape(-1)[index] = value

    return change


def drop(name):
    return lambda arrays: [arrays.pop(key) for key in list(arrays) if name in key]


def no_updates(arrays):
    arrays.update({name: np.int32(0) for name in arrays if name.endswith("/count")})


CHECKPOINTS = {  # run, changes of the checkpoint, check -> facts of its problems
    "values": (
        "full",
        [set_value(f"params/{EMBED}", 7.0), zero(QKV, 2), zero(UP), no_updates],
        {"changes": [EMBED], "gradients": [f"{QKV} of layer 2", UP, "count is 0", str(STEPS)]},
    ),
    "arrays": (
        "full",
        [set_value(f"params/{UP}", np.nan), drop(f"mu/{UP}")],
        {"checkpoint": [UP, "NaN"], "gradients": [f"mu/{UP}"]},
    ),
    "no moments": ("full", [drop("opt_state/")], {"gradients": [f"mu/{UP}", "missing"]}),
    "an adapter without gradient": (
        "adapted", [zero(f"{QKV}/adapters/k_proj/a", 1)], {"gradients": ["k_proj/a of layer 1"]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("faults", CHECKPOINTS)
def test_a_fault_in_the_checkpoint_is_named(copied, capsys, faults):
    name, changes, expected = CHECKPOINTS[faults]
    run = copied(name)
    for change in changes:
        rewrite(run, change)
    code, problems = verify(capsys, run)
    assert code == 1
    for check, facts in expected.items():
        assert all(fact in " ".join(problems[check]) for fact in facts), problems


def test_a_moment_that_differs_from_the_devices_is_named(copied, capsys):
    run = copied("full")
    (moment,) = (n for n in StoredArrays(run / "checkpoints" / "6").entries if f"nu/{UP}" in n)
    rewrite(run, set_value(moment, 7.0), checksums=False)
    code, problems = verify(capsys, run)
    assert code == 1 and moment in " ".join(problems["checkpoint"])


def test_a_layer_that_keeps_its_first_weights_is_named(copied, capsys):
    run = copied("full")
    first = leaves_of(open_run(run).parts.start_params())[UP]

    def change(arrays):
        arrays[f"params/{UP}"] = np.array(arrays[f"params/{UP}"])
        arrays[f"params/{UP}"][3] = np.asarray(first[3])

    rewrite(run, change)
    code, problems = verify(capsys, run)
    assert code == 1 and len(problems["changes"]) == 1
    assert f"{UP} of layer 3" in problems["changes"][0]


def test_adapters_that_are_not_loaded_are_named(made, capsys, monkeypatch):
    load = Parts.load_params
    is_b = lambda path: keystr(path, simple=True, separator="/").endswith("/b")
    zeros = lambda path, x: jnp.zeros_like(x) if is_b(path) else x
    without = lambda *args: tree_map_with_path(zeros, load(*args))
    monkeypatch.setattr(Parts, "load_params", without)
    code, problems = verify(capsys, made / "adapted")
    assert code == 1 and any("q_proj/b" in line for line in problems["loading"])
    assert problems["effect"]


def test_layers_in_another_order_are_named(made, capsys, monkeypatch):
    restore = Checkpointer.restore_params
    moved = lambda path, x: jnp.roll(x, 1, 0) if "down" in str(path) else x
    monkeypatch.setattr(
        Checkpointer,
        "restore_params",
        lambda *args, **more: tree_map_with_path(moved, restore(*args, **more)),
    )
    code, problems = verify(capsys, made / "full")
    assert code == 1 and len(problems["loading"]) == 1 and "mlp/down" in problems["loading"][0]


def test_adapters_without_an_effect_are_named(made, capsys, monkeypatch):
    base_alone = lambda self, dot, dims, x, *, out_dtype, sum_over: dot(
        dims, x, self.base, out_dtype=out_dtype
    )
    monkeypatch.setattr(LoraWeight, "multiply", base_alone)
    code, problems = verify(capsys, made / "adapted")
    assert code == 1 and {name for name, lines in problems.items() if lines} == {"effect"}


def edit_json(name, **changes):
    def change(folder):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edit_tensors(name, edit):
    """Return a change of the tensor with this name in Hugging Face's format; None removes it."""

    def change(folder):
        file = folder / ("model.safetensors" if name.startswith("model") else peft_format.WEIGHTS)
        values = {n: t.read() for n, t in safetensors.open_file(locate(file)).items()}
        values[name] = edit(values, values.pop(name))
        kept = {n: x for n, x in values.items() if x is not None}
        tensors = {n: safetensors.Tensor(x.shape, x.dtype, [x]) for n, x in kept.items()}
        safetensors.write(file, tensors, {"format": "pt"})

    return change


DOWN = "model.layers.{}.mlp.down_proj.weight"
Q_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
EXPORTS = {  # run, export, changes of the export, check -> facts of its problems
    "a tensor is missing": (
        "full", "hf", [edit_tensors(DOWN.format(2), lambda *_: None)], {"export": [DOWN.format(2)]}
    ),
    "two layers are exchanged, and another tokenizer with another end of text": (
        "full", "hf", [
            edit_tensors(DOWN.format(2), lambda all, _: all[DOWN.format(1)]),
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            edit_json("generation_config.json", eos_token_id=3),
        ],
        {"values": ["layers/mlp/down of layer 2"],
         "tokenizer": ["tokenizer.json", "eos_token_id", "3"]},
    ),
    "other positions": (
        "full", "hf", [edit_json("config.json", rope_theta=1e6)],
        {"export": ["rope_theta", "1000000"]},
    ),
    "another scale of adapters": (
        "adapted", "peft", [edit_json("adapter_config.json", lora_alpha=1.0)], {"export": ["alpha"]}
    ),
    "an adapter of zeros": (
        "adapted", "peft", [edit_tensors(Q_A, lambda _, x: 0 * x)],
        {"values": ["q_proj/a of layer 1"]},
    ),
    "an adapter is missing": (
        "adapted", "peft", [edit_tensors(Q_A, lambda *_: None)], {"export": [Q_A]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("faults", EXPORTS)
def test_a_fault_in_an_export_is_named(made, copied, capsys, faults):
    run, export, changes, expected = EXPORTS[faults]
    folder = copied(export)
    for change in changes:
        change(folder)
    code, problems = verify(capsys, made / run, folder)
    assert code == 1 and {name for name, lines in problems.items() if lines} == expected.keys()
    for check, facts in expected.items():
        assert all(fact in " ".join(problems[check]) for fact in facts), problems


@pytest.mark.slow
def test_an_expert_that_a_converter_drops_is_named(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "hf"
    experts = ["--model.num_experts=4", "--model.experts_per_token=2", "--model.qk_norm=head"]
    job = tiny(f"--train.steps={STEPS}", "--eval.final_max_batches=1", *experts)
    assert run_here("train", *job, "--run-dir", run) == 0
    assert convert(["to-hf", str(run), str(out)]) == 0
    assert verify(capsys, run, out)[0] == 0
    down = "model.layers.1.mlp.experts.{}.down_proj.weight"
    edit_tensors(down.format(3), lambda values, _: values[down.format(2)])(out)
    code, problems = verify(capsys, run, out)
    assert code == 1 and "layers/mlp/down of layer 1" in " ".join(problems["values"])
    edit_tensors(down.format(3), lambda *_: None)(out)
    code, problems = verify(capsys, run, out)
    assert code == 1 and down.format(3) in " ".join(problems["export"])


def test_the_base_instead_of_merged_weights_is_named(made, capsys):
    code, problems = verify(capsys, made / "adapted", made / "hf")
    assert code == 1 and any(UP in line for line in problems["values"])


def test_an_average_is_compared_with_the_exported_average(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "hf"
    job = tiny("--train.steps=6", "--optim.ema_decay=0.5", "--eval.final_max_batches=1")
    assert run_here("train", *job, "--run-dir", run) == 0
    assert convert(["to-hf", str(run), str(out)]) == 0
    assert verify(capsys, run, out)[0] == 0
    code, problems = verify(capsys, run, out, weights="raw")
    assert code == 1 and problems["values"]


def test_a_new_run_is_not_judged(made, capsys, tmp_path):
    run = tmp_path / "imported"
    assert convert(["from-hf", str(made / "hf"), str(run)]) == 0
    code, problems = verify(capsys, run)
    assert code == 0 and problems.keys() == {"checkpoint", "training", "loading"}


def test_rows_of_tokens_that_are_never_an_input_are_no_fault(made, tmp_path, capsys):
    """The end of a chat with one answer is only predicted: its input row has no gradient."""
    tokenizer = FileTokenizer(made / "hf" / "tokenizer.json")
    end, (used,) = tokenizer.end_id, tokenizer.encode("?")
    chats, run = tmp_path / "chats.jsonl", tmp_path / "run"
    turns = lambda i: [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "b"}]
    chats.write_text("".join(json.dumps({"messages": turns(i)}) + "\n" for i in range(64)))
    job = [flag for flag in tiny("--train.steps=6") if not flag.startswith("--model")]
    flags = [f"--data.sources={chats}", "--data.records=chat", f"--lora.token_ids={end},{used}"]
    flags += ["--lora.rank=4", "--init-from", made / "hf", "--run-dir", run]
    flags += ["--optim.weight_decay=0"]  # it would change rows without gradient
    assert run_here("train", *job, *flags) == 0
    assert not [e for e in records(run, "event") if e["event"] == "no_gradient"]
    capsys.readouterr()
    assert run_here("verify.__main__", run) == 0
    assert f"the input rows of tokens {end} had no gradient" in capsys.readouterr().out

    assert convert(["merge", str(run), str(tmp_path / "merged")]) == 0
    assert verify(capsys, run, tmp_path / "merged")[0] == 0  # rows keep float32 next to bf16

    def lose_head_row(arrays):
        start = leaves_of(open_run(run).parts.start_params())["head/kernel/rows"]
        arrays["params/head/kernel/rows"] = np.array(arrays["params/head/kernel/rows"])
        arrays["params/head/kernel/rows"][0] = np.asarray(start[0])
        zero("head/kernel/rows", 0)(arrays)

    rewrite(run, lose_head_row)
    code, problems = verify(capsys, run)
    assert code == 1
    for check in ("gradients", "changes"):  # without a gradient of the head, both rows are lost
        expected = [f"{rows} of token {end}" for rows in ("embed/table/rows", "head/kernel/rows")]
        named = {line.rpartition(" received")[0] or line.rpartition(" did")[0]
                 for line in problems[check]}  # fmt: skip
        assert named == {*expected}


def build_with_unused(*, seq_len):
    model = example.build(seq_len=seq_len)
    init = lambda key: {**model.init(key), "unused": jnp.ones(4)}
    read = lambda params: {name: x for name, x in params.items() if name != "unused"}
    head = lambda params, *rest: model.head(read(params), *rest)
    axes = {**model.axes, "unused": Dims((None,))}
    return dataclasses.replace(model, init=init, head=head, axes=axes)


def test_training_names_a_parameter_without_gradient(made, tmp_path):
    job = tiny("--train.steps=6", "--eval.final_max_batches=1", "--mesh=fsdp=4,tp=2")
    job = [flag for flag in job if not flag.startswith("--model")]
    run = tmp_path / "run"
    custom = ["--model=custom", "--model.factory=test_verify:build_with_unused", "--run-dir", run]
    assert run_here("train", *job, *custom) == 0
    named = lambda run: [e["parameters"] for e in records(run, "event") if "parameters" in e]
    assert named(run) == [["unused"]]
    assert named(made / "full") == named(made / "adapted") == []


def test_layers_without_gradient_have_their_model_index():
    """Virtual stages store layers in another order."""
    moment = np.ones((4, 3), np.float32)
    moment[1] = 0
    arrays = {"layers": {"w": jnp.asarray(moment)}}
    mesh = jax.make_mesh((1,), ("x",))
    placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))
    state = TrainState(
        step=0, params=placed, opt_state={"mu": placed}, loss_scale={}, key=jax.random.key(0)
    )
    assert without_gradient(state, np.array([0, 2, 1, 3])) == ["layers/w of layer 2"]
