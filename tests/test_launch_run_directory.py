"""A run directory that disappears while the launcher runs."""

import errno
import os
import time

import pytest
from launched import Launched
from refusals import missing, snapshot

from jaxdist.tools.launch import supervisor


def test_missing_run_directory_is_awaited_and_not_recreated(tmp_path):
    launched = Launched(
        tmp_path,
        """
        if ATTEMPT == 0:
            os.rename(RUN, f"{RUN}-away")
            raise OSError("the file system went away")
        """,
    )
    away = tmp_path / "run-away"
    until = time.monotonic() + 60
    while not away.exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(2.0)
    assert not launched.run_dir.exists()
    away.rename(launched.run_dir)
    code, _, err = launched.end()
    assert code == 0
    run_dir = launched.run_dir
    assert missing(err, f"{run_dir} is missing", "900 s", f"{run_dir} is back") == []
    assert err.count("failed first") == 1


def is_awaited(run_dir) -> bool:
    subject = supervisor.Supervisor(
        ["x"], supervisor.FixedAgent(1), run_dir, supervisor.RestartPolicy()
    )
    return subject._wait_for_run_dir()


def test_a_run_directory_that_does_not_come_back_ends_the_launch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "_LOST_DIRECTORY_S", 0.3)
    assert not is_awaited(tmp_path / "nowhere")
    assert missing(capsys.readouterr().err, tmp_path / "nowhere", "giving up") == []


def test_a_run_directory_on_an_unreachable_server_is_awaited(tmp_path, monkeypatch):
    def stale(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    looks = iter([stale, stale, lambda path: True])
    monkeypatch.setattr(supervisor.Location, "is_directory", lambda path: next(looks)(path))
    assert is_awaited(tmp_path)


@pytest.mark.parametrize("has_started", [False, True])
def test_a_rejected_job_restores_the_logs_of_an_earlier_launch(tmp_path, has_started):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "attempt-0-process-0.out").write_text("earlier\n")
    (logs / "attempt-0-process-1.error.json").write_text('{"error": "earlier"}')
    before = {path.name: path.read_text() for path in logs.iterdir()}
    body = f"""
    if {has_started}:
        (RUN / "logs" / f"process-{{INDEX}}.log").write_text("training")
    print("checking")
    from jaxdist.settings import ConfigError
    raise ConfigError("rejected")
    """
    code, out, _ = Launched(tmp_path, body, "--nproc-per-node=2").end()
    assert code == 2 and "rejected" in out
    after = {path.name: path.read_text() for path in logs.iterdir()}
    assert (after == before) != has_started


REJECTED = "from jaxdist.settings import ConfigError\nraise ConfigError('rejected')"
EARLIER = ("launch/round.json", "launch/host-0.json", "logs/attempt-0-process-0.error.json")


@pytest.mark.parametrize("flag", ["--nproc-per-node=2", "--nproc-per-node=1:1"])
@pytest.mark.parametrize("earlier", [(), EARLIER])
def test_rejected_job_leaves_the_run_directory_unchanged(tmp_path, flag, earlier):
    for name in earlier:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
    before = snapshot(tmp_path)
    assert Launched(tmp_path, REJECTED, flag).end()[0] == 2
    assert {
        name: file for name, file in snapshot(tmp_path).items() if name != "worker.py"
    } == before


def test_each_host_of_a_rejected_elastic_job_removes_its_files(tmp_path):
    flags = ("--nnodes=1:2", "--nproc-per-node=1", "--address=localhost")
    hosts = [Launched(tmp_path, REJECTED, *flags, f"--node-rank={rank}") for rank in range(2)]
    assert [host.end()[0] for host in hosts] == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["worker.py"]
