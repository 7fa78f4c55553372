"""Run the launcher in a separate process, with workers that run code of the test."""

import contextlib
import io
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from commands import ROOT

from jaxdist.tools.launch import membership

WORKER = """
import os, signal, sys, time
from pathlib import Path
from jaxdist import runtime

INDEX = int(os.environ["JAXDIST_PROCESS_ID"])
ATTEMPT = int(os.environ["JAXDIST_ATTEMPT"])
RUN = Path(os.environ["RUN_DIR"])

def main():
"""


# Like `python -m jaxdist.launch`, with less time for processes to report after the first failure.
LAUNCHER = """
from jaxdist import runtime
from jaxdist.tools.launch import __main__, worker_group
worker_group.COLLECT_S = 1.0
runtime.run_command(__main__.main)
"""


class Launched:
    """A launcher in a separate process, with a worker whose `main` is `body`."""

    def __init__(self, tmp_path: Path, body: str, *flags: str, args: tuple[str, ...] = ()):
        self.run_dir = tmp_path / "run"
        worker = tmp_path / "worker.py"
        code = WORKER + textwrap.indent(textwrap.dedent(body), "    ")
        worker.write_text(code + "\n\nruntime.run_command(main)\n")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCHER, "--backoff-s=0.05", *flags),
                *(f"--run-dir={self.run_dir}", f"--program={sys.executable} {worker}"),
                *(("--", *args) if args else ()),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RUN_DIR": str(self.run_dir), "PYTHONPATH": str(ROOT)},
        )

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        return self.process.returncode, out, err

    def wait_for(self, *names: str) -> None:
        """Wait until the workers have created these files."""
        until = time.monotonic() + 60
        while not all((self.run_dir / name).exists() for name in names):
            if time.monotonic() > until:
                self.process.kill()
                _, err = self.process.communicate(timeout=10)
                raise AssertionError(f"{names} were not made; the launcher said:\n{err[-4000:]}")
            time.sleep(0.02)


def sizes_here(arguments: Sequence[str]) -> membership.LegalSizes:
    """Return `membership.read_sizes`, computed without a child, which would import jax again."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", ["", *arguments]):
        membership.main()
    return membership.LegalSizes(**json.loads(output.getvalue()))


def is_running(pid: int) -> bool:
    """Return True if the process runs; a zombie that nobody has reaped does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
