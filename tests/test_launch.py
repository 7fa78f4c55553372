"""The launcher with real processes: reported causes, terminated processes, restarts."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from launched import Launched, is_running
from refusals import missing, refused, snapshot

from jaxdist import runtime
from jaxdist.checkpoint.local.store import Lineage, write_lineage
from jaxdist.config.resilience import ResilienceConfig
from jaxdist.run.resilience.watchdog import Watchdog
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError
from jaxdist.tools.launch import supervisor
from jaxdist.tools.launch.__main__ import read_config
from jaxdist.tools.launch.slurm import SlurmConfig, batch_script
from jaxdist.tools.launch.worker_group import GroupResult, Placement, WorkerGroup


def test_processes_get_their_ids_and_print_with_a_prefix(tmp_path):
    launched = Launched(
        tmp_path,
        """
        plan = runtime.resolve(os.environ)
        print(plan.process_id, plan.num_processes, plan.local_process_id, plan.num_hosts)
        """,
        "--nproc-per-node=2",
    )
    code, out, _ = launched.end()
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] 0 2 0 1", "[1] 1 2 1 1"]
    logs = launched.run_dir / "logs"
    assert (logs / "attempt-0-process-1.out").read_text() == "1 2 1 1\n"


def test_first_failure_is_reported_with_its_traceback_and_the_rest_is_killed(tmp_path):
    launched = Launched(
        tmp_path,
        """
        (RUN / f"pid-{INDEX}-{ATTEMPT}").write_text(str(os.getpid()))
        if INDEX == 1:
            raise ValueError("boom")
        time.sleep(600)
        """,
        "--nproc-per-node=2",
        "--max-restarts=1",
    )
    code, _, err = launched.end()
    assert code == 1
    assert "attempt 0: process 1 failed first" in err and "exit code 1" in err
    assert err.index("ValueError: boom") < err.index("to do:")
    assert missing(err, "giving up", "max_restarts=1") == []
    (restart,) = (line for line in err.splitlines() if "restart 1 of 1" in line)
    assert "checkpoint" not in restart  # there is none
    pids = {file.name: int(file.read_text()) for file in launched.run_dir.glob("pid-*")}
    assert {"pid-1-0", "pid-1-1"} <= set(pids)  # process 0 may be killed before it starts
    assert not any(map(is_running, pids.values()))


CAUSES = {
    "consequence_first": (
        """
        if INDEX == 0:
            raise RuntimeError("Gloo AllGather failed: Connection reset by peer")
        time.sleep(0.1)
        raise ValueError("the cause, written later")
        """,
        1,
        ["ValueError: the cause"],
    ),
    "no_error_record": (
        """
        if INDEX == 1:
            print("plain words", file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(600)
        """,
        3,
        ["plain words"],
    ),
    "hung": (
        """
        if INDEX == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)
        # As jax's service does when a heartbeat is missing.
        print("Terminating process because the JAX distributed service detected fatal errors")
        os.abort()
        """,
        128 + signal.SIGKILL,
        ["it hung"],
    ),
    "killed": (
        """
        print("last words")
        if INDEX == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
        128 + signal.SIGKILL,
        ["killed by SIGKILL", "last words"],
    ),
}


@pytest.mark.parametrize(("body", "code", "facts"), CAUSES.values(), ids=CAUSES)
def test_process_with_the_cause_is_reported(tmp_path, body, code, facts):
    launched = Launched(tmp_path, body, "--nproc-per-node=2", "--max-restarts=0")
    ended, _, err = launched.end()
    assert ended == code
    assert missing(err, "process 1 failed first", *facts) == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("from jaxdist.settings import ConfigError\nraise ConfigError('mesh dp=3 is bad')", 2),
        ("return runtime.EXIT_PREEMPTED", 75),
        ("return runtime.EXIT_SDC", 85),
        ("return runtime.EXIT_DIVERGED", 87),
        ("raise KeyboardInterrupt", 130),
        ("return 0", 0),
    ],
    ids=["config", "preempted", "damaged", "diverged", "interrupted", "done"],
)
def test_final_exit_codes_are_not_restarted(tmp_path, body, code):
    launched = Launched(tmp_path, f"(RUN / f'ran-{{ATTEMPT}}').touch()\n{body}")
    assert launched.end()[0] == code
    assert [path.name for path in launched.run_dir.glob("ran-*")] == ["ran-0"]


