"""Rows to global device batches: the batch of step s depends on data, seed and s alone.

A process keeps only the rows and positions that its own devices hold, as the sharding itself says,
so it is right for any number of processes and for axes that span them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.axis import axes_of
from jaxdist.core.types import Batch
from jaxdist.data.dataset import Dataset, TrainData
from jaxdist.data.ledger import Ledger, Link, first_mismatch
from jaxdist.data.stream import StreamDataset
from jaxdist.runtime import coordination
from jaxdist.settings import ConfigError

STATE_VERSION = 2
"""Raised when the order of samples or what a state holds changes; an older one is then refused, not
misread."""

_CLOSE_S = 5.0
"""How long to wait for the thread to end; it does not outlive the process."""

_CLOSE_WORKER_S = 30.0
"""How much longer to wait for each worker: grain kills one that has not ended after 25 s."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where training stands in its data.

    Attributes:
        sample: first sample of the next batch. Step s begins at sample s · global_batch_size
            where all steps had that batch size and nothing was left out.
        left_out: samples [first, end) that no batch may hold.
        iterators: states of a stream's readers, by shard; None = at its start, and for rows by
            random access.
        ledger: the newest links of the data ledger, oldest first.
    """

    sample: int = 0
    left_out: tuple[tuple[int, int], ...] = ()
    iterators: tuple[dict[str, Any], ...] | None = None
    ledger: tuple[Link, ...] = (Link(),)


class Loader:
    """Iterator of training batches, prepared ahead; it never ends.

    Attributes:
        wait_s: seconds the last `next()` waited for its batch.
        first_sample: first sample of the batch handed out last.
        left_out: samples [first, end) that no batch holds; a batch that would begin among them,
            or reach into them, begins behind them.
        ledger: the data ledger up to the batch handed out last.
    """

    def __init__(
        self,
        dataset: TrainData,
        *,
        global_batch_size: int,
        seed: int,
        sharding: NamedSharding,
        start: Position = Position(),
        prefetch: int = 2,
        num_workers: int = 0,
    ):
        """Start loading; every process of the job must.

        `sharding` is that of a batch's rows and, where devices share rows, of their positions.
        `start` is where to begin, as `resume_position` returns it. `seed` sets the order of rows by
        number; a stream has its own.

        Raises:
            ConfigError: the batch does not divide over the sharding, processes see other data, or
                a stream cannot be read this way (see `StreamDataset.batches`).
        """
        # grain takes 0.2 s to import: commands that read no data do without.
        from jaxdist.data.batches import TrainBatches, device_placer, part_held
        from jaxdist.data.prefetch import read_ahead

        _check_batch(global_batch_size, sharding)
        check_same_everywhere(dataset)
        self.wait_s, self.first_sample = 0.0, start.sample
        self.left_out = tuple((int(first), int(end)) for first, end in start.left_out)
        self._dataset, self._seed, self._batch_size = dataset, seed, global_batch_size
        self._fingerprint = dataset.fingerprint
        self._order = None if isinstance(dataset, StreamDataset) else dataset.order(seed)
        self.ledger = Ledger(start.ledger, self._fingerprint, self._order)
        self._next_sample, self._num_workers = start.sample, num_workers
        self._failure: Exception | None = None
        held = part_held(sharding, global_batch_size, dataset.fields)
        self._shard = (0, 1)
        state = None
        if isinstance(dataset, StreamDataset):
            self._shard = dataset.shard(sharding, global_batch_size)
            state = _own_state(start.iterators, self._shard)
            batches: Any = dataset.batches(
                global_batch_size, held, self._shard,
                start=start.sample, left_out=self.left_out, num_workers=num_workers,
            )  # fmt: skip
        else:
            batches = TrainBatches(
                dataset, seed, global_batch_size, held,
                start=start.sample, left_out=self.left_out,
            )  # fmt: skip
        self._batches: Any = read_ahead(
            batches,
            device_placer(dataset.fields, global_batch_size, held, sharding),
            prefetch=prefetch,
            num_workers=num_workers,
            state=state,
        )
        self._iterator_state = self._batches.get_state()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """The next batch: name -> [global_batch_size, ...], placed by the sharding.

        Raises:
            Exception: whatever failed while it was prepared, now and at every later call.
        """
        if self._failure is not None:
            raise self._failure
        asked = time.perf_counter()
        try:
            self.first_sample, batch = next(self._batches)
        except Exception as error:
            self._failure = error
            raise
        self.wait_s = time.perf_counter() - asked
        self._iterator_state = self._batches.get_state()
        self._next_sample = self.first_sample + self._batch_size
        self.ledger.append(self.first_sample, self._batch_size)
        return batch

    def state(self) -> dict[str, Any]:
        """Where the run is, as JSON: batches handed out count, those only prepared do not.

        Of a stream, every process of the job must ask.
        """
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "next_sample": self._next_sample,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
            "dataset": self._dataset.identity,
        }
        if self.left_out:
            state["left_out"] = [list(part) for part in self.left_out]
        if isinstance(self._dataset, StreamDataset):
            state["iterators"] = _every_state(self._iterator_state, self._shard)
        else:
            state["ledger"] = [list(link) for link in self.ledger.links]
        return state

    def rows(self, first_sample: int) -> list[int]:
        """Rows of the dataset in the batch that begins with this sample.

        A stream numbers its rows as they come, so that they are the samples themselves.
        """
        samples = np.arange(first_sample, first_sample + self._batch_size, dtype=np.int64)
        return (samples if self._order is None else self._order.rows(samples)).tolist()

    def close(self) -> None:
        """Stop the thread and the workers, free what they prepared; safe to call again."""
        if self._batches is None:
            return
        # Closing waits for the read in progress, which a file system that is gone never ends.
        closing = threading.Thread(target=self._batches.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S + _CLOSE_WORKER_S * self._num_workers)
        self._batches = None
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

    With `max_batches`, at most so many, of rows spread evenly over the dataset; `sharding` is as
    for `Loader`.

    Yields:
        name -> [global_batch_size, ...], placed by the sharding.

    Raises:
        ConfigError: the batch does not divide over the sharding, or processes see other data.
    """
    _check_batch(global_batch_size, sharding)
    check_same_everywhere(dataset)
    return _eval_batches(dataset, global_batch_size, sharding, max_batches)


