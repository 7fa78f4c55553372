"""The list of planted faults (scripts/bench/mutants.toml) fits the code of today."""

import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAULTS = tomllib.loads((ROOT / "scripts/bench/mutants.toml").read_text())["fault"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_has_one_place_and_tests_that_exist(fault):
    """A fault that no longer fits would be planted nowhere, and prove nothing."""
    assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1
    assert fault["new"] != fault["old"]
    paths = [word for word in shlex.split(fault["tests"]) if word.startswith("tests/")]
    assert paths and all((ROOT / path.partition("::")[0]).exists() for path in paths)


def test_names_are_told_apart_and_all_rooms_are_there():
    assert len({fault["name"] for fault in FAULTS}) == len(FAULTS) >= 40
    rooms = {Path(fault["file"]).parts[1] for fault in FAULTS}
    assert rooms >= {"checkpoint", "core", "data", "models", "optim", "run", "runtime", "tools"}
