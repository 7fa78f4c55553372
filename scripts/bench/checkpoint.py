"""Seconds that saving and restoring cost, beside plain Orbax and PyTorch's checkpoints.

    python scripts/bench/checkpoint.py                     # 0.5 GB, 2 simulated devices
    python scripts/bench/checkpoint.py --gb 2 --directory /dev/shm/bench
    python scripts/bench/checkpoint.py --layers 9 --width 1024      # parameters of a transformer
    python scripts/bench/checkpoint.py --layers 111 --width 64 --first   # 1,000 arrays

All contenders write the same bytes in one run, interleaved, in one process that keeps freed memory
as a run does; the medians of the repetitions are printed. `blocked` is what a training loop waits
for, `total` the time until the files are complete; ours includes the checksums, the CRC-32 of every
file and the manifest. `processor` is the time of all threads: what is left of it beside a step on
CPU is what a save costs. The last part trains the default model of `jaxdist.train` with a save
every 50 steps and without, in alternating blocks.

With `--layers` the state is the parameters of an unstacked transformer, nine arrays per layer.
`--first` measures the first two saves of a new process, of each contender in turn; ours without
`preflight`, which a run does before its first step. Orbax is imported before.

On CPU there is no copy from device to host, and the checksums share the cores with the next step;
on a GPU `blocked` is the copy. PyTorch's rows are absent when it is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import runtime
from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.run.setup import assemble
from jaxdist.runtime.formatting.numbers import percent

NUM_ARRAYS = 8
QUIET: dict[str, Any] = {"log": lambda line: None}


def main() -> None:
    """Measure and print one table per question."""
    arguments = _arguments()
    if arguments.first == "all":
        first_saves(arguments.repeats)
        return
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    runtime.tune_malloc()
    root = Path(arguments.directory or tempfile.mkdtemp(prefix="bench-checkpoint-"))
    mesh = MeshSpec(fsdp=len(jax.devices())).build()
    try:
        if arguments.layers:
            state = make_transformer(mesh, arguments.layers, arguments.width)
            arguments.gb = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e9
        else:
            state = make_state(mesh, P("fsdp"), arguments.gb)
        print(
            f"{len(jax.devices())} x {jax.devices()[0].platform}, {arguments.gb:.3f} GB in", end=""
        )
        print(f" {len(jax.tree.leaves(state))} arrays, load average {os.getloadavg()[0]:.1f}")
        if arguments.first:
            importlib.import_module("orbax.checkpoint")
            new = {
                "jaxdist": lambda: ours(root / "ours", state, preflight=False),
                "orbax": lambda: plain_orbax(root / "orbax", state),
            }[arguments.first]()
            print(*(value for step in (1, 2) for value in new(step)))
            return
        contenders = {
            "jaxdist": ours(root / "ours", state),
            "jaxdist, local_dir": ours_locally(root / "local", state),
            "Orbax StandardCheckpointer": plain_orbax(root / "orbax", state),
            **torch_contenders(root, arguments.gb),
        }
        measure(contenders, arguments.repeats, arguments.gb)
        restores(root / "restore", state, mesh, arguments.repeats, arguments.gb)
        if arguments.blocks:
            throughput(root / "throughput", arguments.blocks, arguments.rows)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def make_state(mesh: Mesh, spec: P, gb: float) -> dict[str, Any]:
    """Return AdamW's parameters and two moments, `gb` GB in total, sharded by `spec`."""
    columns = int(gb * 1e9 / 4 / 3 / NUM_ARRAYS / 1024 / 16) * 16

    def make(key: jax.Array) -> dict[str, Any]:
        draw = lambda i: jax.random.normal(jax.random.fold_in(key, i), (1024, columns))
        params = {f"w{i}": draw(i) for i in range(NUM_ARRAYS)}
        moments = {name: jax.tree.map(lambda x: x * 0.5, params) for name in ("mu", "nu")}
        return {"params": params, "opt_state": moments}

    shapes = jax.eval_shape(make, jax.random.key(0))
    placed = jax.tree.map(lambda _: NamedSharding(mesh, spec), shapes)
    return jax.block_until_ready(jax.jit(make, out_shardings=placed)(jax.random.key(0)))