def _eval_batches(
    dataset: Dataset, batch_size: int, sharding: NamedSharding, max_batches: int | None
) -> Iterator[Batch]:
    """Batches [batch_size, ...] over every row once, or `max_batches`, read ahead and closed."""
    from jaxdist.data.batches import EvalBatches, device_placer, part_held
    from jaxdist.data.prefetch import read_ahead

    held = part_held(sharding, batch_size, dataset.fields)
    batches = read_ahead(
        EvalBatches(dataset, batch_size, held, max_batches),
        device_placer(dataset.fields, batch_size, held, sharding),
        prefetch=1,
    )
    with contextlib.closing(batches):
        for _, batch in batches:
            yield batch


def resume_position(
    state: dict[str, Any],
    dataset: TrainData,
    *,
    seed: int,
    restarts: bool = False,
) -> Position:
    """Where a run goes on, from the `Loader.state()` of its checkpoint.

    With `restarts`, changed data begin at their first sample.

    Raises:
        ConfigError: the state is of another version, the data changed (says what), or the rows of
            its last steps are not those that the data ledger holds.
    """
    if state.get("version") != STATE_VERSION:
        raise ConfigError(
            f"the checkpoint's data position has version {state.get('version')!r}, this code "
            f"reads {STATE_VERSION}. Resume with the version of jaxdist that saved it."
        )
    changes = [] if state["seed"] == seed else [f"seed was {state['seed']} and is {seed}"]
    same_data = state["fingerprint"] == dataset.fingerprint
    if not same_data:
        changes += _changes(state["dataset"], dataset.identity)
    # Which samples were left out still holds for another order of the same data.
    parts = state.get("left_out", []) if same_data else []
    left_out = tuple((int(first), int(end)) for first, end in parts)
    ledger = tuple(Link(*link) for link in state.get("ledger", [Link()]))
    if not changes:
        if isinstance(dataset, Dataset):
            _check_ledger(ledger, dataset, seed)
        iterators = state.get("iterators")
        return Position(
            int(state["next_sample"]),
            left_out,
            None if iterators is None else tuple(iterators),
            ledger,
        )
    if restarts:
        return Position(0, left_out, ledger=ledger[-1:])
    raise ConfigError(
        f"the data changed since the checkpoint ({'; '.join(changes)}): sample "
        f"{state['next_sample']} would be another one, and rows would repeat or be left out. "
        "Restore the data and settings, or set override=data to begin the new data at its start."
    )


