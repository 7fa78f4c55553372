"""Every command that a command prints as the next one runs as printed."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from commands import ROOT, tiny

from jaxdist import generate, train
from jaxdist.data import DataConfig, open_datasets
from jaxdist.data.__main__ import main as prepare
from jaxdist.run.text_generation import first_request
from jaxdist.runtime.entry_point import shell_python
from jaxdist.tools.convert.__main__ import main as convert
from jaxdist.tools.report.__main__ import main as report

MAINS = {
    "jaxdist.train": train.main,
    "jaxdist.generate": lambda words: generate.main([*words, "--max_new_tokens=2"]),
    "jaxdist.report": report,
}


def next_commands(printed: str) -> list[list[str]]:
    _, _, after = printed.rpartition("next")
    lines = [line.strip() for line in after.removeprefix(":").splitlines()]
    commands = [shlex.split(line) for line in lines if " -m jaxdist." in line]
    assert commands, printed
    return commands


def follow(words: list[str], *more: str) -> None:
    assert words[:2] == [shell_python(), "-m"]
    assert MAINS[words[2]]([*words[3:], *more]) == 0


@pytest.mark.slow
def test_printed_commands_lead_from_text_to_a_transformers_model(tmp_path, monkeypatch, capsys):
    """The tokenizer is copied from the token folder to the run and to the exported model."""
    monkeypatch.chdir(tmp_path)
    assert prepare([str(ROOT / "README.md"), "--out", "my tokens", "--train-bpe", "300"]) == 0
    (to_train,) = next_commands(capsys.readouterr().out)
    small = [flag for flag in tiny("--steps=2") if "seq_len" not in flag]
    follow(to_train, *small, "--run-dir=a run")
    words = next_commands(capsys.readouterr().out)
    assert [command[2] for command in words] == ["jaxdist.generate", "jaxdist.report"]
    for command in words:
        follow(command)
    assert capsys.readouterr().out.startswith("# jaxdist")
    assert Path("a run/report.html").exists()
    assert convert(["to-hf", "a run", "model"]) == 0
    assert (
        Path("model/tokenizer.json").read_bytes() == Path("my tokens/tokenizer.json").read_bytes()
    )
    assert json.loads(Path("model/config.json").read_text())["eos_token_id"] == 0
    capsys.readouterr()
    assert convert(["from-hf", "model", "again"]) == 0
    (to_generate,) = next_commands(capsys.readouterr().out)
    follow(to_generate)
    assert convert(["reshard", "a run", "other", "--mesh=dp=8"]) == 0
    (to_resume,) = next_commands(capsys.readouterr().out)
    follow(to_resume, "--steps=3")


@pytest.mark.parametrize(
    ("own", "on_path", "printed"),
    [
        (".venv/bin/python", ".venv/bin/python", "python"),
        (".venv/bin/python3", "/usr/bin/python", ".venv/bin/python3"),
        ("/opt/a b/bin/python", None, "'/opt/a b/bin/python'"),
    ],
)
def test_commands_run_outside_the_virtual_environment(tmp_path, monkeypatch, own, on_path, printed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / own))
    monkeypatch.setattr(shutil, "which", lambda _: on_path and str(tmp_path / on_path))
    assert shell_python() == printed


def test_suggested_prompt_matches_the_training_data(tmp_path):
    def request_of(data: DataConfig) -> str:
        return first_request(data, open_datasets(data, seq_len=32)[0])

    text, pairs = tmp_path / "a.txt", tmp_path / "pairs.jsonl"
    text.write_text("\n  First Citizen: it's all\n" + "more text\n" * 40)
    pairs.write_text(json.dumps({"prompt": "2 + 2 = ", "completion": "4"}) + "\n")
    assert request_of(DataConfig()) == "--prompt 'def __init__(self'"
    assert request_of(DataConfig(sources=[str(text)])) == "--prompt " + shlex.quote(
        "First Citizen: it's all"
    )
    completion = DataConfig(sources=[str(pairs)], records="completion", eval_fraction=0.0)
    assert request_of(completion) == "--prompt '2 + 2 ='"
    assert first_request(DataConfig(records="chat"), None) == "--chat"
