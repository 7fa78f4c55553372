"""Run commands as a user does: real processes, a tiny model, and what they left behind."""

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
    "--monitoring.tensorboard=false",  # tensorboardX imports PyTorch where that is installed
]


def tiny(*flags: object) -> list[str]:
    """The tiny job with these flags; one that it sets itself is replaced, not given twice."""
    given = [str(flag) for flag in flags]
    name = lambda flag: flag.partition("=")[0].replace("_", "-")
    names = set(map(name, given))
    return [flag for flag in TINY if name(flag) not in names] + given


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port that no connection takes before a server does: theirs come from 32768 up."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return probe.getsockname()[1]


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"jaxdist.{name}", *map(str, arguments)]


@functools.cache
def fork_server() -> tuple[ForkServer, dict[str, str]]:
    """A process that has imported what commands import, and the environment it started in."""
    given = environment()
    with mock.patch.dict(os.environ, {**given, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}):
        server = ForkServer()
    while not (server.is_ready() or server.is_gone()):
        time.sleep(0.05)
    return server, given


def run(name: str, *arguments: object, cwd=None, timeout_s=300) -> subprocess.CompletedProcess:
    """Run a command to its end in a process of its own.

    The process is a fork of one that has imported jax, which takes 3 s of processor. It is a new
    one if a variable that jax reads at import differs.
    """
    words, given = command(name, *arguments), environment()
    server, before = fork_server()
    read_by_jax = {n for n in {*given, *before} if n.startswith(("JAX_", "XLA_"))}
    if any(given.get(n) != before.get(n) for n in read_by_jax) or before.keys() - given.keys():
        return subprocess.run(
            words, capture_output=True, text=True, env=given, cwd=cwd, timeout=timeout_s
        )
    with tempfile.TemporaryFile("w+") as out, tempfile.NamedTemporaryFile("r") as errors:
        wrapped = ["-m", "forked_command", str(cwd or Path.cwd()), errors.name, *words[2:]]
        process = server.start(wrapped, given, out.fileno())
        code = server.code_of(process.pid, timeout_s)
        out.seek(0)
        said = out.read(), errors.read()
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"{name} after {timeout_s} s: {said}")
    return subprocess.CompletedProcess(words, code, *said)


def run_here(name: str, *arguments: object) -> int:
    """The exit code of a command in this process, which has eight devices and has imported jax.

    For tests to which a process of its own would prove nothing.
    """
    return importlib.import_module(f"jaxdist.{name}").main([*map(str, arguments)])


def records(run_dir: Path, kind: str) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def losses(run_dir: Path) -> dict[int, tuple[str, str]]:
    """Step -> loss and gradient norm to the last bit; a step done twice counts as it came last."""
    return {
        r["step"]: (float(r["loss"]).hex(), float(r["grad_norm"]).hex())
        for r in records(run_dir, "train")
    }
