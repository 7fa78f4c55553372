"""Commands read a run with the settings stored with its checkpoint, whatever config.toml holds."""

import contextlib
import io
import json
import re
import shutil
import socket
import subprocess

import pytest
from commands import run_here, tiny
from refusals import missing
from safetensors.numpy import load_file

import jaxdist
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
