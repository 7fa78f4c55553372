"""The notebooks of examples/ run unchanged and are stored without outputs."""

import json

import pytest
from commands import ROOT, environment

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
    execute(notebook)
    printed = "".join(
        text
        for cell in code_of(notebook)
        for output in cell["outputs"]
        for text in (output.get("text", ""), *output.get("data", {}).values())
    )
    for line in ("\nmesh ", "train step compiled", "\nended ", "\nnext "):
        assert line in printed, printed
    expected = {"train": ["training loss", "<svg"], "finetune": ["Good day.", "Farewell."]}
    assert all(word in printed for word in expected[path.stem]), printed[-2000:]
