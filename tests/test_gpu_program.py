"""`gpu_program.py --check`: which changes count, and a page with the recorded figures.

The cases themselves take minutes to compile, so these tests do not compile them.
"""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench"
STORED_FIGURES = {
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
        ("exposed tensor", 0.13, True),  # a class that was not recorded
        ("exposed fsdp", -0.07, False),  # less than one percent of the step
        ("copies", float("nan"), True),
        ("again", 0.02, True),
        ("temporary", 1.3, True),
        ("temporary", 1.1, False),
        ("mfu", 0.3, False),  # the step covers it
    ],
)
def test_class_that_changes_by_one_percent_of_the_step_is_named(program, key, by, moves):
    changed = {**STORED_FIGURES, key: STORED_FIGURES.get(key, 0.0) + by}
    lines = program.differences(changed, STORED_FIGURES)
    assert [line.partition(":")[0] for line in lines] == [key] * moves


def test_missing_class_counts_as_a_change(program):
    assert program.differences(
        {k: v for k, v in STORED_FIGURES.items() if k != "products"}, STORED_FIGURES
    ) == ["products: 8000 -> 0 ms"]


@pytest.mark.parametrize("case, status", [("8b_8192", 0), ("70b_fsdp16tp8", 1), ("8b_4096", 1)])
def test_check_exits_with_1_if_a_case_changed_or_was_not_recorded(
    program, case, status, monkeypatch, tmp_path, capsys
):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(program, "FIGURES", figures)
    versions = {"jax": "1.2"}
    same = lambda line, flags: (line.split()[0], dict(STORED_FIGURES), versions)
    monkeypatch.setattr(program, "run_case", same)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_program.py", *arguments])
        with pytest.raises(SystemExit) as end:
            program.main()
        return end.value.code

    assert run("--record", "--only", "8b_8192", "70b_fsdp16tp8") == 0
    stored = json.loads(figures.read_text())
    assert (
        stored["8b_8192"]["figures"] == STORED_FIGURES and stored["8b_8192"]["versions"] == versions
    )
    stored["70b_fsdp16tp8"]["figures"]["products"] *= 0.9
    figures.write_text(json.dumps(stored))
    assert run("--check", "--only", case) == status
    output = capsys.readouterr().out
    assert {0: "8b_8192: as recorded", 1: case}[status] in output


def test_page_has_the_recorded_figures(program):
    """Every case is recorded too."""
    recorded = json.loads(program.FIGURES.read_text())
    assert list(recorded) == [line.split()[0] for line in program.CASES.strip().splitlines()]
    page = (program.FIGURES.with_suffix(".md")).read_text()
    table = program.table([(name, entry["figures"]) for name, entry in recorded.items()])
    assert table in page
