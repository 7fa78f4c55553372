"""Inject faults into simulated jobs: is the fault named, and how does the job go on?

    python scripts/bench/scale_faults.py          # 3 minutes

The launchers' membership code (rendezvous files, leaders, rounds) runs for all hosts of a job with
a simulated clock, and the coordination code (exchanges, failure broadcast, commits of saves) in a
thread for each process. Only the processes that train are replaced. Numbers of seconds are of the
simulated clock. Exit codes are those of docs/troubleshooting.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import errno
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results" / "scale_faults.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402, needs sys.path
from key_value_store import Client, Job, KeyValueStore  # noqa: E402
from test_launch_elastic import a_plan  # noqa: E402
from test_launch_rendezvous import LOST_S, Participant, World  # noqa: E402

from jaxdist.checkpoint import manifest, save  # noqa: E402
from jaxdist.checkpoint.events import make_group  # noqa: E402
from jaxdist.run.monitoring.stragglers import find_stragglers, summarize  # noqa: E402
from jaxdist.runtime import coordination  # noqa: E402
from jaxdist.runtime.coordination import Group, failure_broadcast  # noqa: E402
from jaxdist.runtime.storage import Location, locate  # noqa: E402
from jaxdist.tools.launch import rendezvous  # noqa: E402
from jaxdist.tools.launch.membership import LegalSizes  # noqa: E402

HOSTS = 16, 64
PROCESSES = 64, 1024
JOIN_S = 30.0


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a fault: the line that names it, the seconds of the reaction, the end of the job.

    `named` is one line that names the fault, "" = none; `seconds` until all had reacted.
    """

    named: str
    seconds: float | None
    outcome: str


class FaultyWorld(World):
    """A job whose hosts can be slow, frozen, or without the shared directory."""

    def __init__(self, folder: Path, count: int, patch: pytest.MonkeyPatch):
        sizes = LegalSizes(legal=range(1, count + 1), simulate=1)
        plan = a_plan("1:1", f"1:{count}", rdzv_timeout_s=JOIN_S)
        super().__init__(folder, plan, sizes)
        self.count, self.offline, self.frozen = count, set[int](), set[int]()
        self.period: dict[int, int] = {}  # seconds between the steps of a slow host
        self._active = -1
        for name in ("write", "read", "json", "entries", "exists"):
            patch.setattr(Location, name, self._failing(getattr(Location, name)))
        for rank in range(count):
            self.start(rank)
        self.run(5)
        assert self.members() == list(range(count))

    def run(self, seconds: float) -> None:
        """Step every host that is not frozen, each second or in its own period."""
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            for rank, participant in list(self.living.items()):
                if rank in self.frozen or self.clock.now % self.period.get(rank, 1):
                    continue
                self._active = rank
                participant.step()
                self._active = -1

    def members(self) -> list[int]:
        """Return the ranks of the round that runs on all its members; [] if there is none."""
        cut_off = self.frozen | self.offline
        running = {r: p for r, p in self.living.items() if p.is_running and r not in cut_off}
        ranks = next(iter(running.values())).ranks if running else []
        same = all(r in running and running[r].ranks == ranks for r in ranks)
        return ranks if same else []

    def until(self, reached: Callable[[], bool], limit_s: int = 240) -> float | None:
        """Run until a condition holds; return the seconds, or None after `limit_s`."""
        for second in range(limit_s):
            if reached():
                return float(second)
            self.run(1)
        return None

    def others(self, ranks: set[int]) -> list[Participant]:
        """Return the living hosts but these."""
        return [p for rank, p in self.living.items() if rank not in ranks]

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **options: Any) -> Any:
            if self._active in self.offline:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return call(*args, **options)

        return checked


def without(world: FaultyWorld, lost: set[int]) -> Result:
    """Return how the other hosts react to the loss of some."""
    others = world.others(lost)
    seconds = world.until(lambda: all(p.causes for p in others))
    causes = {cause for p in others for cause in p.causes}
    expected = sorted(set(range(world.count)) - lost)
    running = world.until(lambda: world.members() == expected)
    assert running is not None and all(len(p.causes) == 1 for p in others)
    names = [rf"host {rank} \(n{rank}\) is lost" for rank in lost]
    assert all(any(re.search(name, cause) for name in names) for cause in causes), causes
    return Result(min(causes), seconds, f"continues on {len(expected)} hosts")


