"""A real SLURM on this machine for tests: munged, slurmctld and one slurmd per simulated node.

Everything runs in private namespaces (mount, pid, net, uts; also a user namespace if we are not
root) below one process: nothing on the host changes, no port is taken outside, and killing that
process removes everything. Nodes n1, n2, ... share a private loopback with separate addresses;
character devices bound to /dev/null simulate the GPUs.

Run as a program, this file is process 1 of the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare", "nsenter")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
CONTROLLER = "10.77.0.254"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def missing() -> str:
    absent = [name for name in (*PROGRAMS, "ip") if shutil.which(name, path=SEARCH) is None]
    if absent:
        return (
            f"not installed: {', '.join(absent)} (apt-get install --no-install-recommends "
            "slurmctld slurmd slurm-client munge iproute2)"
        )
    trial = subprocess.run([*_unshare(), "true"], capture_output=True, text=True)
    return f"no namespaces: {trial.stderr.strip()[-200:]}" if trial.returncode else ""


def _unshare() -> list[str]:
    user = []
    if os.geteuid() != 0:
        # Not --map-root-user: with uid 0 the daemons call setgroups, which is forbidden there.
        user = ["--user", "--map-current-user", "--keep-caps"]
    spaces = ["--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc"]
    return ["unshare", *user, *spaces, "--kill-child=SIGKILL", "--propagation", "private"]


def _slurm_conf(root: Path, nodes: int, gpus: int) -> str:
    user = pwd.getpwuid(os.geteuid()).pw_name
    hosts = "".join(
        f"NodeName=n{k} NodeHostname=n{k} NodeAddr=10.77.0.{k} Port={6817 + k} CPUs=4 Sockets=1 "
        f"CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN\n"
        for k in range(1, nodes + 1)
    )
    # cred_expire sets how long a requeued job waits (120 s by default); config_overrides lets
    # nodes claim more resources than the machine has.
    return f"""\
ClusterName=jaxdist
SlurmctldHost=ctl({CONTROLLER})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=3
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
SlurmdTimeout=10
KillWait=5
MessageTimeout=10
TCPTimeout=2
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
MailProg=/bin/true
GresTypes=gpu
{hosts}PartitionName=test Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""


def _cgroup_conf() -> str:
    output = subprocess.run(
        ["slurmctld", "-V"], capture_output=True, text=True, env={**os.environ, "PATH": SEARCH}
    )
    version = tuple(map(int, output.stdout.split()[-1].split(".")[:2]))
    # slurmd loads a plugin although nothing uses it: "disabled" exists from 24.05 on, and before
    # that v1 does nothing unless used.
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"