def make_transformer(mesh: Mesh, num_layers: int, width: int) -> dict[str, Any]:
    """Return parameters of a decoder whose layers are not stacked; matrices are sharded."""
    square, half, mlp = (width, width), (width, width // 2), (width, 4 * width)
    shapes = dict(q=square, k=half, v=half, o=square, gate=mlp, up=mlp, down=mlp[::-1])
    layer = {**shapes, "norm_attention": (width,), "norm_mlp": (width,)}
    draw = np.random.default_rng(0).standard_normal

    def make(shape: tuple[int, ...]) -> jax.Array:
        spec = P("fsdp") if len(shape) > 1 else P()
        return jax.device_put(draw(shape, np.float32), NamedSharding(mesh, spec))

    layers = {
        str(i): {name: make(shape) for name, shape in layer.items()} for i in range(num_layers)
    }
    return {"params": layers}


def first_saves(repeats: int) -> None:
    """Print the medians of the first two saves of new processes, both contenders in turn."""
    times: dict[str, list[list[float]]] = {"jaxdist": [], "orbax": []}
    for _ in range(repeats):
        for name, rows in times.items():
            command = [sys.executable, *sys.argv, "--first", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            lines = done.stdout.splitlines()
            rows.append([float(value) for value in lines[-1].split()])
    print(f"{lines[0]}; medians of {repeats}")
    print(f"{'saves of a new process':<24}{'1st blocked s':>15}{'total s':>9}", end="")
    print(f"{'2nd blocked s':>15}{'total s':>9}")
    for name, rows in times.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print("{:<24}{:>15.3f}{:>9.3f}{:>15.3f}{:>9.3f}".format(name, *medians))


def ours(
    directory: Path, state: Any, *, preflight: bool = True
) -> Callable[[int], tuple[float, float]]:
    """Save with `Checkpointer`; return (seconds blocked, total seconds)."""
    writer = Checkpointer(directory, CheckpointConfig(max_to_keep=1), **QUIET)
    if preflight:
        writer.preflight(state)

    def save(step: int) -> tuple[float, float]:
        start = time.perf_counter()
        writer.save(step, state, {})
        blocked = time.perf_counter() - start
        assert writer.wait()
        (saved,) = (event for event in writer.pop_events() if event["event"] == "save")
        return blocked, saved["written_s"]  # deletes the previous one later, untimed

    return save


def plain_orbax(directory: Path, state: Any) -> Callable[[int], tuple[float, float]]:
    """Save with Orbax as in its documentation, without checksums or a manifest."""
    import orbax.checkpoint as ocp

    writer = ocp.StandardCheckpointer()

    def save(step: int) -> tuple[float, float]:
        start = time.perf_counter()
        writer.save(directory / str(step), state)
        blocked = time.perf_counter() - start
        writer.wait_until_finished()
        total = time.perf_counter() - start
        shutil.rmtree(directory / str(step))
        return blocked, total

    return save


def ours_locally(directory: Path, state: Any) -> Callable[[int], tuple[float, float]]:
    """Save to `checkpoint.local_dir`; return (seconds blocked, total seconds)."""
    config = CheckpointConfig(local_dir=str(directory / "disk"))
    writer = Checkpointer(directory / "run", config, **QUIET)
    writer.preflight(state)

    def save(step: int) -> tuple[float, float]:
        start = time.perf_counter()
        writer.save(step, state, {}, due="local")
        blocked = time.perf_counter() - start
        while True:
            for event in writer.pop_events():
                if event["event"] == "local_save":
                    return blocked, event["written_s"]
            time.sleep(0.005)

    return save


def torch_contenders(root: Path, gb: float) -> dict[str, Callable[[int], tuple[float, float]]]:
    """Save the same number of bytes with PyTorch, if it is installed."""
    try:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
    except ImportError:
        print("PyTorch is not installed: its rows are left out")
        return {}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    size = int(gb * 1e9 / 4 / 3 / NUM_ARRAYS)
    state = {f"w{i}": torch.randn(size) for i in range(3 * NUM_ARRAYS)}

    def asynchronous(step: int) -> tuple[float, float]:
        start = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=str(root / "dcp" / str(step)))
        blocked = time.perf_counter() - start
        future.result()
        total = time.perf_counter() - start
        shutil.rmtree(root / "dcp" / str(step))
        return blocked, total

    def plain(step: int) -> tuple[float, float]:
        start = time.perf_counter()
        torch.save(state, root / f"{step}.pt")
        total = time.perf_counter() - start
        (root / f"{step}.pt").unlink()
        return total, total

    return {"torch dcp.async_save": asynchronous, "torch.save": plain}


def measure(contenders: dict[str, Callable], repeats: int, gb: float) -> None:
    """Print medians of interleaved saves; the first save of each contender is a warm-up."""
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    for step in range(1, repeats + 2):
        for name, save in contenders.items():
            before = time.process_time()
            times[name].append((*save(step), time.process_time() - before))
    print(f"\n{'save':<28}{'blocked s':>10}{'total s':>10}{'processor s':>13}{'GB/s':>8}")
    for name, measured in times.items():
        medians = [statistics.median(column) for column in zip(*measured[1:], strict=True)]
        blocked, total, processor = medians
        print(f"{name:<28}{blocked:>10.3f}{total:>10.3f}{processor:>13.3f}{gb / total:>8.2f}")
    print(f"load average {os.getloadavg()[0]:.1f}")


def restores(directory: Path, state: Any, mesh: Mesh, repeats: int, gb: float) -> None:
    """Restore on the mesh of the save, on another mesh, and on one device."""
    writer = Checkpointer(directory, CheckpointConfig(), **QUIET)
    writer.save(1, state, {})
    writer.close()
    one = MeshSpec().build(jax.devices()[:1])
    columns, single = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(one, P())
    targets: dict[str, Callable[[jax.Array], Any]] = {
        "same mesh": lambda x: x.sharding,
        "split by columns": lambda x: columns if x.ndim > 1 else x.sharding,
        "one device": lambda x: single,
    }
    times: dict[str, list[float]] = {name: [] for name in targets}
    for _ in range(repeats):
        for name, of in targets.items():
            abstract = lambda x, of=of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of(x))
            reader = Checkpointer(directory, CheckpointConfig(), read_only=True, **QUIET)
            start = time.perf_counter()
            jax.block_until_ready(reader.restore(jax.tree.map(abstract, state))[0])
            times[name].append(time.perf_counter() - start)
    print(f"\n{'verified restore':<24}{'total s':>20}{'GB/s':>8}")
    for name, measured in times.items():
        total = statistics.median(measured)
        print(f"{name:<24}{total:>20.3f}{gb / total:>8.2f}")