def lost_host(world: FaultyWorld) -> Result:
    """Remove one launcher without notice."""
    lost = {world.count // 2}
    world.kill(*lost)
    return without(world, lost)


def lost_rack(world: FaultyWorld) -> Result:
    """Remove an eighth of the launchers at once."""
    lost = set(range(world.count // 4, world.count // 4 + world.count // 8))
    for rank in lost:
        world.kill(rank)
    return without(world, lost)


def lost_leader(world: FaultyWorld) -> Result:
    """Remove the launcher that leads and runs process 0."""
    world.kill(0)
    result = without(world, {0})
    coordinators = {p.placement.coordinator_address.partition(":")[0] for p in world.others(set())}
    assert coordinators == {"n1"}
    return result


def slow_host(world: FaultyWorld) -> Result:
    """One launcher runs every 10 s, within the heartbeat timeout; its process is slow."""
    slow = world.count // 2
    world.period[slow] = 10
    world.run(90)
    assert world.members() == list(range(world.count))
    assert not any(p.causes for p in world.living.values())
    reports = {
        rank: {**summarize([(1.0, 0.0, 0.0 if rank == slow else 0.6)] * 50), "host": f"n{rank}"}
        for rank in range(world.count)
    }
    (straggler,) = find_stragglers(reports)
    assert straggler.process == slow
    return Result(straggler.text, None, f"continues on {world.count} hosts")


def partition(world: FaultyWorld) -> Result:
    """An eighth of the hosts loses the shared directory, and 120 s later has it again."""
    apart = set(range(world.count - world.count // 8, world.count))
    world.offline = set(apart)
    result = without(world, apart)
    world.run(120)
    assert not any(world.living[rank].code for rank in apart)
    world.offline.clear()
    grown = world.until(lambda: any(p.group and p.group.is_stopping for p in world.others(apart)))
    assert grown is not None
    for p in world.others(apart):
        p.ends(75)
        assert p.agent.continues_after_save()
    complete = world.until(lambda: world.members() == list(range(world.count)))
    assert complete is not None
    outcome = f"{result.outcome}, saves and continues on {world.count} when they are back"
    return dataclasses.replace(result, outcome=outcome)


def stalled_storage(world: FaultyWorld) -> Result:
    """The shared directory does not answer any host for 60 s: four heartbeat timeouts."""
    world.frozen = set(range(world.count))
    world.run(60)
    world.frozen.clear()
    world.run(4 * LOST_S)
    assert world.members() == list(range(world.count))
    causes = [cause for p in world.living.values() for cause in p.causes]
    assert not causes, causes[:3]
    return Result("", None, f"continues on {world.count} hosts without a restart")


def frozen_leader(world: FaultyWorld) -> Result:
    """The storage client of the first host hangs for 90 s."""
    world.frozen = {0}
    result = without(world, {0})
    world.run(30)
    world.frozen.clear()
    back = world.until(lambda: bool(world.living[0].causes))
    assert back is not None and "without host 0" in world.living[0].causes[0]
    return result


MEMBERSHIP: dict[str, Callable[[FaultyWorld], Result]] = {
    "one host is lost": lost_host,
    "an eighth of the hosts is lost at once": lost_rack,
    "the first host, with process 0, is lost": lost_leader,
    "one host is slow": slow_host,
    "an eighth of the hosts loses the shared directory": partition,
    "the shared directory stalls for 60 s": stalled_storage,
    "the storage of the first host hangs for 90 s": frozen_leader,
}


class Ended(BaseException):
    """The end of a simulated process."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


def end(text: str, code: int = 1) -> None:
    """End a simulated process."""
    raise Ended(text, code)


class DeadStore(KeyValueStore):
    """The store after the end of process 0."""

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        """Fail as jax's client does."""
        raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")


def run_job(
    count: int,
    patch: pytest.MonkeyPatch,
    work: Callable[[int], Any],
    store: KeyValueStore | None = None,
) -> list[Any]:
    """Return the results, errors and ends of processes that share a store."""
    store = KeyValueStore() if store is None else store
    job = Job(patch, count, {i: Client(store) for i in range(count)})
    patch.setattr(failure_broadcast, "_end", end)
    patch.setattr(failure_broadcast, "_REPORT_S", 0.0)
    own_host = lambda: f"n{coordination.process_id_and_count()[0]}"
    patch.setattr(failure_broadcast.socket, "gethostname", own_host)

    def ended(process: int) -> Any:
        try:
            return work(process)
        except Ended as death:
            return death

    return job.run(ended)


def failed_process(count: int, patch: pytest.MonkeyPatch) -> Result:
    """One process finds corrupt state (exit code 86)."""
    bad = count // 2

    def work(process: int) -> Any:
        if process == bad:
            failure_broadcast.announce_failure(86, "CorruptState: replicas differ")
            return None
        return failure_broadcast._watch()

    ends = [end for i, end in enumerate(run_job(count, patch, work)) if i != bad]
    assert {type(one) for one in ends} == {Ended} and {one.code for one in ends} == {86}
    assert all(f"because process {bad} on n{bad} failed: CorruptState" in str(e) for e in ends)
    return Result(str(ends[0]), None, "ends with 86 in all processes")


def dead_process_0(count: int, patch: pytest.MonkeyPatch) -> Result:
    """Process 0, which runs the coordination service, dies."""
    work = lambda process: failure_broadcast._watch() if process else None
    ends = run_job(count, patch, work, DeadStore())[1:]
    assert {type(one) for one in ends} == {Ended} and {one.code for one in ends} == {1}
    assert all("because process 0, which runs" in str(one) for one in ends)
    return Result(str(ends[0]), None, "ends with 1 in all processes; the launcher restarts it")


def late_process(count: int, patch: pytest.MonkeyPatch) -> Result:
    """One process does not come to an exchange."""
    late = count // 2

    def work(process: int) -> Any:
        if process != late:
            Group("late", timeout_s=5.0).synchronize()
        return None

    errors = [one for i, one in enumerate(run_job(count, patch, work)) if i != late]
    assert all(f"process {late} of {count}" in str(error) for error in errors), errors[:3]
    return Result(str(errors[0]), None, "ends with 1 in all processes")


def failed_store(count: int, patch: pytest.MonkeyPatch) -> Result:
    """The storage of one process times out while it reads back the files of a save."""
    bad = count // 2

    def fingerprints(path: Location, names: list[str]) -> dict[str, list[int]]:
        if coordination.process_id_and_count()[0] == bad:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), f"d/{bad:05d}")
        return {name: [1, 2] for name in names}

    patch.setattr(manifest, "fingerprints", fingerprints)

    def work(process: int) -> Any:
        saver = save.Saver.__new__(save.Saver)
        saver._directory, saver._background = locate("/simulated"), make_group()
        saver._writer = types.SimpleNamespace(fingerprints=None)
        saver._write_document = lambda path, document: [f"d/{i:05d}" for i in range(count)]
        saver._write_manifest = lambda *_: pytest.fail("a manifest for a save that failed")
        return saver._commit(save.Outcome(step=5), {}, {})

    errors = run_job(count, patch, work)
    assert {type(error).__name__ for error in errors} == {"CheckpointError"}
    assert all(f"d/{bad:05d}" in str(error) and "timed out" in str(error) for error in errors)
    return Result(str(errors[0]), None, "no manifest; training continues, the next save retries")


COORDINATION: dict[str, Callable[[int, pytest.MonkeyPatch], Result]] = {
    "a process ends with corrupt state": failed_process,
    "process 0 dies": dead_process_0,
    "a process does not come to an exchange": late_process,
    "the storage of a process fails in a save": failed_store,
}


def inject(name: str, count: int) -> Result:
    """Return the outcome of a fault in a job of `count` hosts, or processes."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if name in COORDINATION:
            return COORDINATION[name](count, patch)
        patch.setattr(rendezvous.time, "sleep", lambda seconds: None)
        return MEMBERSHIP[name](FaultyWorld(Path(folder) / "launch", count, patch))


def main() -> int:
    """Inject every fault and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    lines = [
        "# Faults in simulated jobs",
        "",
        f"{datetime.date.today()}, `python scripts/bench/scale_faults.py`: real membership, "
        f"coordination and save code of {' and '.join(map(str, HOSTS))} hosts (faults of "
        f"processes: {' and '.join(map(str, PROCESSES))} processes), simulated clocks. Heartbeat "
        f"timeout {LOST_S:g} s. The words are those in the largest job; seconds until the last "
        "host has reacted.",
        "",
        "| fault | named by | s | the job |",
        "|---|---|---|---|",
    ]
    for name in [*MEMBERSHIP, *COORDINATION]:
        results = [inject(name, size) for size in (HOSTS if name in MEMBERSHIP else PROCESSES)]
        seconds = [f"{one.seconds:.0f}" for one in results if one.seconds is not None]
        last = results[-1]
        named = last.named.replace("|", "/") or "–"
        lines.append(f"| {name} | {named} | {' / '.join(seconds)} | {last.outcome} |")
        print(lines[-1], flush=True)
    arguments.out.write_text("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
