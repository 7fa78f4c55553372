"""Compare two runs that diverge: their first difference is named."""

import contextlib
import json
import re

import jax
import numpy as np
import pytest

from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.config import read_run
from jaxdist.run.run_directory import RunDirectory
from jaxdist.settings import ConfigError, write_toml
from jaxdist.tools.compare.__main__ import describe, main, read_divergence


def run_directory(path, losses, ledger="ab", seed=1):
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.toml").write_text(write_toml(read_run([f"--seed={seed}"], command="test")))
    (path / "environment.json").write_text(
        json.dumps({"versions": {"jax": "0.10"}, "time": path.name})
    )
    lines = [
        {
            "kind": "train",
            "step": step,
            "loss": loss,
            "grad_norm": 1.0,
            "data_ledger": ledger + str(step),
        }
        for step, loss in enumerate(losses, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunDirectory.existing(path)


def test_records_show_where_settings_data_and_losses_diverge(tmp_path, capsys):
    a = run_directory(tmp_path / "a", [3.0, 2.0, 1.0])
    same = run_directory(tmp_path / "same", [3.0, 2.0, 1.0, 0.5])
    b = run_directory(tmp_path / "b", [3.0, np.nextafter(2.0, 3), 1.0], ledger="cd", seed=2)
    parting = read_divergence(a, b)
    assert (parting.step, parting.data_step, list(parting.numbers)) == (2, 1, ["loss"])
    assert parting.settings == {"seed": (1, 2)} and not parting.environment
    assert "step 2" in " ".join(describe(parting))
    assert read_divergence(a, same).is_equal and read_divergence(a, same).last_common_step == 3
    assert main([str(a.path), str(same.path)]) == 0
    assert main([str(a.path), str(b.path)]) == 1
    assert "seed: 1 | 2" in capsys.readouterr().out


def test_the_first_unequal_checkpoint_and_its_arrays_are_named(tmp_path, capsys):
    runs = [run_directory(tmp_path / name, [3.0, 2.0, 1.0]) for name in "ab"]
    for run in runs:
        with contextlib.closing(Checkpointer(run.checkpoints, CheckpointConfig())) as writer:
            for step in (1, 3):
                w = jax.numpy.full(2, float(step == 3 and run is runs[1]))
                writer.save(step, {"params": {"w": w, "b": w * 0}}, {})
    parting = read_divergence(*runs)
    assert parting.step is None and parting.equal_checkpoints == [1]
    assert (parting.checkpoint, parting.arrays, parting.num_arrays) == (3, ["params/w"], 2)
    assert main([str(run.path) for run in runs]) == 1
    commands = capsys.readouterr().out.splitlines()[-2:]
    assert [command.split()[-2:] for command in commands] == [
        ["--replay", f"{run.path}:3"] for run in runs
    ]


@pytest.mark.parametrize("name", ["config.toml", "environment.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path, name):
    runs = [run_directory(tmp_path / n, [3.0]) for n in "ab"]
    (tmp_path / "a" / name).write_text("[x")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "a" / name))):
        read_divergence(*runs)
