"""A run directory with damaged or deleted files: the loss is reported, and the run continues."""

import json

import pytest
from refusals import refused

from jaxdist.results import Run
from jaxdist.run.run_directory import RunDirectory

CONFIG = 'name = "a"\nseed = 1\n'
RECORD = '{"kind": "train", "step": 1, "loss": 3.0}\n'


@pytest.fixture
def run(tmp_path):
    first = RunDirectory.open(tmp_path / "run")
    first.write_config(CONFIG)
    first.write_environment({"time": "first"})
    (tmp_path / "run" / "metrics.jsonl").write_text(RECORD)
    return RunDirectory.open(tmp_path / "run")


@pytest.mark.parametrize("damage", ["x = = 3", "\xff\xfe", None])
def test_unreadable_config_is_reported_and_rewritten(run, damage):
    if damage is None:
        run.config.delete()
    else:
        run.config.write(damage.encode("latin-1"))
    (line,) = run.write_config(CONFIG)
    assert ("missing" if damage is None else "damaged") in line
    assert run.write_config(CONFIG) == []


@pytest.mark.parametrize("damage", ["", "{", "[1]", '"text"', "null"])
def test_damaged_environment_loses_only_earlier_starts(run, damage, caplog):
    run.write_environment({"time": "second"})
    assert [start["time"] for start in run.environment.json()["earlier"]] == ["first"]
    run.environment.write(damage)
    with caplog.at_level("WARNING", logger="jaxdist"):
        run.write_environment({"time": "third"})
    record = json.loads(run.environment.text())
    assert (record["time"], record["earlier"]) == ("third", [])
    assert "damaged" in caplog.text


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
def test_damaged_summary_is_reported_and_other_files_stay_readable(run, damage):
    opened = Run(run.path)
    assert opened.summary == {} and "no end" in repr(opened)
    run.write_summary({"exit_reason": "finished"})
    assert opened.exit_reason == "finished"
    run.summary.write(damage)
    with refused(run.summary):
        opened.summary  # noqa: B018
    assert "damaged" in repr(opened) and opened.losses == [3.0]
