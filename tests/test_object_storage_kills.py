"""Kill real processes whose checkpoints are on an S3 server over HTTP; see `store_kills`."""

import signal

import pytest
from commands import TINY, Fork, free_port
from store_kills import kill_at

from jaxdist.checkpoint import manifest
from jaxdist.run.metrics_log import read_records
from jaxdist.runtime.storage import locate

POINTS = ["during_upload", "before_manifest", "during_retention", "during_restore"]
"""`scripts/bench/checkpoint_kills.py --store` kills at all points."""

pytestmark = pytest.mark.slow


def test_kills_at_named_points_lose_no_complete_checkpoint_and_load_no_other(server, tmp_path):
    kills = kill_at("s3://bucket/kills/checkpoints", tmp_path, POINTS, async_save=True)
    assert [kill.point for kill in kills] == POINTS


def test_two_processes_on_one_url_resume_after_a_kill_bit_identically(server, tmp_path):
    """Process 0 is killed after its first checkpoint is committed; only the URL is shared."""
    url, uninterrupted = "s3://bucket/runs/two", tmp_path / "whole"
    codes, errors = train_with_two_processes(url, JAXDIST_CRASH_POINT="after_manifest")
    assert codes[0] == -signal.SIGKILL and codes[1] != 0, errors
    (kept,) = manifest.steps_in(locate(url) / "checkpoints")
    for run_dir in (url, uninterrupted):
        codes, errors = train_with_two_processes(run_dir)
        assert codes == [0, 0], errors
    records = read_records(locate(url) / "metrics.jsonl")
    (restored,) = (r["step"] for r in records if r.get("event") == "restore")
    assert restored == kept > 0
    runs = [steps_of(records), steps_of(read_records(locate(uninterrupted) / "metrics.jsonl"))]
    assert runs[0] == runs[1] and len(runs[0]) == 6


def steps_of(records: list[dict]) -> dict[int, tuple[str, str]]:
    return {
        r["step"]: (float(r["loss"]).hex(), float(r["grad_norm"]).hex())
        for r in records
        if r["kind"] == "train"
    }


def train_with_two_processes(run_dir, **process_0) -> tuple[list[int], list[str]]:
    """Train with two processes; return exit codes and errors. `process_0`: its extra variables."""
    flags = [*TINY, "--simulate=1", "--mesh=dp=2", "--steps=6", f"--run-dir={run_dir}"]
    flags += ["--checkpoint.save_interval_steps=2", "--eval.interval_steps=0"]
    flags += [f"--runtime.coordinator_address=127.0.0.1:{free_port()}"]
    flags += ["--runtime.num_processes=2", "--runtime.heartbeat_timeout_s=10"]
    processes = [
        Fork("jaxdist.train", *flags, f"--runtime.process_id={index}", **more)
        for index, more in enumerate((process_0, {}))
    ]
    errors = [process.communicate(timeout=180)[1][-3000:] for process in processes]
    return [process.returncode for process in processes], errors
