"""Map batch numbers to this process's rows as grain datasets, and prefetch the batches.

One element is a complete local batch, so grain's Python overhead is paid once per batch
(`scripts/bench/results/data.md`). A thread of the training process moves batches to devices and, if
there are no worker processes, also reads rows and runs transforms.

Shapes: `batch` counts the global rows and `local` the rows of this process. If devices share rows,
`local_seq` counts its positions of a row, in the order of `core.parallel.context.device_order`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.parallel.context import device_order, num_position_shards
from jaxdist.core.types import Batch
from jaxdist.data.packing import Fields, Rows, Spans, cut, divide_rows
from jaxdist.settings import ConfigError

Dataset: TypeAlias = Any

Numbered = tuple[int, Rows]
"""First sample (or index, in evaluation) of a batch, and field name -> [local, local_seq, ...]."""

Samples = Sequence[tuple[int, int]]
"""Ranges [first, end) of sample numbers."""

T = TypeVar("T")
U = TypeVar("U")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that workers and prefetching threads block: schedulers send them to all processes."""


class Held(NamedTuple):
    """Part of every batch that is stored on a set of devices.

    Attributes:
        rows: int64 [local], ascending: indices of rows in a batch.
        seq_indices: int64 [local_seq], ascending: indices into `device_order`; None = all.
        spans: the positions of `seq_indices` in a row, as ranges; None = all.
    """

    rows: np.ndarray
    seq_indices: np.ndarray | None = None
    spans: Spans | None = None


