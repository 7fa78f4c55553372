"""Both ends of the pipe between `versus.py` and a contender; `versus.py` defines the protocol."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STOP_S = 5.0  # time to exit before it is killed
SLACK_S = 0.5  # latency of a request and its answer on a busy machine


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[int], float]]]) -> None:
    """Run the contender's end: build the trainer, then run the requested blocks.

    Args:
        start: the job -> (`parameters`, `versions` and `threads` of the contender, a function that
            runs a number of steps, waits for the last and returns its loss).
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library output must not mix with answers
    say = lambda answer: print(json.dumps(answer), file=answers, flush=True)
    facts, run = start(json.loads(Path(sys.argv[-1]).read_text()))
    say(facts)
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        begin = time.perf_counter()
        loss = run(steps)
        say({"seconds": time.perf_counter() - begin, "loss": loss})


class LeftOut(Exception):
    """Raised with the reason why a contender is excluded."""


class Contender:
    """One process that trains on request.

    Attributes:
        facts: its first answer.
        losses: loss of the last step of every request, including warm-up.
        blocks: seconds per step of each block.
        processor: processor seconds of each block, of all threads.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path):
        self.log = log.open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            start_new_session=True,  # so that its child processes can be killed too
        )
        self.facts: dict[str, Any] = {}
        self.losses: list[float] = []
        self.blocks: list[float] = []
        self.processor: list[float] = []
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ready(self, num_params: int, timeout_s: float) -> None:
        """Wait until it has built its model.

        Raises:
            LeftOut: it crashed or hung, or its model differs.
        """
        self.facts = self._answer(timeout_s, "parameters")
        count = self.facts["parameters"]
        if not abs(count / num_params - 1) <= 0.01:
            raise LeftOut(f"has {count:,} parameters, the others {num_params:,}")
        if not isinstance(self.facts.setdefault("versions", {}), dict):
            raise LeftOut(f"answered versions {self.facts['versions']!r}, not names with versions")

    def train(self, steps: int, timeout_s: float) -> float:
        """Train these steps, and return their seconds.

        Raises:
            LeftOut: it crashed or hung, its loss is not finite, or its time is implausible.
        """
        begin = time.perf_counter()
        with contextlib.suppress(OSError):  # `_answer` detects a dead process
            self.process.stdin.write(json.dumps({"steps": steps}).encode() + b"\n")
            self.process.stdin.flush()
        answer = self._answer(timeout_s, "seconds", "loss")
        elapsed, seconds = time.perf_counter() - begin, answer["seconds"]
        if not seconds <= elapsed <= 1.1 * seconds + SLACK_S:
            raise LeftOut(f"answered {seconds:.3g} s for a block that took {elapsed:.3g} s")
        if not math.isfinite(answer["loss"]):
            raise LeftOut(f"loss is {answer['loss']}")
        self.losses.append(answer["loss"])
        return seconds

    def processor_s(self) -> float:
        """Return the processor seconds of the process so far; 0 after its end."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def stop(self, wait_s: float = STOP_S) -> int:
        """End the process and its children; return its exit code."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._listener.join(STOP_S)
        self.log.close()
        return self.process.wait()

    def last_lines(self, count: int = 10) -> list[str]:
        """Return the end of its log."""
        lines = Path(self.log.name).read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    def _answer(self, timeout_s: float, *names: str) -> dict[str, Any]:
        """Return the next answer, which must contain these numbers."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise LeftOut(f"no answer within {timeout_s:g} s") from None
        if answer is None:
            code = self.stop()
            raise LeftOut(f"ended with exit code {code}: {''.join(self.last_lines(1)) or 'silent'}")
        if any(not isinstance(answer.get(name), int | float) for name in names):
            raise LeftOut(f"answered {json.dumps(answer)}, without {' and '.join(names)}")
        return answer

    def _listen(self) -> None:
        for line in self.process.stdout:
            try:
                answer = json.loads(line)
            except ValueError:
                answer = None
            if isinstance(answer, dict):
                self._answers.put(answer)
            else:
                self.log.write(line)
                self.log.flush()
        self._answers.put(None)