def throughput(directory: Path, num_blocks: int, rows: int) -> None:
    """Time blocks of 50 training steps with `save_interval_steps=50` and without, alternating.

    As in training, there is one save halfway and one at the end, each written in the background of
    the next steps. A block ends when its saves are committed, so the complete saves are timed.

    Args:
        directory: directory of the checkpoints.
        num_blocks: blocks of 50 steps of each kind.
        rows: rows of a batch; 0 = as in the default job.
    """
    config = RunConfig()
    train = dataclasses.replace(
        config.train, global_batch_size=rows or config.train.global_batch_size
    )
    mesh = dataclasses.replace(config.mesh, shape=f"fsdp={len(jax.devices())}")
    parts = assemble(dataclasses.replace(config, train=train, mesh=mesh), jax.devices())
    state = parts.init_state()
    batch = {
        name: jax.device_put(jnp.ones(like.shape, like.dtype), like.sharding)
        for name, like in parts.abstract_batch().items()
    }
    settings = CheckpointConfig(save_interval_steps=50, save_interval_minutes=0, max_to_keep=1)
    writer = Checkpointer(directory, settings, **QUIET)
    writer.preflight(state)
    state, _ = jax.block_until_ready(parts.step.train(state, batch, math.inf))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for block in range(2 * num_blocks):
        saving = block % 2 == 1
        start = time.perf_counter()
        for step in range(50 * block + 1, 50 * block + 51):
            state, _ = jax.block_until_ready(parts.step.train(state, batch, math.inf))
            if saving and (due := writer.due(step)):
                writer.save(step, state, {}, due=due)
        assert writer.wait()
        seconds[saving].append(time.perf_counter() - start)
    writer.close()
    with_saves, without = (statistics.median(seconds[saving]) for saving in (True, False))
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    print(
        f"\n50 steps of {without * 20:.0f} ms without saving {without:.2f} s (from "
        f"{min(seconds[False]):.2f} to {max(seconds[False]):.2f}), with two saves of "
        f"{num_bytes / 1e6:.0f} MB {with_saves:.2f} s (from {min(seconds[True]):.2f} to "
        f"{max(seconds[True]):.2f}): {percent(with_saves / without - 1, 2, sign=True)}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=0.5, help="size of the state")
    parser.add_argument(
        "--layers", type=int, default=0, help="of a transformer (0: no transformer)"
    )
    parser.add_argument("--width", type=int, default=1024, help="of the transformer")
    parser.add_argument("--first", nargs="?", const="all", default="", help="all, jaxdist or orbax")
    parser.add_argument("--devices", type=int, default=2, help="simulated CPU devices")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each")
    parser.add_argument("--blocks", type=int, default=3, help="of 50 steps of each kind (0: none)")
    parser.add_argument(
        "--rows", type=int, default=0, help="rows of a batch (0: the default job's)"
    )
    parser.add_argument("--directory", default="", help="where to write; default: a temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
