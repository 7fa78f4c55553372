"""Commands that a command prints as the next ones run, and so do the notebooks of examples."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from commands import ROOT, environment, tiny

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


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    cells = code_of(json.loads(path.read_text()))
    assert len(cells) >= 3
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.fixture
def execute(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the dev extra (nbclient)")
    pytest.importorskip("ipykernel", reason="needs the dev extra (ipykernel)")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(tmp_path)}}
    options = {"timeout": 300, "kernel_name": "python3", "resources": resources}
    return lambda notebook, **more: nbclient.NotebookClient(notebook, **options, **more).execute()


@pytest.mark.slow
def test_a_rejected_setting_has_no_traceback(execute):
    import nbformat

    code = "import jaxdist\njaxdist.train(optim={'peak_lr': -1}, train={'seq_len': 0})"
    cell = nbformat.v4.new_code_cell(code)
    execute(nbformat.v4.new_notebook(cells=[cell]), allow_errors=True)
    (output,) = (one for one in cell["outputs"] if one["output_type"] == "error")
    first, *lines = output["traceback"][0].splitlines()
    assert first.startswith("ConfigError: ") and len(output["traceback"]) == 1
    assert [name in line for name, line in zip(("seq_len", "peak_lr"), lines, strict=True)] == [
        True
    ] * 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, execute):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for cell in code_of(notebook) if path.stem != "lora" else ():  # its answers need all steps
        cell["source"] = cell["source"].replace("steps=60", "steps=20")
    execute(notebook)
    printed = "".join(
        text
        for cell in code_of(notebook)
        for output in cell["outputs"]
        for text in (output.get("text", ""), *output.get("data", {}).values())
    )
    for line in ("\nmesh ", "train step compiled", "\nended ", "\nnext "):
        assert line in printed, printed
    chat = ["Good day.", "Farewell."]
    expected = {
        "train": ["training loss", "<svg", "iVBORw0KGgo"],
        "finetune": chat,
        "lora": [*chat, "frozen ones kept every bit"],
    }
    assert all(word in printed for word in expected[path.stem]), printed[-2000:]
