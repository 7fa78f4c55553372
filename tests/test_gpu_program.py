"""`gpu_program.py --check`: what counts as moved, and a page that says what was found.

The cases themselves take minutes to compile, and are not compiled here.
"""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench"
FOUND = {
    "step": 12.0, "mfu": 0.55, "again": 1.03, "temporary": 60.0, "total": 71.0,
    "products": 8.0, "element-wise": 1.7, "exposed fsdp": 0.07,
}  # fmt: skip


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("gpu_program")
    sys.modules.pop("gpu_program", None)


@pytest.mark.parametrize(
    "key, by, moves",
    [
        ("products", 0.13, True),
        ("products", -0.13, True),
        ("products", 0.119, False),
        ("exposed tensor", 0.13, True),  # a class that was not there
        ("exposed fsdp", -0.07, False),  # less than a hundredth of the step
        ("copies", float("nan"), True),
        ("again", 0.02, True),
        ("temporary", 1.3, True),
        ("temporary", 1.1, False),
        ("mfu", 0.3, False),  # the step says it
    ],
)
def test_a_class_that_moves_by_a_hundredth_of_the_step_is_named(program, key, by, moves):
    changed = {**FOUND, key: FOUND.get(key, 0.0) + by}
    moved = program.differences(changed, FOUND)
    assert [line.partition(":")[0] for line in moved] == [key] * moves


def test_a_class_that_is_gone_has_moved(program):
    assert program.differences({k: v for k, v in FOUND.items() if k != "products"}, FOUND) == [
        "products: 8000 -> 0 ms"
    ]


@pytest.mark.parametrize("case, status", [("8b_8192", 0), ("70b_fsdp16tp8", 1), ("8b_4096", 1)])
def test_a_check_ends_with_1_where_a_case_has_moved_or_was_never_recorded(
    program, case, status, monkeypatch, tmp_path, capsys
):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(program, "FIGURES", figures)
    versions = {"jax": "1.2"}
    same = lambda line, flags: (line.split()[0], dict(FOUND), versions)
    monkeypatch.setattr(program, "run_case", same)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_program.py", *arguments])
        with pytest.raises(SystemExit) as end:
            program.main()
        return end.value.code

    assert run("--record", "--only", "8b_8192", "70b_fsdp16tp8") == 0
    stored = json.loads(figures.read_text())
    assert stored["8b_8192"]["figures"] == FOUND and stored["8b_8192"]["versions"] == versions
    stored["70b_fsdp16tp8"]["figures"]["products"] *= 0.9
    figures.write_text(json.dumps(stored))
    assert run("--check", "--only", case) == status
    said = capsys.readouterr().out
    assert {0: "8b_8192: as recorded", 1: case}[status] in said


def test_the_page_has_the_figures_that_are_recorded(program):
    """And every case is recorded."""
    recorded = json.loads(program.FIGURES.read_text())
    assert list(recorded) == [line.split()[0] for line in program.CASES.strip().splitlines()]
    page = (program.FIGURES.with_suffix(".md")).read_text()
    table = program.table([(name, entry["figures"]) for name, entry in recorded.items()])
    assert table in page