class RealSlurm:
    """A running cluster; a context manager."""

    def __init__(self, root: Path, nodes: int = 3, gpus: int = 2):
        self.root, self.nodes, self.gpus = root.resolve(), nodes, gpus

    def __enter__(self) -> RealSlurm:
        self._write()
        libc = ctypes.CDLL(None)
        log = open(self.root / "log/init.log", "ab")
        self.process = subprocess.Popen(
            [*_unshare(), sys.executable, __file__, str(self.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
            env={**os.environ, "PATH": SEARCH},
        )
        log.close()
        try:
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # --kill-child: the namespaces end with it
        self.process.wait()

    def run(self, *command: str, check: bool = True, **environ: str) -> str:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        enter = ["nsenter", f"--target={children.split()[0]}"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        enter += ["--mount", "--net", "--uts", "--pid", "--", "env", "-C", str(self.root / "jobs")]
        strangers = ("SLURM_", "SBATCH_", "SRUN_")
        own = {k: v for k, v in os.environ.items() if not k.startswith(strangers)}
        own |= {"SLURM_CONF": str(self.root / "etc/slurm.conf"), "PATH": SEARCH, **environ}
        done = subprocess.run(
            [*enter, *command], capture_output=True, text=True, timeout=120, env=own
        )
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def submit(self, script: Path, **environ: str) -> str:
        return self.run("sbatch", "--parsable", str(script), **environ).strip()

    def job(self, job_id: str) -> dict[str, str]:
        words = self.run("scontrol", "-o", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job_id: str, states: tuple[str, ...] = ENDED, timeout_s: float = 180) -> str:
        until = time.monotonic() + timeout_s
        while (state := self.job(job_id)["JobState"]) not in states:
            if time.monotonic() > until:
                raise TimeoutError(f"job {job_id} is {state}\n{self.output(job_id)}")
            time.sleep(0.2)
        return state

    def output(self, job_id: str) -> str:
        return "".join(
            path.read_text(errors="replace")
            for path in (self.root / "jobs").glob(f"*-{job_id}.out")
        )

    def power_off(self, node: int) -> None:
        self.run("kill", "-KILL", (self.root / f"run/n{node}.init").read_text())

    def _write(self) -> None:
        for name in ("etc", "munge", "state", "spool", "run", "log", "jobs", "dev"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
            (self.root / name).chmod(0o755)
        key = self.root / "munge/key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        hosts = "".join(f"10.77.0.{k} n{k}\n" for k in range(1, self.nodes + 1))
        etc = self.root / "etc"
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{CONTROLLER} ctl\n{hosts}")
        (etc / "slurm.conf").write_text(_slurm_conf(self.root, self.nodes, self.gpus))
        (etc / "cgroup.conf").write_text(_cgroup_conf())
        lines = ["AutoDetect=off"]
        for i in range(self.gpus):
            device = self.root / f"dev/gpu{i}"
            device.touch()
            lines.append(f"NodeName=n[1-{self.nodes}] Name=gpu File={device}")
        (etc / "gres.conf").write_text("\n".join(lines) + "\n")
        (self.root / "options.json").write_text(json.dumps({"nodes": self.nodes}))

    def _wait_until_idle(self, timeout_s: float = 60) -> None:
        until = time.monotonic() + timeout_s
        states_now = ""
        while states_now.split().count("idle") < self.nodes:
            if self.process.poll() is not None or time.monotonic() > until:
                log = (self.root / "log/init.log").read_text()[-2000:]
                raise RuntimeError(f"the cluster does not start: {states_now}\n{log}")
            time.sleep(0.1)
            with contextlib.suppress(IndexError, RuntimeError, OSError):
                states_now = self.run("sinfo", "-h", "-N", "-o", "%T")


def _bind(source: Path | str, target: Path | str, kind: str | None = None) -> None:
    # mount(8) refuses every user but root, whatever its capabilities; mount(2) does not.
    libc = ctypes.CDLL(None, use_errno=True)
    flags = 0 if kind else 4096  # MS_BIND
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode() if kind else None)
    if libc.mount(*arguments, ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")


def _start_daemon(root: Path, name: str, *command: str) -> None:
    with open(root / f"log/{name}.out", "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "SLURM_CONF": str(root / "etc/slurm.conf")},
        )
    (root / f"run/{name}.init").write_text(str(process.pid))


def _wait(condition) -> None:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)


def _answers() -> bool:
    try:
        socket.create_connection((CONTROLLER, 6817), 1).close()
    except OSError:
        return False
    return True


def _init(root: Path) -> None:
    nodes = json.loads((root / "options.json").read_text())["nodes"]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # SLURM resolves no name if only 127.x addresses exist.
    for k in [*range(1, nodes + 1), 254]:
        subprocess.run(["ip", "addr", "add", f"10.77.0.{k}/32", "dev", "lo"], check=True)
    _bind(root / "etc/hosts", "/etc/hosts")
    _bind("tmpfs", "/run", "tmpfs")
    for device in (root / "dev").iterdir():
        _bind("/dev/null", device)  # slurmd requires a character device
    socket.sethostname("ctl")
    munge = root / "munge"
    _start_daemon(
        root,
        "munged",
        *("munged", "--foreground", "--force", f"--key-file={munge}/key"),
        *(f"--socket={munge}/socket", f"--pid-file={munge}/pid", f"--log-file={munge}/log"),
        f"--seed-file={munge}/seed",
    )
    _wait((munge / "socket").exists)
    _start_daemon(root, "slurmctld", "slurmctld", "-D", "-i", "-c")
    _wait(_answers)  # a slurmd that starts first retries only after a second
    for k in range(1, nodes + 1):
        own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child=SIGKILL"]
        start = f"hostname n{k}; slurmd -D -N n{k}; sleep infinity"
        _start_daemon(root, f"n{k}", *own, "--mount-proc", "bash", "-c", start)
    while True:  # reap orphaned processes
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        time.sleep(0.05)


if __name__ == "__main__":
    _init(Path(sys.argv[1]))
