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


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the dev extra (nbclient)")
    pytest.importorskip("ipykernel", reason="needs the dev extra (ipykernel)")
    import nbformat

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    printed = "".join(
        text
        for cell in code_of(notebook)
        for output in cell["outputs"]
        for text in (output.get("text", ""), *output.get("data", {}).values())
    )
    expected = {"train": ["training loss", "<svg"], "finetune": ["Good day.", "Farewell."]}
    assert all(word in printed for word in expected[path.stem]), printed[-2000:]
