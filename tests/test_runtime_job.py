"""Real processes with gloo collectives: they join, agree, reject together, and end together."""

import signal
import socket
import textwrap

import pytest
from commands import Fork, free_port
from refusals import missing

from jaxdist.runtime.rendezvous import RendezvousError

HEADER = """
import json, os, signal, sys, time
from jaxdist import runtime
from jaxdist.runtime import distributed as room
from jaxdist.runtime.cluster_environment import RuntimeConfig

INDEX = int(os.environ["JAXDIST_PROCESS_ID"])

def loop(job, stop, event=lambda step: None, num_steps=2000, first=0):
    import jax
    from jax.experimental import multihost_utils
    for step in range(first, first + num_steps):
        event(step)
        multihost_utils.process_allgather(jax.numpy.ones(1))
        if stop.preempted():
            print("stopped", step, flush=True)
            return runtime.EXIT_PREEMPTED
        time.sleep(0.01)
    return 0

def main():
    stop = runtime.Preemption()
    runtime.simulate(2)
"""


class Processes:
    """Two processes with the environment of a local launch."""

    def __init__(self, body: str, num_processes: int = 2, **environ: str):
        code = HEADER + textwrap.indent(textwrap.dedent(body), "    ")
        code += "\n\nruntime.run_command(main)\n"
        address = f"127.0.0.1:{free_port()}"
        self.processes = [
            Fork(
                "-c",
                code,
                **{
                    "JAXDIST_COORDINATOR_ADDRESS": address,
                    "JAXDIST_NUM_PROCESSES": str(num_processes),
                    "JAXDIST_PROCESS_ID": str(i),
                    "JAXDIST_NUM_HOSTS": "1",
                    "JAXDIST_NUM_LOCAL_PROCESSES": str(num_processes),
                    "JAXDIST_LOCAL_PROCESS_ID": str(i),
                    **environ,
                },
            )
            for i in range(num_processes)
        ]

    def end(self) -> tuple[list[int], list[str], list[str]]:
        try:
            outputs = [process.communicate(timeout=90) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        codes = [process.returncode for process in self.processes]
        return codes, [out for out, _ in outputs], [err for _, err in outputs]


def test_processes_join_and_process_0_lists_all_devices():
    body = "job = runtime.join(); print(job.num_devices, job.host_of); print(job.table())"
    codes, out, _ = Processes(body).end()
    assert codes == [0, 0]
    host = socket.gethostname()
    for index, lines in enumerate(map(str.splitlines, out)):
        assert lines[0] == f"4 { ({0: host, 1: host}) }"
        rows = [line.split() for line in lines[2:]]
        assert [row[0] for row in rows] == (["1"] if index else ["0", "1"])
        assert all(row[2:] == ["0-1", "cpu", "-"] for row in rows)


def test_processes_wait_for_a_late_one_before_they_leave():
    """Process 0 may export a large model; jax aborts all if its own barrier times out."""
    body = """
        import jax
        start, limit = jax.distributed.initialize, {"shutdown_timeout_seconds": 1}
        jax.distributed.initialize = lambda *args, **named: start(*args, **named | limit)
        runtime.join()
        time.sleep(0 if INDEX else 3)
    """
    assert Processes(body).end()[0] == [0, 0]


SEND = "lambda step: INDEX == 1 and step == 5 and os.kill(os.getpid(), signal.SIGNAL)"


@pytest.mark.parametrize(
    "body",
    [
        f"return loop(runtime.join(), stop, {SEND.replace('SIGNAL', 'SIGUSR1')})",
        pytest.param(
            f"job, stop = runtime.join(), runtime.Preemption()\n"
            f"return loop(job, stop, {SEND.replace('SIGNAL', 'SIGTERM')})",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "INDEX == 0 and os.kill(os.getpid(), signal.SIGUSR1)\n"
            "return loop(runtime.join(), stop)",
            marks=pytest.mark.slow,
        ),
        # Like a resumed run that still restores: the service counts calls, not steps.
        "job = runtime.join()\nINDEX == 1 and os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(1)\nreturn loop(job, stop, first=150, num_steps=300)",
    ],
    ids=["in_a_step", "listener_after_join", "before_join", "before_the_first_step"],
)
def test_a_signal_to_one_process_stops_all_on_one_step(body):
    codes, out, _ = Processes(body).end()
    assert codes == [75, 75]
    assert out[0] == out[1] and out[0].startswith("stopped")


@pytest.mark.parametrize("lost", [0, 1])
def test_survivors_of_a_killed_process_end_with_a_line_and_exit_code_1(lost):
    """jax's client aborts them; the thread that may see the loss first is disabled."""
    body = f"""
        from jaxdist.runtime.coordination import failure_broadcast
        failure_broadcast._watch = lambda: None
        room.join(RuntimeConfig(heartbeat_timeout_s=3), stop=stop)
        if INDEX == {lost}:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    codes, _, errors = Processes(body, 3).end()
    assert codes == [-signal.SIGKILL if i == lost else 1 for i in range(3)]
    for i in {0, 1, 2} - {lost}:
        assert missing(errors[i].splitlines()[-1], f"process {i} on", "another process") == []


@pytest.mark.parametrize("lost", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_survivors_of_a_process_killed_in_a_step_name_it(lost):
    codes, _, errors = Processes(
        f"""
        def kill(step):
            if INDEX == {lost} and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return loop(runtime.join(), stop, kill)
        """,
        3,
    ).end()
    assert codes == [-signal.SIGKILL if i == lost else 1 for i in range(3)]
    for i in {0, 1, 2} - {lost}:
        assert f"no answer from process {lost} of 3" in errors[i]


def test_exception_in_one_process_ends_all_and_is_reported_by_all():
    codes, _, err = Processes(
        """
        def fail(step):
            if INDEX == 1 and step == 3:
                raise ValueError("boom")
        return loop(runtime.join(), stop, fail)
        """
    ).end()
    # Process 0 either gets an error from its collective or is notified of the failure first. It
    # never hangs, and never aborts without a message.
    assert codes == [1, 1]
    assert "ValueError: boom" in err[1] and "where:   process 1 of 2" in err[1]
    assert "process 1" in err[0] or "another process" in err[0]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param(
            "room.versions = lambda: {'python': '3.11.1', 'jax': f'0.1{INDEX}.2'}",
            "jax 0.10.2 in 1 processes, but 0.11.2 in process 1 on",
            id="mixed_versions",
        ),
        pytest.param(
            "same = {'optim.peak_lr': str(0.1 + INDEX), 'train.steps': '3'}\n"
            "runtime.join(same=same)",
            "optim.peak_lr differs between processes: 0.1 in 1, but 1.1 in process 1 on",
            id="different_settings",
        ),
        pytest.param(
            "import jax\njax.config.update('jax_num_cpu_devices', 1 + INDEX)",
            "processes must have equal devices",
            id="unequal_device_counts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "room._gpus_of_host = lambda: ['GPU-aa', 'GPU-bb']\nroom._wants_gpu = lambda: True",
            "was given 1 GPU(s) but jax sees only the CPU",
            id="gpu_job_on_cpu",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_invalid_setups_are_refused_by_all_before_any_collective(body, text):
    codes, _, err = Processes(f"{body}\nruntime.join()").end()
    assert codes == [2, 2]
    assert text in err[0] and "Traceback" not in err[0]


def test_process_that_never_joins_is_named_by_the_waiting_one():
    processes = Processes("""
        if INDEX == 1:
            time.sleep(600)
        runtime.join(RuntimeConfig(join_timeout_s=2))
        """)
    try:
        _, err = processes.processes[0].communicate(60)
    finally:
        for process in processes.processes:
            process.kill()
    assert processes.processes[0].returncode == 1
    facts = "RendezvousError: process 1 of 2", "127.0.0.1:", f"to do:   {RendezvousError.advice}"
    assert missing(err, *facts) == []