class TrainBatches(grain.MapDataset[Numbered]):
    """Map a batch number to its first sample and its rows, in the order of training."""

    def __init__(
        self, dataset: Dataset, seed: int, batch_size: int, held: Held, *,
        start: int, left_out: Samples, pieces: int = 1, num_batches: int = sys.maxsize,
    ):  # fmt: skip
        """Start batch 0 at sample `start` and skip samples `left_out`; read nothing yet.

        A batch has `batch_size` samples, each cut into `pieces` rows; `held` selects from these.
        """
        super().__init__()
        # Drop the tokenizer from the copy sent to workers: reading rows does not use it.
        self._dataset = dataclasses.replace(dataset, tokenizer=None)
        self._order = dataset.order(seed, ahead=True)
        self._batch_size, self._held = batch_size, held
        self._start, self._left_out = start, left_out
        self._pieces, self._num_batches = pieces, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # the batches of one worker process
            return self.slice(index)
        first = first_sample(index, self._batch_size, self._start, self._left_out)
        held, pieces = self._held, self._pieces
        if pieces == 1:
            return first, self._dataset.rows(self._order.rows(first + held.rows), held.spans)
        samples = np.unique(held.rows // pieces)
        rows = divide_rows(self._dataset.rows(self._order.rows(first + samples)), pieces)
        own = np.searchsorted(samples, held.rows // pieces) * pieces + held.rows % pieces
        return first, cut({name: x[own] for name, x in rows.items()}, held.spans)


class EvalBatches(grain.MapDataset[Numbered]):
    """Map a batch number to its first index and its rows, as stored; padding has weight 0."""

    def __init__(self, dataset: Dataset, batch_size: int, held: Held, max_batches: int | None):
        """Select every row once, or at most `max_batches` batches spread evenly over the data."""
        super().__init__()
        self._dataset = dataset
        self._batch_size, self._held = batch_size, held
        limit = dataset.num_rows if max_batches is None else max_batches * batch_size
        self._count = min(dataset.num_rows, limit)

    def __len__(self) -> int:
        return -(-self._count // self._batch_size)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        numbers = index * self._batch_size + self._held.rows
        # Pad with a real row: rows of zeros could make a model divide by zero.
        size = self._dataset.rows_per_example
        examples = np.minimum(numbers // size, self._count // size - 1)
        examples = examples * (self._dataset.num_rows // size) // (self._count // size)
        chosen = examples * size + numbers % size
        rows = self._dataset.rows(chosen, self._held.spans)
        rows["weights"][numbers >= self._count] = 0
        return index * self._batch_size, rows


class StreamBatches(grain.IterDataset[Numbered]):
    """Iterable over first sample and rows of each batch of a stream, in the stream's order."""

    def __init__(
        self, rows: grain.IterDataset[Any], stack: Callable[[list[Any]], Rows], *,
        batch_size: int, num_read: int, held: Held, start: int, left_out: Samples,
    ):  # fmt: skip
        """Store the arguments; reading begins with the iterator.

        `rows` yields single rows; `stack` turns them into field name -> [rows, ...]. Each batch
        reads `num_read` rows of this process's shard and keeps those in `held`. The first batch
        begins at sample `start`. Samples `left_out` are read and dropped.
        """
        super().__init__(rows)
        self.stack, self.batch_size = stack, batch_size
        self.num_read, self.held = num_read, held
        self.start, self.left_out = start, left_out

    def __iter__(self) -> grain.DatasetIterator[Numbered]:
        return _StreamIterator(iter(self._parent), self)


class _StreamIterator(grain.DatasetIterator[Numbered]):
    def __init__(self, rows: grain.DatasetIterator[Any], plan: StreamBatches):
        super().__init__(rows)
        self._plan, self._sample = plan, plan.start

    def __next__(self) -> Numbered:
        plan = self._plan
        first = first_sample(0, plan.batch_size, self._sample, plan.left_out)
        # A shard drops its share of these samples, rounded up equally in all shards.
        dropped = -(-(first - self._sample) * plan.num_read // plan.batch_size)
        try:
            read = [next(self._parent) for _ in range(dropped + plan.num_read)][dropped:]
        except StopIteration:
            raise ConfigError(
                f"the stream of data.sources ended in the batch of sample {first}: training "
                "needs more rows. Repeat it, e.g. with `.repeat()` before "
                "`.to_iter_dataset()`, or lower train.steps."
            ) from None
        self._sample = first + plan.batch_size
        return first, cut(plan.stack([read[row] for row in plan.held.rows]), plan.held.spans)

    def get_state(self) -> dict[str, Any]:
        return {"sample": self._sample, "rows": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._sample = state["sample"]
        self._parent.set_state(state["rows"])


def first_sample(number: int, batch_size: int, start: int, left_out: Samples) -> int:
    """Return the first sample of batch `number`; batches begin at `start` and omit `left_out`."""
    for begin, end in sorted(left_out):
        fitting = max(0, (begin - start) // batch_size)  # batches that end before `begin`
        if number < fitting:
            break
        number -= fitting
        start = max(start + fitting * batch_size, end)
    return start + number * batch_size


def part_held(
    sharding: NamedSharding,
    batch_size: int,
    fields: Fields,
    devices: Sequence[jax.Device] | None = None,
) -> Held:
    """Return which rows and positions of a batch `devices` store (default: this process's)."""
    mine = list(sharding.addressable_devices if devices is None else devices)
    shards = num_position_shards(sharding)
    if shards == 1:
        return Held(_held_of(0, (batch_size,), sharding, mine))
    seq_len = fields["tokens"][0][0]
    other = {name: shape for name, (shape, _) in fields.items() if shape and shape[0] != seq_len}
    if other:
        raise ConfigError(
            f"data fields {other} of rows of {seq_len} tokens: {shards} devices share each row "
            "(the mesh's cp), and split the first dim of every field. Give these "
            f"fields {seq_len} as first dim, or use cp=1."
        )
    shape = (batch_size, seq_len)
    seq_indices = _held_of(1, shape, sharding, mine)
    rows = _held_of(0, shape, sharding, mine)
    return Held(rows, seq_indices, _spans(device_order(seq_len, shards)[seq_indices]))


def _spans(positions: np.ndarray) -> Spans:
    """Return the ranges [start, stop) of consecutive numbers in `positions`, int64 [n]."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


def _held_of(
    dim: int, shape: tuple[int, ...], sharding: NamedSharding, devices: Sequence[jax.Device]
) -> np.ndarray:
    """Return the indices along one dim that are stored on the devices: int64 [held], sorted."""
    held = sharding.devices_indices_map(shape)
    parts = {held[device][dim].indices(shape[dim])[:2] for device in devices}
    return np.unique(np.concatenate([np.arange(*part, dtype=np.int64) for part in parts]))


def device_placer(
    fields: Fields, batch_size: int, held: Held, sharding: NamedSharding
) -> Callable[[Numbered], tuple[int, Batch]]:
    """Return a function that makes a global batch from the part that this process has read.

    It maps (first sample, name -> numpy [local, local_seq, ...]) to (first sample, name -> jax
    [batch, seq, ...]), with this `sharding` of rows and positions.
    """
    shardings = {
        name: NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: 1 + len(shape)]))
        for name, (shape, _) in fields.items()
    }
    seq_len = fields["tokens"][0][0] if held.seq_indices is not None else 0

    def part(values: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        here = [_among(held.rows, index[0], batch_size), *index[1:]]
        if held.seq_indices is not None and len(index) > 1:
            here[1] = _among(held.seq_indices, index[1], seq_len)
        return np.asarray(values)[tuple(here)]

    def to_devices(numbered: Numbered) -> tuple[int, Batch]:
        first, rows = numbered
        # Allow this transfer even if the run forbids implicit transfers.
        # `make_array_from_process_local_data` would reject meshes on which two processes share
        # some of their rows but not all.
        with jax.transfer_guard_host_to_device("allow"):
            return first, {
                name: jax.make_array_from_callback(
                    (batch_size, *fields[name][0]),
                    shardings[name],
                    functools.partial(part, values),
                )
                for name, values in rows.items()
            }

    return to_devices


def _among(held: np.ndarray, part: slice, size: int) -> slice:
    """Convert a slice of a dim of `size` to a slice of the sorted indices `held`, int64 [n]."""
    start, stop, _ = part.indices(size)
    first = int(np.searchsorted(held, start))
    return slice(first, first + stop - start)


def read_ahead(
    batches: grain.MapDataset[T] | grain.IterDataset[T],
    to_devices: Callable[[T], U],
    *,
    prefetch: int,
    num_workers: int = 0,
    state: dict | None = None,
) -> grain.DatasetIterator[U]:
    """Return an iterator over `to_devices(batch)` of each batch, in order, with prefetching.

    A thread prepares up to `prefetch` batches in advance, with `num_workers` processes for a
    `MapDataset` (0 = none). An `IterDataset` continues from `state`, a result of `get_state()`.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads its absl flags; this package parses its own
    if isinstance(batches, grain.MapDataset):
        # Only the prefetching thread reads: more threads would share the GIL.
        batches = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if num_workers:
            options = grain.MultiprocessingOptions(num_workers=num_workers)
            batches = batches.mp_prefetch(options, _start_worker).map(_copied)
    ahead = grain.experimental.ThreadPrefetchIterDataset(
        batches.map(to_devices), prefetch_buffer_size=prefetch
    )
    with _signals_blocked():  # inherited by threads and processes
        iterator = iter(ahead)
        if state is not None:
            iterator.set_state(state)
        iterator.start_prefetch()
    return iterator


def _copied(batch: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    # Start the shared-memory tracker before blocking signals, because its start unblocks them.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(index: int, count: int) -> None:
    # Transforms that call jax use the CPU: the devices belong to the training process.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, name="jaxdist-parent", daemon=True).start()


def _end_with_parent() -> None:
    # Runs only if the parent was killed: a parent that exits stops its workers first.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