@pytest.mark.parametrize(("nnodes", "is_broadcast"), [(1, False), (2, True)])
def test_a_killed_process_is_broadcast_and_watchdogs_of_other_hosts_exit(
    tmp_path, nnodes, is_broadcast
):
    left: list[int] = []
    other = Watchdog(ResilienceConfig(), tmp_path, process=5, beat_s=0.05, leave=left.append)
    time.sleep(0.2)
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    placement = Placement(
        nproc_per_node=1, nnodes=nnodes, node_rank=0, coordinator_address="127.0.0.1:1"
    )
    assert WorkerGroup(command, placement, 0, tmp_path).run(5.0).exit_code == 137
    until = time.monotonic() + (10 if is_broadcast else 0.5)
    while time.monotonic() < until and not left:
        time.sleep(0.02)
    assert left == ([runtime.EXIT_HANG] if is_broadcast else [])
    if is_broadcast:
        assert "process 0 on" in (tmp_path / "abort.json").read_text()
        assert "killed by SIGKILL" in (tmp_path / "abort.json").read_text()
    other.close()


@pytest.mark.parametrize(
    ("listed", "lost"),
    [
        ("1", "process 1 on n7"),
        ("/job:jax_worker/replica:0/task:1\n/job:jax_worker/replica:0/task:4",
         "process 1 on n7, process 4"),
        ("The tasks have crashed", "process 0"),
    ],
)  # fmt: skip
def test_lost_peers_are_reported_with_their_hosts(tmp_path, listed, lost):
    (tmp_path / "process-1.progress.json").write_text('{"host": "n7"}')
    words = "the JAX distributed service detected fatal errors 15: tasks are unhealthy"
    code = f"import os; print({words!r}); print({listed!r}); print(3 * 'stack\\n'); os.abort()"
    placement = Placement(
        nproc_per_node=1, nnodes=3, node_rank=2, coordinator_address="127.0.0.1:1"
    )
    result = WorkerGroup([sys.executable, "-c", code], placement, 0, tmp_path).run(5.0)
    assert result.cause.startswith(f"killed by SIGABRT: lost {lost};")
    assert result.details.startswith(words)


def attempts_of(folder, monkeypatch, end) -> list[int]:
    """Return the attempts of a supervisor with one restart; `end` returns each one's exit code."""
    attempts = []

    def run(number, placement):
        attempts.append(number)
        return GroupResult(exit_code=end(number), attempt=number)

    policy = supervisor.RestartPolicy(max_restarts=1, backoff_s=0.0)
    subject = supervisor.Supervisor(["x"], supervisor.FixedAgent(1), folder, policy)
    monkeypatch.setattr(subject, "_run_group", run)
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir()
    assert subject._run_groups() == end(attempts[-1])
    return attempts


def test_new_checkpoints_below_a_corrupt_one_refill_the_retry_budget(tmp_path, monkeypatch):
    def commit(step, marker="manifest.json"):
        (tmp_path / "checkpoints" / str(step)).mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / str(step) / marker).touch()

    def end(number):
        if number < 4:
            commit(100, "CORRUPT" if number else "manifest.json")
            commit(50 + number)
        return 1

    assert attempts_of(tmp_path, monkeypatch, end) == [0, 1, 2, 3, 4]
    commit(53, "SUPERSEDED")
    subject = supervisor.Supervisor(
        ["x"], supervisor.FixedAgent(1), tmp_path, supervisor.RestartPolicy()
    )
    assert list(subject.checkpoints()) == [50, 51, 52]


