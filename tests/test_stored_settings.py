"""Starts on an existing run use the settings of its checkpoint; a rejected one changes nothing."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from commands import run_here, tiny
from damaged import flip_bit
from refusals import missing, refused, snapshot
from safetensors.numpy import load_file

import jaxdist
from jaxdist.checkpoint import CheckpointError
from jaxdist.config import settings_of_run
from jaxdist.settings import ConfigError
from jaxdist.tools.report.runs import read_run


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "run"
    assert run_here("train", *tiny("--train.steps=2", f"--run-dir={path}")) == 0
    return path


def replace(directory, name, value):
    file = directory / "config.toml"
    text, count = re.subn(rf"(?m)^{name} = .*(\n( .*|])$)*", f"{name} = {value}", file.read_text())
    assert count == 1
    file.write_text(text)


def other_settings(directory):
    (directory.parent / "other.txt").write_text("0123456789 " * 5000)
    replace(directory, "d_model", 64)
    replace(directory, "sources", json.dumps([str(directory.parent / "other.txt")]))


def output_of(name, *arguments) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert run_here(name, *arguments) == 0
    return stream.getvalue()


def read_by_every_command(run, out) -> dict:
    evaluated = json.loads(output_of("evaluate", run, "--json", "--max-batches=2"))
    output_of("tools.convert.__main__", "to-hf", run, out / "hf")
    weights = load_file(out / "hf" / "model.safetensors")
    output_of("tools.convert.__main__", "reshard", run, out / "new", "--mesh=fsdp=8")
    return {
        "evaluate": evaluated["loss"],
        "generate": output_of("generate", run, "--prompt", "def", "--max-new-tokens", 8),
        "to-hf": {name: array.tobytes() for name, array in weights.items()},
        "to-hf config": json.loads((out / "hf" / "config.json").read_text()),
        "reshard": settings_of_run(out / "new").model,
        "report": read_run(str(run), "name").config,
        "open": jaxdist.open(run).config,
    }


def test_commands_use_the_settings_of_the_checkpoint(original, tmp_path):
    expected = read_by_every_command(original, tmp_path / "expected")
    run = shutil.copytree(original, tmp_path / "run")
    other_settings(run)
    assert read_by_every_command(run, tmp_path) == expected
    (run / "config.toml").write_text("[model]\nd_mod")
    assert settings_of_run(run) == settings_of_run(original)
    (run / "config.toml").unlink()
    assert settings_of_run(run) == settings_of_run(original)
    assert jaxdist.open(run).config == expected["open"]


def test_a_resume_by_path_uses_the_settings_of_the_checkpoint(original, tmp_path):
    run = shutil.copytree(original, tmp_path / "run")
    other_settings(run)
    assert run_here("train", f"--resume={run}", "--train.steps=3") == 0
    assert settings_of_run(run).model.d_model == 32


def test_a_moved_base_model_is_read_from_the_path_in_config_toml(original, tmp_path):
    """The settings of the checkpoint have the old path."""
    old, new, run = (tmp_path / name for name in ("old", "new", "run"))
    assert run_here("tools.convert.__main__", "to-hf", original, old) == 0
    job = [flag for flag in tiny("--train.steps=6") if not flag.startswith("--model")]
    assert run_here("train", *job, "--init-from", old, "--lora.rank=2", "--run-dir", run) == 0
    commands = {
        "evaluate": ("evaluate", run, "--max-batches=1"),
        "generate": ("generate", run, "--prompt=def", "--max-new-tokens=2"),
        "merge": ("tools.convert.__main__", "merge", run, tmp_path / "merged"),
    }
    expected = json.loads(output_of(*commands["evaluate"], "--json"))["loss"]
    old.rename(new)
    for command in commands.values():
        with refused(str(old), "config.toml"):
            run_here(*command)
    replace(run, "init_from", json.dumps(str(new)))
    replace(run, "tokenizer", json.dumps(str(new / "tokenizer.json")))
    for command in commands.values():
        assert run_here(*command) == 0
    assert json.loads(output_of(*commands["evaluate"], "--json"))["loss"] == expected
    assert run_here("verify.__main__", run, "--export", tmp_path / "merged") == 0
    assert run_here("train", f"--resume={run}", "--train.steps=7") == 0
    shutil.copytree(new, old)  # another model at the old path is not the base
    assert settings_of_run(run).init_from == str(new)


def test_a_step_selects_the_settings_stored_with_it(original, tmp_path):
    run = shutil.copytree(original, tmp_path / "run")
    flags = ("--train.steps=4", "--train.global_batch_size=16", f"--run-dir={run}")
    assert run_here("train", *tiny(*flags)) == 0
    sizes = [settings_of_run(run, step).train.global_batch_size for step in (2, 4, None, 3)]
    assert sizes == [8, 16, 16, 8]
    shutil.rmtree(run / "checkpoints")
    assert settings_of_run(run).train.global_batch_size == 16


CONVERSIONS = {
    "to-hf": ("tools.convert.__main__", "to-hf", "{run}", "{out}"),
    "consolidate": ("tools.convert.__main__", "consolidate", "{run}", "{out}"),
    "reshard": ("tools.convert.__main__", "reshard", "{run}", "{out}", "--mesh=fsdp=8"),
    "generate": ("generate", "{run}", "--prompt=def", "--max-new-tokens=2", "--out={out}"),
    "data": ("data.__main__", "{run}/config.toml", "--out={out}"),
}


@pytest.mark.parametrize("command", ["to-hf", "reshard"])
@pytest.mark.parametrize("setting", ["mlp_dim", "num_layers"])
def test_a_conversion_compares_the_shapes_first(original, tmp_path, monkeypatch, command, setting):
    run = shutil.copytree(original, tmp_path / "run")
    replace(run, setting, 1)
    monkeypatch.setattr("jaxdist.checkpoint.manifest.stored_config", lambda *args: "")
    name, *words = (word.format(run=run, out=tmp_path / "out") for word in CONVERSIONS[command])
    with pytest.raises(ConfigError) as caught:
        run_here(name, *words)
    shapes = {
        "mlp_dim": ("[2, 64, 32]", "[2, 1, 32]"),
        "num_layers": ("[2, 64, 32]", "[1, 64, 32]"),
    }
    assert missing(str(caught.value), "params/layers/mlp/down", *shapes[setting]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


WRITERS = {
    "to-hf": "models.huggingface.safetensors.write",
    "consolidate": "models.huggingface.safetensors.write",
    "generate": "run.text_generation.Writer.write",
    "data": "data.corpus._fill",
}


@pytest.mark.parametrize("command", WRITERS)
def test_leftovers_of_a_failed_or_killed_command_do_not_block_the_next(
    original, tmp_path, monkeypatch, command
):
    folder = tmp_path / "out"
    name, *words = (word.format(run=original, out=folder / "x") for word in CONVERSIONS[command])
    with monkeypatch.context() as patch:
        patch.setattr(f"jaxdist.{WRITERS[command]}", fail)
        with pytest.raises(RuntimeError, match="planted"):
            run_here(name, *words)
    assert list(folder.iterdir()) == []
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed = folder / f".x.partial-{socket.gethostname()}-{ended.pid}-0"
    killed.mkdir()
    (killed / "part").touch()
    assert run_here(name, *words) == 0
    assert [path.name for path in folder.iterdir()] == ["x"]


def fail(*args, **options):
    raise RuntimeError("planted")


def train(directory, *flags, steps=2) -> int:
    return run_here("train", *tiny(f"--train.steps={steps}", f"--run-dir={directory}", *flags))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    assert train(path) == 0
    return path


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def lock_elsewhere(directory):
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); "
        "fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
    )
    lock = directory / "checkpoints" / ".lock"
    holder = subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE)
    holder.stdout.readline()
    return holder


def damage_arrays(directory):
    files = (directory / "checkpoints" / "2" / "arrays").rglob("*")
    flip_bit(max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size))


def replace_ledger(directory):
    file = directory / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records = [r | {"data_ledger": "0" * 8} if r.get("kind") == "train" else r for r in records]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


STATES = {
    "finished": lambda directory: None,
    "live": lock_elsewhere,
    "unfinished_save": lambda directory: (directory / "checkpoints" / "1").mkdir(),
    "torn_line": lambda directory: os.truncate(
        directory / "metrics.jsonl", (directory / "metrics.jsonl").stat().st_size - 9
    ),
    "no_lock_file": lambda directory: (directory / "checkpoints" / ".lock").unlink(),
    "no_logs": lambda directory: shutil.rmtree(directory / "logs"),
}
FLAGS = {
    "shape": "--model.d_model=64",
    "optimizer": "--optim.optimizer=sgd",
    "freeze": "--optim.freeze=embed",
    "mesh": "--mesh=dp=3",
    "data": "--data.sources=/nowhere",
    "never": "--resume=never",
}


@pytest.mark.parametrize(("state", "flag"), [*zip(STATES, FLAGS, strict=True)])
def test_a_rejected_start_changes_nothing(copy, state, flag):
    holder = STATES[state](copy)
    before = snapshot(copy)
    try:
        with pytest.raises(ConfigError):
            train(copy, FLAGS[flag])
        assert snapshot(copy) == before
    finally:
        if isinstance(holder, subprocess.Popen):
            holder.kill()
            holder.wait()


@pytest.mark.parametrize("damage", [damage_arrays, replace_ledger])
def test_a_start_rejected_for_damage_changes_nothing(copy, damage):
    damage(copy)
    before = snapshot(copy)
    with pytest.raises((ConfigError, CheckpointError)):
        train(copy, steps=3)
    assert snapshot(copy) == before


def test_a_rejected_first_start_leaves_nothing_behind(finished, tmp_path):
    directory = tmp_path / "new" / "run"
    with pytest.raises(ConfigError):
        train(directory, f"--init-from={finished}", "--model.d_model=64")
    assert list(tmp_path.iterdir()) == []
    assert train(directory) == 0


CHANGES = {
    "optimizer": [("optim.optimizer", "'adamw'", "sgd")],
    "freeze": [("optim.freeze", "[]", "embed")],
    "loss_scale": [("precision.compute_dtype", "'auto'", "float16")],
    "tied": [("model.tie_embeddings", "False", "True")],
    "several": [("optim.optimizer", "'adamw'", "muon"), ("model.num_layers", "2", "3")],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_rejected_resume_names_only_the_changed_settings(finished, changes):
    with refused() as caught:
        flags = [f"--{name}={value.lower()}" for name, _, value in changes]
        train(finished, *flags, "--seed=3", "--optim.warmup_steps=1", steps=4)
    text = str(caught.value)
    for name, before, value in changes:
        flag = f"--{name.replace('_', '-')}"
        assert missing(text, f"{name}={before}", value, flag) == []
    assert text.count(" (now ") == len(changes)
    assert "params/" not in text and "opt_state/" not in text and "\n" not in text


def test_mismatch_without_a_changed_setting_names_three_arrays(copy, monkeypatch):
    read = "jaxdist.checkpoint.orbax_io.read_document"
    original = importlib.import_module("jaxdist.checkpoint.orbax_io").read_document

    def without_config(checkpoint):
        document = original(checkpoint)
        del document["meta"]["config"]
        return document

    monkeypatch.setattr(read, without_config)
    with refused("more such problems", num_problems=3):
        train(copy, "--model.d_model=64")
