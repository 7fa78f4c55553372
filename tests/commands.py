"""Run commands as a user does: real processes and a tiny model; read the files that they write."""

import contextlib
import functools
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from jaxdist.tools.launch.fork_server import ForkServer

ROOT = Path(__file__).parent.parent

TINY = [
    "--model.d_model=32",
    "--model.num_layers=2",
    "--model.num_heads=4",
    "--model.mlp_dim=64",
    "--train.seq_len=32",
    "--train.global_batch_size=8",
    "--eval.max_batches=2",
    "--eval.final_max_batches=2",
    "--optim.warmup_steps=2",
    "--monitoring.log_interval_steps=1",
    "--monitoring.tracker=",  # tensorboardX imports PyTorch where that is installed
]


def tiny(*flags: object) -> list[str]:
    """Return the tiny job with these flags; they replace those that the job sets itself."""
    extra = [str(flag) for flag in flags]
    name = lambda flag: flag.partition("=")[0].replace("_", "-")
    names = set(map(name, extra))
    return [flag for flag in TINY if name(flag) not in names] + extra


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Return a free port below 32768, which no outgoing connection takes before a server does."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return probe.getsockname()[1]


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"jaxdist.{name}", *map(str, arguments)]


@functools.cache
def fork_server() -> tuple[ForkServer, dict[str, str]]:
    """Start a process that has imported what commands import; return it and its environment."""
    env = environment()
    with mock.patch.dict(os.environ, {**env, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}):
        server = ForkServer()
    while not (server.is_ready() or server.is_gone()):
        time.sleep(0.05)
    return server, env


def run(name: str, *arguments: object, cwd=None, timeout_s=300) -> subprocess.CompletedProcess:
    """Run a command to its end in a separate process.

    The process is a fork of one that has imported jax, which takes 3 s of CPU time. It is a
    new one if a variable that jax reads at import differs.
    """
    words, env = command(name, *arguments), environment()
    _, before = fork_server()
    read_by_jax = {n for n in {*env, *before} if n.startswith(("JAX_", "XLA_"))}
    if any(env.get(n) != before.get(n) for n in read_by_jax) or before.keys() - env.keys():
        return subprocess.run(
            words, capture_output=True, text=True, env=env, cwd=cwd, timeout=timeout_s
        )
    process = Fork(*words[2:], cwd=cwd)
    output = process.communicate(timeout_s)
    return subprocess.CompletedProcess(words, process.returncode, *output)


class Fork:
    """`python -m MODULE ...` or `python -c CODE ...` as a fork of `fork_server`, without imports.

    It has the methods of `subprocess.Popen` that tests use. Its output goes to files.
    """

    def __init__(self, *words: object, cwd=None, **environ: str):
        self._server, _ = fork_server()
        out, errors = tempfile.TemporaryFile("w+"), tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        self._files = out, errors
        command = ["-m", "forked_command", cwd or Path.cwd(), errors.name, *words]
        env = {**environment(), **environ}
        self.pid = self._server.start([*map(str, command)], env, out.fileno()).pid

    @property
    def returncode(self) -> int | None:
        return self._server.code_of(self.pid)

    poll = lambda self: self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Return the output and the errors after the end; kill it and raise after `timeout` s."""
        code = self._server.code_of(self.pid, timeout)
        if code is None:
            self.kill()
        self._files[0].seek(0)
        out, errors = (file.read() for file in self._files)
        if code is None:
            raise TimeoutError(f"after {timeout} s: {out}{errors}")
        return out, errors

    def kill(self) -> None:
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)


def run_here(name: str, *arguments: object) -> int:
    """Return the exit code of a command in this process, which has eight devices.

    For tests in which a separate process would prove nothing.
    """
    return importlib.import_module(f"jaxdist.{name}").main([*map(str, arguments)])


def records(run_dir: Path, kind: str) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def losses(run_dir: Path) -> dict[int, tuple[str, str]]:
    """Return step -> loss and gradient norm to the last bit; of a repeated step the last record."""
    return {
        r["step"]: (float(r["loss"]).hex(), float(r["grad_norm"]).hex())
        for r in records(run_dir, "train")
    }