def test_resuming_from_a_newer_local_save_refills_the_retry_budget(tmp_path, monkeypatch):
    starts = [-1, 20, 40, 60, 60, 60]  # the step from which each attempt resumes

    def end(number):
        write_lineage(locate(tmp_path / "checkpoints"), Lineage("run", starts[: number + 1]))
        return 1

    # The second attempt from 60 has made no progress.
    assert attempts_of(tmp_path, monkeypatch, end) == [0, 1, 2, 3, 4]


def test_a_stop_request_reaches_all_and_ends_with_the_save(tmp_path):
    launched = Launched(
        tmp_path,
        """
        stop = runtime.Preemption()
        (RUN / f"ready-{INDEX}").touch()
        while not stop.preempted():
            time.sleep(0.02)
        (RUN / f"saved-{INDEX}").touch()
        return runtime.EXIT_PREEMPTED
        """,
        "--nproc-per-node=2",
    )
    launched.wait_for("ready-0", "ready-1")
    launched.process.send_signal(signal.SIGUSR1)
    code, _, err = launched.end()
    assert code == 75 and "preempted" in err
    assert len(list(launched.run_dir.glob("saved-*"))) == 2


def test_processes_that_ignore_a_stop_request_are_killed(tmp_path):
    launched = Launched(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (RUN / "ready").touch()
        time.sleep(600)
        """,
        "--stop-timeout-s=0.3",
    )
    launched.wait_for("ready")
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGTERM
    assert missing(err, "process 0", "was killed") == []


def test_processes_end_if_the_launcher_is_killed(tmp_path):
    launched = Launched(
        tmp_path,
        """
        (RUN / f"pid-{INDEX}").write_text(str(os.getpid()))
        (RUN / f"ready-{INDEX}").touch()
        time.sleep(600)
        """,
        "--nproc-per-node=2",
    )
    launched.wait_for("ready-0", "ready-1")
    launched.process.kill()
    pids = [int((launched.run_dir / f"pid-{i}").read_text()) for i in range(2)]
    until = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_next_attempt_runs_without_a_lost_gpu(monkeypatch, capfd):
    counts = iter([2, 1])
    monkeypatch.setattr(supervisor, "count_gpus", lambda: next(counts))
    agent = supervisor.FixedAgent(0)
    placements = [agent.next_placement(lambda: 0) for _ in range(2)]
    assert [(index, one.nproc_per_node) for index, one in placements] == [(0, 2), (1, 1)]
    assert "other GPUs are visible: 1 processes, 2 before" in capfd.readouterr().err
    for of in (lambda one: one.coordinator_address, lambda one: one.token):  # new of each attempt
        assert len({of(one) for _, one in placements}) == 2


def test_preemption_signal_during_imports_is_not_lost(tmp_path):
    launched = Launched(
        tmp_path,
        """
        (RUN / "importing").touch()
        time.sleep(0.5)
        stop = runtime.Preemption()
        time.sleep(0.1)
        return runtime.EXIT_PREEMPTED if stop.preempted() else 1
        """,
        "--max-restarts=0",
        args=("jaxdist.train",),  # the launcher recognizes training by this word
    )
    launched.wait_for("importing")
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 75, err


def test_output_reaches_the_console_when_the_disk_is_full(tmp_path):
    """A reader that stopped with its file would leave the process blocked on a full pipe."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "attempt-0-process-0.out").symlink_to("/dev/full")
    launched = Launched(tmp_path, "for i in range(20000): print('line', i)")
    code, out, err = launched.end()
    assert code == 0
    assert out.splitlines() == [f"line {i}" for i in range(20000)]
    assert err.count(os.strerror(errno.ENOSPC)) == 1


def test_a_full_console_ends_neither_processes_nor_restarts(tmp_path):
    program = f"--program={sys.executable} -c 'print(1); print(2); exit(3)'"
    command = ["-m", "jaxdist.launch", f"--run-dir={tmp_path}", "--max-restarts=1", program]
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *command], stdout=full, stderr=full)
    assert done.returncode == 3
    for attempt in range(2):
        log = tmp_path / "logs" / f"attempt-{attempt}-process-0.out"
        assert log.read_text() == "1\n2\n"


