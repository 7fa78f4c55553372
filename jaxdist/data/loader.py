"""Rows to global device batches: the batch of step s depends on data, seed and s alone.

A process reads only the rows that its own devices hold, asked for by the sharding itself, so it
is right for any number of processes and for axes that span them.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.types import Batch, ConfigError
from jaxdist.data.dataset import Dataset
from jaxdist.runtime import coordination

STATE_VERSION = 1
"""Raised when the order of samples changes; an older state is then refused, not misread."""

_LOOK_S = 5.0
"""How often a waiting step checks that the thread is alive; a batch that comes wakes it at once."""


class Loader:
    """Iterator of training batches, prepared ahead by one thread; it never ends.

    Attributes:
        wait_s: seconds the last `next()` waited for its batch.
        first_sample: first sample of the batch handed out last.
        left_out: samples [first, end) that no batch may have; a batch that would begin among them,
            or reach into them, begins behind them.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        seed: int,
        sharding: NamedSharding,
        start_step: int = 0,
        start_sample: int | None = None,
        left_out: Sequence[tuple[int, int]] = (),
        prefetch: int = 2,
    ):
        """Start loading.

        Args:
            dataset: what to train on.
            global_batch_size: rows of a batch over all processes.
            seed: of the order.
            sharding: of a batch's first dim; further dims as far as a field has them.
            start_step: first step, when all steps before had this batch size.
            start_sample: first sample instead, as `resume_sample` returns it.
            left_out: samples [first, end) that training leaves out, as `left_out_of` returns them.
            prefetch: batches kept ready, at least 1.

        Raises:
            ConfigError: the batch does not divide over the sharding, or processes see other data.
        """
        _check_batch(global_batch_size, sharding)
        check_same_everywhere(dataset)
        self.wait_s = 0.0
        self._dataset, self._seed = dataset, seed
        self._batch_size = global_batch_size
        self._next_sample = start_step * global_batch_size if start_sample is None else start_sample
        self.first_sample = self._next_sample
        self.left_out = tuple((int(first), int(end)) for first, end in left_out)
        self._order = order = dataset.order(seed)

        def make(first: int) -> Batch:
            samples = np.arange(first, first + global_batch_size, dtype=np.int64)
            # Each device's rows are looked up alone: no process pays for the whole batch.
            return make_batch(
                dataset, lambda place: dataset.rows(order.rows(samples[place])),
                global_batch_size, sharding,
            )  # fmt: skip

        place = functools.partial(_past, self.left_out, global_batch_size)
        self._ready: queue.Queue[tuple[int, Batch] | Exception] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._failure: Exception | None = None
        # The thread knows the queue but not the loader: a forgotten loader is collected.
        self._thread = threading.Thread(
            target=_prepare,
            args=(make, place, self._next_sample, global_batch_size, self._ready, self._stop),
            name="jaxdist-data",
            daemon=True,
        )
        self._closer = weakref.finalize(self, _stop, self._thread, self._ready, self._stop)
        self._thread.start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            Exception: whatever failed in the thread, now and at every later call.
        """
        asked = time.perf_counter()
        while self._failure is None:
            try:
                item = self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    self._failure = RuntimeError("the data thread ended without a word")
                continue
            self.wait_s = time.perf_counter() - asked
            if not isinstance(item, Exception):
                self.first_sample, batch = item
                self._next_sample = self.first_sample + self._batch_size
                return batch
            self._failure = item
        raise self._failure

    def state(self) -> dict[str, Any]:
        """Where the run is, as JSON: batches handed out count, those only prepared do not."""
        left_out = {"left_out": [list(part) for part in self.left_out]} if self.left_out else {}
        return {
            "version": STATE_VERSION,
            "next_sample": self._next_sample,
            "seed": self._seed,
            "fingerprint": self._dataset.fingerprint,
            "dataset": self._dataset.identity,
            **left_out,
        }

    def rows(self, first_sample: int) -> list[int]:
        """Rows of the dataset in the batch that begins with this sample."""
        samples = np.arange(first_sample, first_sample + self._batch_size, dtype=np.int64)
        return [int(row) for row in self._order.rows(samples)]

    def close(self) -> None:
        """Stop the thread and free what it prepared; safe to call again."""
        self._closer()
        if self._failure is None:
            self._failure = RuntimeError("the loader is closed")


def eval_batches(
    dataset: Dataset,
    *,
    global_batch_size: int,
    sharding: NamedSharding,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Each row once, in storage order; what the last batch lacks has weights 0.

    Args:
        dataset: what to evaluate on.
        global_batch_size: rows of a batch over all processes.
        sharding: of a batch's first dim.
        max_batches: at most so many batches, of rows spread evenly over the dataset.

    Raises:
        ConfigError: the batch does not divide over the sharding, or processes see other data.
    """
    _check_batch(global_batch_size, sharding)
    check_same_everywhere(dataset)
    return _eval_batches(dataset, global_batch_size, sharding, max_batches)


