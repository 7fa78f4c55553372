"""The list of planted faults (scripts/bench/mutants.toml) matches the current code."""

import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAULTS = tomllib.loads((ROOT / "scripts/bench/mutants.toml").read_text())["fault"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_matches_one_location_and_has_existing_tests(fault):
    """A fault that no longer matches the code would not be planted and prove nothing."""
    assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1
    assert fault["new"] != fault["old"]
    paths = [word for word in shlex.split(fault["tests"]) if word.startswith("tests/")]
    assert paths and all((ROOT / path.partition("::")[0]).exists() for path in paths)


def test_names_are_unique_and_all_packages_have_faults():
    assert len({fault["name"] for fault in FAULTS}) == len(FAULTS) >= 40
    packages = {Path(fault["file"]).parts[1] for fault in FAULTS}
    assert packages >= {"checkpoint", "core", "data", "models", "optim", "run", "runtime", "tools"}