def test_missing_program_prints_one_error_line(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "attempt-0-process-0.error.json").write_text("{}")
    before = snapshot(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "jaxdist.launch", f"--run-dir={tmp_path}", "--program=/no/such"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert missing(line, "/no/such", os.strerror(errno.ENOENT), "--program") == []
    assert snapshot(tmp_path) == before


def test_train_gets_one_run_directory_for_all_attempts():
    plan = read_config(["--nproc-per-node", "2", "--", "--steps", "5"])
    assert plan.command[1:3] == ["-m", "jaxdist.train"]
    assert plan.command[-1] == f"--run-dir={plan.run_directory}"
    plan = read_config(["--nproc-per-node", "2", "--", "--run_dir", "runs/mine"])
    assert str(plan.run_directory) == "runs/mine"
    assert plan.command[-2:] == ["--run_dir", "runs/mine"]


@pytest.mark.parametrize("flags", [["--resume", "runs/b", "--run-dir", "a"], ["--run-dir=runs/b"]])
def test_the_run_that_training_names_is_that_of_its_launchers(flags):
    assert str(read_config(["--", *flags]).run_directory) == "runs/b"
    assert "\nrun_dir=runs/b\n" in batch_script(SlurmConfig(time="9:00", arguments=flags))
    other = read_config(["--program", "python mine.py", "--", "--resume", "runs/b"])
    assert other.run_directory.name.startswith("launch-")


def test_program_flags_before_the_dashes_are_rejected_with_the_fix():
    with refused("--mesh", "--."):
        read_config(["--nproc-per-node", "2", "--mesh", "dp=2"])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--nproc-per-node=-1", "--nproc-per-node -1"),
        (
            "--nproc-per-node=0 --nnodes=2 --coordinator-address=n0:1",
            "--nnodes 2 without --nproc-per-node",
        ),
        ("--max-restarts=-1", "max_restarts=-1"),
        ("--backoff-s=-1", "backoff_s=-1.0"),
        ("--nproc-per-node=1 --nnodes=2", "--coordinator-address '' with --nnodes 2"),
        ("--nproc-per-node=1 --nnodes=2 --coordinator-address=localhost:1", "loopback address"),
        (
            "--nproc-per-node=1 --nnodes=2 --coordinator-address=n0:1 --node-rank=2",
            "--node-rank 2",
        ),
    ],
)
def test_invalid_flags_are_rejected(monkeypatch, flags, text):
    monkeypatch.setenv("JAXDIST_JOB_TOKEN", "secret")
    with pytest.raises(ConfigError) as caught:
        read_config(flags.split())
    assert text in str(caught.value) and len(caught.value.problems) == 1


def test_hosts_without_a_shared_secret_are_rejected(monkeypatch):
    monkeypatch.delenv("JAXDIST_JOB_TOKEN", raising=False)
    with refused("JAXDIST_JOB_TOKEN", "--nnodes 2"):
        read_config(["--nproc-per-node=1", "--nnodes=2", "--coordinator-address=[fd00::1]:29400"])


def test_the_launcher_imports_no_jax():
    code = "import sys, jaxdist.tools.launch.__main__; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("flags", "restarts"),
    [
        ([], 3),
        (["--module=jaxdist.doctor"], 0),
        (["--module=jaxdist.doctor", "--max-restarts=2"], 2),
        (["--module=mine.trainer"], 3),
        (["--program=./worker"], 3),
    ],
)
def test_commands_without_checkpoints_are_not_restarted_by_default(flags, restarts):
    assert read_config(flags).restart_policy.max_restarts == restarts
