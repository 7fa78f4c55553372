"""Seconds that a checkpoint takes to an S3 server and back, beside PyTorch's and plain Orbax.

    python scripts/bench/checkpoint_store.py                 # 1 GB, three times each; minutes
    python scripts/bench/checkpoint_store.py --gb 0.1 --repeats 1

Contenders write the same bytes in turn, in one run, and read them back; medians are printed.

| contender | where | what |
|---|---|---|
| `jaxdist` | the server | `Checkpointer` with its checksums, CRC-32 of every file and manifest |
| `torch` | the server | `torch.distributed.checkpoint.async_save` with its `FsspecWriter` |
| `orbax` | a disk | `AsyncCheckpointer` alone |
| `plain client` | the server | obstore alone: objects of 16 MiB, 16 at a time, nothing checked |

`blocked` is what a training loop waits for, `total` the time until all is stored. The server is
moto on this machine (see `tests/object_servers.py`), a Python program whose own work is most of the
time, as the plain client's row shows: compare rows, not clouds. PyTorch's row needs the packages
torch and s3fs and is left out without them. The page is written after each repetition.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results" / "checkpoint_store.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import object_servers  # noqa: E402, needs sys.path
from checkpoint import NUM_ARRAYS, QUIET, make_state  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxdist.checkpoint import CheckpointConfig, Checkpointer  # noqa: E402
from jaxdist.core.mesh import MeshSpec  # noqa: E402

BUCKET = "s3://bucket"


class Times(NamedTuple):
    """Seconds of one save and of the following restore."""

    blocked: float
    total: float
    restored: float


Contender = Callable[[int], Times]
"""Save and restore once, under the given number."""


def main() -> int:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    with (
        tempfile.TemporaryDirectory(prefix="bench-store-") as folder,
        pytest.MonkeyPatch.context() as patch,
        object_servers.s3(patch),
        contenders(Path(folder), arguments.gb) as saves,
    ):
        times: dict[str, list[Times]] = {name: [] for name in saves}
        for number in range(arguments.repeats):
            for name, save in saves.items():
                times[name].append(save(number))
                print(name, times[name][-1], flush=True)
            arguments.out.write_text(page(times, arguments.gb))
    print(arguments.out.read_text())
    return 0


@contextmanager
def contenders(folder: Path, gb: float) -> Iterator[dict[str, Contender]]:
    """Yield name -> contender; with PyTorch only if it is installed."""
    state = make_state(MeshSpec(fsdp=2).build(), P("fsdp"), gb)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    writer = Checkpointer(f"{BUCKET}/ours", CheckpointConfig(max_to_keep=1), **QUIET)
    writer.preflight(state)

    def ours(number: int) -> Times:
        save = lambda: writer.save(number, state, {})
        restore = lambda: writer.restore(target, step=number)[0]
        return timed(save, writer.wait, lambda: same(restore(), state))

    plain = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def orbax(number: int) -> Times:
        path = folder / f"orbax-{number}"
        save = lambda: plain.save(path, args=ocp.args.StandardSave(state))
        restore = lambda: plain.restore(path, args=ocp.args.StandardRestore(target))
        return timed(save, plain.wait_until_finished, lambda: same(restore(), state))

    rivals = {**torch_contender(gb), "orbax": orbax, "plain client": plain_client(gb)}
    yield {"jaxdist": ours, **rivals}
    writer.close()
    plain.close()


def torch_contender(gb: float) -> dict[str, Contender]:
    """Return a contender that saves as many bytes with PyTorch's fsspec writer, if installed."""
    try:
        import s3fs  # noqa: F401, needed by fsspec for s3://
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    except ImportError as missing:
        print(f"torch is left out: {missing}")
        return {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    size = int(gb * 1e9 / 4 / 3 / NUM_ARRAYS)
    state = {f"w{i}": torch.randn(size) for i in range(3 * NUM_ARRAYS)}
    read = {name: torch.empty_like(value) for name, value in state.items()}

    def torch_to_store(number: int) -> Times:
        url, futures = f"{BUCKET}/torch/{number}", []
        save = lambda: futures.append(dcp.async_save(state, storage_writer=FsspecWriter(url)))
        restore = lambda: dcp.load(read, storage_reader=FsspecReader(url))
        times = timed(save, lambda: futures[0].result(), restore)
        assert all(torch.equal(read[name], value) for name, value in state.items())
        return times

    return {"torch": torch_to_store}


def plain_client(gb: float) -> Contender:
    """Transfer as many bytes with the client alone, to measure the limit of the server."""
    import obstore
    from obstore.store import S3Store

    store = S3Store("bucket", client_options={"allow_http": True, "timeout": "10min"})
    content, count = os.urandom(16 << 20), max(1, round(gb * 1e9 / (16 << 20)))

    def plain(number: int) -> Times:
        names = [f"plain/{number}/{i}" for i in range(count)]
        put = lambda name: obstore.put(store, name, content, use_multipart=False)
        get = lambda name: len(obstore.get_range(store, name, start=0, length=len(content)))
        with ThreadPoolExecutor(16) as pool:
            return timed(
                lambda: list(pool.map(put, names)), lambda: None, lambda: list(pool.map(get, names))
            )

    return plain


def timed(save: Callable[[], Any], wait: Callable[[], Any], restore: Callable[[], Any]) -> Times:
    """Time a save, the wait for its end, and a restore."""
    start = time.perf_counter()
    save()
    blocked = time.perf_counter() - start
    wait()
    total = time.perf_counter() - start
    restore()
    return Times(blocked, total, time.perf_counter() - start - total)


def same(restored: Any, state: Any) -> None:
    """Raise if a restored tree of arrays [...] differs from the saved one."""
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    assert all(jnp.array_equal(x, y) for x, y in pairs)


def page(times: dict[str, list[Times]], gb: float) -> str:
    """Return the results as Markdown."""
    packages = ("jax", "orbax-checkpoint", "torch", "s3fs", "obstore", "moto")
    versions = ", ".join(f"{name} {version(name)}" for name in packages if version(name))
    load = os.getloadavg()[0]
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    repeats = len(times["jaxdist"])
    lines = [
        "# A checkpoint to an S3 server and back",
        "",
        f"Commit {commit}, {os.cpu_count()} CPU cores (load average {load:.1f} at the end), Python "
        f"{platform.python_version()}, {versions}, {datetime.date.today()}; `python "
        f"scripts/bench/checkpoint_store.py --gb {gb:g} --repeats {repeats}`. "
        "orbax writes to the local disk, the others to moto's S3 server on the same cores. "
        "Medians of the repetitions, in seconds; contenders took turns in one run.",
        "",
        f"| {gb:g} GB | blocked | total | GB/s | restored | GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in times.items():
        blocked, total, restored = (
            statistics.median(column) for column in zip(*rounds, strict=True)
        )
        lines.append(
            f"| {name} | {blocked:.2f} | {total:.2f} | {gb / total:.3f} | "
            f"{restored:.2f} | {gb / restored:.3f} |"
        )
    return "\n".join([*lines, ""])


def version(package: str) -> str:
    """Return the version of an installed package; "" if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