def resume_sample(
    state: dict[str, Any],
    dataset: Dataset,
    *,
    seed: int,
    on_change: Literal["refuse", "restart"] = "refuse",
) -> int:
    """The sample at which a run goes on, from the `Loader.state()` of its checkpoint.

    Args:
        state: as saved.
        dataset: as opened now.
        seed: as configured now.
        on_change: what to do when data or seed are not those of the state (see `DataConfig`).

    Raises:
        ConfigError: the state is of another version, or the data changed: says what.
    """
    if state.get("version") != STATE_VERSION:
        raise ConfigError(
            [
                f"the checkpoint's data position has version {state.get('version')!r}, this code "
                f"reads {STATE_VERSION}. Resume with the version of jaxdist that saved it."
            ]
        )
    changes = [] if state["seed"] == seed else [f"seed was {state['seed']} and is {seed}"]
    if state["fingerprint"] != dataset.fingerprint:
        changes += _changes(state["dataset"], dataset.identity)
    if not changes:
        return int(state["next_sample"])
    if on_change == "restart":
        return 0
    raise ConfigError(
        [
            f"the data changed since the checkpoint ({'; '.join(changes)}): sample "
            f"{state['next_sample']} would be another one, and rows would repeat or be left out. "
            "Restore the data and settings, or set data.on_change=restart to begin the new data at "
            "its start."
        ]
    )


def left_out_of(state: dict[str, Any], dataset: Dataset) -> tuple[tuple[int, int], ...]:
    """Samples that a run left out, from its `Loader.state()`; other data has none of them."""
    if state["fingerprint"] != dataset.fingerprint:
        return ()
    return tuple((int(first), int(end)) for first, end in state.get("left_out", ()))


def check_same_everywhere(dataset: Dataset) -> None:
    """Make sure that all processes of the job opened the same data; all must call it.

    Raises:
        ConfigError: naming the processes whose data differ from the first one's.
    """
    fingerprints = coordination.gather("dataset", dataset.fingerprint)
    other = [i for i, theirs in enumerate(fingerprints) if theirs != fingerprints[0]]
    if other:
        raise ConfigError(
            [
                f"processes {other} opened other data than process 0: batches would mix them. Give "
                "every host the same files (for stdlib: the same Python), or a shared path."
            ]
        )


def make_batch(
    dataset: Dataset,
    rows: Callable[[slice], dict[str, np.ndarray]],
    global_batch_size: int,
    sharding: NamedSharding,
) -> Batch:
    """A global batch, of which this process makes the rows its devices hold.

    Args:
        dataset: names the fields.
        rows: slice of the batch -> its rows.
        global_batch_size: rows of the batch.
        sharding: of the first dim; further dims as far as a field has them.
    """
    read: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def local(name: str, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(global_batch_size)
        if (start, stop) not in read:  # several devices hold the same rows
            read[start, stop] = rows(slice(start, stop))
        return read[start, stop][name][(slice(None), *index[1:])]

    # The one place where batches are meant to move to devices, whatever the run forbids elsewhere.
    with jax.transfer_guard_host_to_device("allow"):
        return {
            name: jax.make_array_from_callback(
                (global_batch_size, *shape),
                NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: 1 + len(shape)])),
                functools.partial(local, name),
            )
            for name, (shape, _) in dataset.fields.items()
        }


def _past(left_out: Sequence[tuple[int, int]], batch_size: int, first: int) -> int:
    """Where a batch begins that would begin at `first`."""
    for start, end in sorted(left_out):
        if first < end and start < first + batch_size:
            first = end
    return first


def _prepare(
    make: Callable[[int], Batch],
    place: Callable[[int], int],
    first: int,
    batch_size: int,
    ready: queue.Queue[tuple[int, Batch] | Exception],
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        first = place(first)
        try:
            item: tuple[int, Batch] | Exception = (first, make(first))
        except Exception as error:
            item = error
        ready.put(item)
        if isinstance(item, Exception):
            return
        first += batch_size


def _stop(
    thread: threading.Thread,
    ready: queue.Queue[tuple[int, Batch] | Exception],
    stop: threading.Event,
) -> None:
    stop.set()
    # A thread waiting for room finds it, puts one more and sees the flag.
    while True:
        try:
            ready.get_nowait()
        except queue.Empty:
            break
    thread.join(timeout=_LOOK_S)


def _eval_batches(
    dataset: Dataset, batch_size: int, sharding: NamedSharding, max_batches: int | None
) -> Iterator[Batch]:
    count = dataset.num_rows
    if max_batches is not None:
        count = min(count, max_batches * batch_size)
    chosen = np.arange(count, dtype=np.int64) * dataset.num_rows // max(1, count)
    for first in range(0, count, batch_size):
        # Padding repeats a real row: rows of zeros could make a model divide by nothing.
        places = np.arange(first, first + batch_size)
        real = places < count
        indices = chosen[np.minimum(places, count - 1)]

        def rows(
            place: slice, indices: np.ndarray = indices, real: np.ndarray = real
        ) -> dict[str, np.ndarray]:
            out = dataset.rows(indices[place])
            out["weights"][~real[place]] = 0
            return out

        yield make_batch(dataset, rows, batch_size, sharding)


def _check_batch(global_batch_size: int, sharding: NamedSharding) -> None:
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    parts = int(np.prod([sharding.mesh.shape[name] for name in names], dtype=np.int64))
    if global_batch_size < 1 or global_batch_size % parts:
        raise ConfigError(
            [
                f"global_batch_size={global_batch_size} does not divide over {parts} parts (mesh "
                f"axes {', '.join(names)}). Use a multiple of {parts}."
            ]
        )


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = sorted(then.keys() | now.keys())
    different = [name for name in names if then.get(name) != now.get(name)]
    words = {"parts": "the content, split or order of the sources is another"}
    return [
        words.get(name, f"{name} was {then.get(name)!r} and is {now.get(name)!r}")
        for name in different
    ] or ["its fingerprint is another"]