def _check_ledger(ledger: tuple[Link, ...], dataset: Dataset, seed: int) -> None:
    """Refuse to go on where the last steps would have other rows now than they had."""
    place = first_mismatch(ledger, dataset.fingerprint, dataset.order(seed).rows)
    if place is not None:
        raise ConfigError(
            f"data ledger: the batch at sample {ledger[place].first_sample}, {len(ledger) - place} "
            "steps before the end of the checkpoint, had other rows than the same data and seed "
            "give now: rows would repeat or be left out. Resume with the version of jaxdist that "
            "saved it, or set override=data and another seed to begin the data anew."
        )


def check_same_everywhere(dataset: TrainData) -> None:
    """Make sure that all processes of the job opened the same data; all must call it.

    Raises:
        ConfigError: naming the processes whose data differ from the first one's.
    """
    fingerprints = coordination.gather("dataset", dataset.fingerprint)
    other = [i for i, theirs in enumerate(fingerprints) if theirs != fingerprints[0]]
    if other:
        raise ConfigError(
            f"processes {other} opened other data than process 0: batches would mix them. Give "
            "every host the same files (for stdlib: the same Python), or a shared path."
        )


def _own_state(
    iterators: tuple[dict[str, Any], ...] | None, shard: tuple[int, int]
) -> dict[str, Any] | None:
    """The state of this process's reader among those of a checkpoint."""
    index, count = shard
    if iterators is None:
        return None
    if len(iterators) != count:
        raise ConfigError(
            f"the checkpoint holds the positions of {len(iterators)} readers of the stream, "
            f"this run has {count}: what each has read cannot be divided again. Resume with "
            "the processes and mesh of the checkpoint, or set override=data and another seed; a "
            "function without shard_index resumes on any number."
        )
    return iterators[index]


def _every_state(state: dict[str, Any], shard: tuple[int, int]) -> list[dict[str, Any]]:
    """The states of all readers by shard; where there are several, every process must call it."""
    index, count = shard
    if count == 1:
        return [state]
    found = dict(coordination.gather("stream", [index, state]))
    return [found[number] for number in range(count)]


def _check_batch(global_batch_size: int, sharding: NamedSharding) -> None:
    names = axes_of(PartitionSpec(*sharding.spec[:1]))
    parts = math.prod(sharding.mesh.shape[axis] for axis in names)
    if global_batch_size < 1 or global_batch_size % parts:
        raise ConfigError(
            f"global_batch_size={global_batch_size} does not divide over {parts} parts (mesh axes "
            f"{', '.join(names)}). Use a multiple of {parts}."
        )


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = sorted(then.keys() | now.keys())
    different = [name for name in names if then.get(name) != now.get(name)]
    words = {"parts": "the content, split or order of the sources is another"}
    return [
        words.get(name, f"{name} was {then.get(name)!r} and is {now.get(name)!r}")
        for name in different
    ] or ["its fingerprint is another"]
