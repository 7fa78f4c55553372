"""Runs written by commit 8bf0dac still resume bit-identically, and every command still reads them.

`tests/compatibility` holds a run of six steps on one device and one on fsdp=2,tp=2, each with the
checkpoint of step 6. The expected losses of steps 7 to 10 were computed by the same commit.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import losses, records, run, run_here
from safetensors.numpy import load_file

RUNS = {"one_device": ["--simulate=1"], "fsdp2_tp2": ["--simulate=4", "--mesh=fsdp=2,tp=2"]}
EXPECTED = {
    "one_device": [5.492609977722168, 5.508983612060547, 5.493966102600098, 5.457705497741699],
    "fsdp2_tp2": [5.492609977722168, 5.508983612060547, 5.493966579437256, 5.457705497741699],
}
EXPECTED_EVAL = 5.4896  # step 6, printed with four decimals


def rounds_as_recorded() -> bool:
    """Return True if this JAX and CPU sum in the recorded order (JAX 0.10.2, no AVX-512)."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        jax.__version__ == "0.10.2"
        and cpuinfo.exists()
        and "avx2" in cpuinfo.read_text()
        and "avx512f" not in cpuinfo.read_text()
    )


@pytest.fixture(params=[pytest.param("one_device", marks=pytest.mark.slow), "fsdp2_tp2"])
def stored_run(request, tmp_path, monkeypatch):
    """Copy a stored run, whose config names the text relative to the working directory."""
    shutil.copytree(Path(__file__).parent / "compatibility", tmp_path / "compat")
    monkeypatch.chdir(tmp_path)
    return Path("compat") / request.param


def test_stored_run_resumes_with_the_recorded_losses(stored_run, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # the recording was compiled with a user's optimization level
    config = stored_run / "config.toml"
    result = run(
        "train", "--config", config, "--run-dir", stored_run, "--steps=10", *RUNS[stored_run.name]
    )
    assert result.returncode == 0, result.stderr
    assert [
        event["step"] for event in records(stored_run, "event") if event["event"] == "restore"
    ] == [6]
    resumed = [float.fromhex(losses(stored_run)[step][0]) for step in range(7, 11)]
    if rounds_as_recorded():
        assert resumed == EXPECTED[stored_run.name]
    # Other CPUs and versions of JAX sum in another order: use the contract's bound for equal
    # states.
    np.testing.assert_allclose(resumed, EXPECTED[stored_run.name], rtol=1e-6)


def test_every_command_reads_a_stored_run(stored_run, capsys):
    assert run_here("evaluate", stored_run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(EXPECTED_EVAL, abs=6e-5)
    assert run_here("generate", stored_run, "--prompt", "def", "--max-new-tokens", 4) == 0
    assert run_here("tools.convert.__main__", "to-hf", stored_run, "exported") == 0
    exported = load_file("exported/model.safetensors")
    assert exported["model.layers.1.mlp.gate_proj.weight"].shape == (32, 16)
    assert run_here("tools.report.__main__", stored_run, "--json") == 0
