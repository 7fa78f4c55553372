"""Processes of one job that share the run directory and no local disk, killed and started again.

    python tests/local_tier_worker.py SETTINGS

SETTINGS is JSON: `folder`, and `plan`, a list of starts. Each start is made of forks of this
process, one for each of `processes`, and ends before the next begins:

    run        train from the newest save to `steps`; with `kill`, end by SIGKILL after a save
    subsets    for every subset of hosts, with the disks as the killed run left them: empty their
               disks, open the run, restore; record the subset, the step and the checksums

Forks share the import of jax. Process p is on host p, or on the one that `hosts` names. The disk of
a host is `folder/disk-HOST`, set by the variable LOCAL_DISK. Results are written to
`folder/records.jsonl`.
"""

import itertools
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from checkpoint_worker import make_run, start_jax
from commands import free_port

from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.checkpoint.checksum import checksums
from jaxdist.checkpoint.local.copies import VARIABLE
from jaxdist.runtime import coordination

EVERY, LOCAL_EVERY = 4, 2  # steps
HISTORY = "local_tier.json"


class Worker:
    """One process of one start."""

    def __init__(self, folder: Path, process: int, start: dict):
        self.folder, self.process, self.start = folder, process, start
        host = start["hosts"][process] if "hosts" in start else process
        self.disk = folder / f"disk-{host}"
        os.environ["LOCAL_DISK"] = str(self.disk)
        os.environ[VARIABLE] = f"host-{host}"
        start_jax({"devices": 1, "process": process, **start})
        mesh = start.get("mesh", f"fsdp={start['processes']}")
        self.state, self.placement, self.update = make_run({"mesh": mesh, "width": 8})
        shape_of = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        self.target = jax.tree.map(shape_of, self.state, self.placement)

    def write_record(self, **record):
        if self.process == 0:
            with open(self.folder / "records.jsonl", "a") as out:
                out.write(json.dumps(record) + "\n")

    def open(self) -> Checkpointer:
        config = CheckpointConfig(
            save_interval_steps=EVERY,
            local_dir="$LOCAL_DISK/saves",
            local_interval_steps=LOCAL_EVERY,
            async_save=False,
        )
        log = lambda line: self.write_record(log=line)
        return Checkpointer(self.folder / "checkpoints", config, log=log)

    def restore(self, opened: Checkpointer) -> int:
        step = opened.choose(lambda: self.target)
        if step is None:
            return 0
        self.state, meta, restored_step = opened.restore(self.target, step=step)
        assert (restored_step, meta) == (step, {"next": step})
        return step

    def bits(self) -> list[int]:
        return checksums([self.state["params"]["w"], self.state["opt_state"]["mu"]])

    def run(self):
        opened = self.open()
        first = self.restore(opened)
        self.write_record(began=first, claim=opened.survivable(self.state))
        for step in range(first + 1, self.start["steps"] + 1):
            self.state, sample = self.update(self.state)
            self.write_record(step=step, loss=[float(x).hex() for x in np.asarray(sample)])
            if due := opened.due(step):
                opened.save(step, self.state, {"next": step}, due=due)
            opened.wait()
            opened._local.wait()
        self.write_record(checksums=self.bits(), events=[e["event"] for e in opened.pop_events()])
        if self.start.get("kill"):
            coordination.collect("before the kill", None)
            time.sleep(0.2 if self.process == 0 else 0)  # it relays the others' last message
            os.kill(os.getpid(), signal.SIGKILL)
        opened.close()

    def subsets(self):
        numbers = range(self.start["processes"])
        sizes = range(self.start["processes"] + 1)
        for lost in itertools.chain.from_iterable(
            itertools.combinations(numbers, n) for n in sizes
        ):
            shutil.rmtree(self.disk, ignore_errors=True)
            if self.process not in lost:
                shutil.copytree(f"{self.disk}-kept", self.disk)
            if self.process == 0:
                shutil.copy(self.folder / HISTORY, self.folder / "checkpoints" / HISTORY)
            coordination.collect("disks", None)
            opened = self.open()
            step = self.restore(opened)
            self.write_record(lost=lost, step=step, checksums=self.bits())
            opened.close()
            coordination.collect("closed", None)


def main(folder: Path, plan: list[dict]) -> None:
    for start in plan:
        for host in start.get("wipe", []):
            shutil.rmtree(folder / f"disk-{host}")
        start["port"] = free_port()
        children = []
        for process in range(start["processes"]):
            if not (child := os.fork()):
                try:
                    worker = Worker(folder, process, start)
                    getattr(worker, start["do"])()
                    jax.distributed.shutdown()
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
                os._exit(0)
            children.append(child)
        ends = [os.waitpid(child, 0)[1] for child in children]
        killed = [os.WIFSIGNALED(end) and os.WTERMSIG(end) == signal.SIGKILL for end in ends]
        with open(folder / "records.jsonl", "a") as out:
            out.write(json.dumps({"ended": ends, "killed": killed, "start": start}) + "\n")
        if start.get("kill"):
            shutil.copy(folder / "checkpoints" / HISTORY, folder / HISTORY)
            for disk in folder.glob("disk-?"):
                shutil.copytree(disk, f"{disk}-kept", dirs_exist_ok=True)


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    main(Path(chosen["folder"]), chosen["plan"])
