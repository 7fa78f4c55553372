"""Load this process's rows into global device batches, a function of data, seed and step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.axis import axes_of
from jaxdist.core.step.shapes import BatchStage, stage_at
from jaxdist.core.types import Batch
from jaxdist.data.dataset import Dataset, TrainData
from jaxdist.data.order import Ledger, Link, first_mismatch
from jaxdist.data.stream import StreamDataset
from jaxdist.runtime import coordination
from jaxdist.runtime.formatting.tables import few
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

STATE_VERSION = 2
"""Version of sample order and state content; states of other versions are rejected."""

_CLOSE_S = 5.0
"""Time-out of closing the prefetching thread; after it, the thread ends with the process."""

_CLOSE_WORKER_S = 30.0
"""Additional time-out per worker: grain kills one after 25 s."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Position of training in its data.

    Attributes:
        sample: first sample of the next batch.
        step: number of steps before it, which selects the stage of a run with stages.
        left_out: samples [first, end) to skip.
        iterators: states of a stream's readers, by shard; None = at its start, or random access.
        ledger: the newest links of the data ledger, oldest first.
    """

    sample: int = 0
    left_out: tuple[tuple[int, int], ...] = ()
    iterators: tuple[dict[str, Any], ...] | None = None
    ledger: tuple[Link, ...] = (Link(),)
    step: int = 0


class Loader:
    """Iterator of prefetched training batches; raises `ConfigError` if a user's stream ends.

    Attributes:
        wait_s: seconds that the last `next()` waited.
        first_sample: first sample of the most recent batch.
        left_out: samples [first, end) to skip; a batch that would overlap a range begins after it.
        ledger: the data ledger up to the most recent batch.
    """

    def __init__(
        self,
        dataset: TrainData,
        *,
        global_batch_size: int,
        seed: int,
        sharding: NamedSharding,
        start: Position = Position(),
        stages: Sequence[BatchStage] = (),
        prefetch: int = 2,
        num_workers: int = 0,
        add_fields: Callable[[Batch], Batch] = lambda batch: batch,
    ):
        """Start loading; every process of the job must call it.

        `sharding` is the sharding of rows and, if devices share rows, of positions. `seed` sets the
        order of rows; a user's stream has its own. `add_fields` maps each batch [rows, ...] to one
        with more fields. `stages`, those of the train settings, set the rows of a batch.
        """
        _check_batch(global_batch_size, sharding)
        check_same_everywhere(dataset)
        self.wait_s, self.first_sample = 0.0, start.sample
        self.left_out = tuple((int(first), int(end)) for first, end in start.left_out)
        self._dataset, self._seed, self._prefetch = dataset, seed, prefetch
        self._sharding, self._num_workers, self._add_fields = sharding, num_workers, add_fields
        self._stages = stages or [BatchStage(0, 0, global_batch_size, 1)]
        self._order = None if isinstance(dataset, StreamDataset) else dataset.order(seed)
        fingerprint_at = getattr(dataset, "fingerprint_at", lambda sample: "")
        self.ledger = Ledger(start.ledger, fingerprint_at, self._order)
        self._step, self._next_sample = start.step, start.sample
        self._failure: Exception | None = None
        self._shard = (0, 1)
        self._iterator_state: Any = None
        if isinstance(dataset, StreamDataset):
            self._shard = dataset.shard(sharding, global_batch_size)
            self._iterator_state = _own_state(start.iterators, self._shard)
        self._open_stage()

    def _open_stage(self) -> None:
        """Start reading the batches of the current stage ahead."""
        # Importing grain takes 0.2 s, which commands without data avoid.
        from jaxdist.data.batches import TrainBatches, device_placer, part_held, read_ahead

        stage, dataset = stage_at(self._stages, self._step), self._dataset
        later = (one.first_step for one in self._stages if one.first_step > self._step)
        self._last_step = min(later, default=sys.maxsize)
        self._size, self._pieces = stage.batch_size, self._stages[-1].seq_len // stage.seq_len
        fields = dataset.fields
        if self._pieces > 1:
            fields = {name: ((stage.seq_len,), dtype) for name, (_, dtype) in fields.items()}
        rows = self._size * self._pieces
        held = part_held(self._sharding, rows, fields)
        if isinstance(dataset, StreamDataset):
            state = self._iterator_state
            batches: Any = dataset.batches(
                rows, held, self._shard,
                start=self._next_sample, left_out=self.left_out, num_workers=self._num_workers,
            )  # fmt: skip
        else:
            state = None
            batches = TrainBatches(
                dataset, self._seed, self._size, held,
                start=self._next_sample, left_out=self.left_out,
                pieces=self._pieces, num_batches=self._last_step - self._step,
            )  # fmt: skip
        self._batches: Any = read_ahead(
            batches,
            device_placer(fields, rows, held, self._sharding),
            prefetch=self._prefetch,
            num_workers=self._num_workers,
            state=state,
        )
        self._iterator_state = self._batches.get_state()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, name -> [rows, ...]; raise errors of preparing it."""
        if self._failure is not None:
            raise self._failure
        start = time.perf_counter()
        try:
            if self._step == self._last_step:
                self._close_batches()
                self._open_stage()
            self.first_sample, batch = next(self._batches)
        except Exception as error:
            self._failure = error
            raise
        self.wait_s = time.perf_counter() - start
        self._iterator_state = self._batches.get_state()
        self._step += 1
        self._next_sample = self.first_sample + self._size
        self.ledger.append(self.first_sample, self._size, self._pieces)
        return self._add_fields(batch)

    def state(self, *, everywhere: bool = True) -> dict[str, Any]:
        """Return the position as JSON, without prefetched batches; collective for a divided stream.

        Process 0 has the states of all its readers, the others only if `everywhere`.
        """
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "next_sample": self._next_sample,
            "seed": self._seed,
            "fingerprint": self._dataset.fingerprint,
            "dataset": self._dataset.identity,
        }
        if self.left_out:
            state["left_out"] = [list(part) for part in self.left_out]
        if isinstance(self._dataset, StreamDataset):
            state["iterators"] = _every_state(
                self._iterator_state, self._shard, everywhere=everywhere
            )
        else:
            state["ledger"] = [list(link) for link in self.ledger.links]
            if streams := self._dataset.streams:
                state["row_counts"] = {str(n): [*part.counts] for n, part in streams.items()}
        return state

    @property
    def digest(self) -> str:
        """Digest of the rows of all batches so far; "" before the first, and of a user's stream."""
        return self.ledger.links[-1].digest

    def rows(self, first_sample: int) -> list[int]:
        """Return the rows of samples of a batch in the ledger; of a user's stream, the samples."""
        links = (one for one in reversed(self.ledger.links) if one.first_sample == first_sample)
        samples = next(links).samples
        return (samples if self._order is None else self._order.rows(samples)).tolist()

    def sources(self, link: Link) -> list[str]:
        """Return each row's source in a batch, as cut from samples; [] unless there are several."""
        if self._order is None or not isinstance(self._dataset, Dataset):
            return []
        names = self._dataset.names
        if len(names) < 2:
            return []
        parts, _ = self._dataset.part_of(self._order.rows(link.samples))
        return [names[part] for part in parts.repeat(link.pieces).tolist()]

    def close(self) -> None:
        """Stop the thread and the workers, and free the prefetched batches; idempotent."""
        self._close_batches()
        if self._failure is None:
            self._failure = RuntimeError("the loader is closed")

    def _close_batches(self) -> None:
        if self._batches is None:
            return
        # Closing waits for the current read, which never ends if the file system hangs.
        closing = threading.Thread(target=self._batches.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S + _CLOSE_WORKER_S * self._num_workers)
        self._batches = None


def eval_batches(
    dataset: Dataset,
    *,
    global_batch_size: int,
    sharding: NamedSharding,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Return an iterator over batches of all rows, as stored; padding rows have weight 0.

    With `max_batches`, at most that many, of rows spread evenly over the dataset. A batch is name
    -> [global_batch_size, ...], placed by the sharding.
    """
    _check_batch(global_batch_size, sharding)
    check_same_everywhere(dataset)
    return _eval_batches(dataset, global_batch_size, sharding, max_batches)


def _eval_batches(
    dataset: Dataset, batch_size: int, sharding: NamedSharding, max_batches: int | None
) -> Iterator[Batch]:
    """Yield the batches of `eval_batches`, [batch_size, ...], prefetched."""
    from jaxdist.data.batches import EvalBatches, device_placer, part_held, read_ahead

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
    """Return the position for resuming from the `Loader.state()` of a checkpoint.

    The mixture may change from the position on. If the seed or the data before the position
    changed, return the first sample with `restarts`, and raise `ConfigError` without. Also raise
    it if the version or the ledger's rows differ.
    """
    if state.get("version") != STATE_VERSION:
        raise ConfigError(
            f"the checkpoint's data position has version {state.get('version')!r}, this code "
            f"reads {STATE_VERSION}. Resume with the version of jaxdist that saved it."
        )
    changes = [] if state["seed"] == seed else [f"seed was {state['seed']} and is {seed}"]
    same_data = state["fingerprint"] == dataset.fingerprint
    if not same_data and isinstance(dataset, Dataset) and "parts" in state["dataset"]:
        same_data = dataset.continues(state["dataset"], int(state["next_sample"]))
        if same_data and not changes:
            log.info(
                "data.mixture_weights changed: the new weights begin at sample %d or later",
                state["next_sample"],
            )
    if not same_data:
        changes += _changes(state["dataset"], dataset.identity)
    # Keep the skipped samples unless the data changed; they apply even if the seed changed.
    parts = state.get("left_out", []) if same_data else []
    left_out = tuple((int(first), int(end)) for first, end in parts)
    ledger = tuple(Link(*link) for link in state.get("ledger", [Link()]))
    if not changes:
        if isinstance(dataset, Dataset):
            for number, part in dataset.streams.items():
                part.counts = [*state.get("row_counts", {}).get(str(number), part.counts)]
            _check_ledger(ledger, dataset, seed)
        iterators = tuple(state["iterators"]) if "iterators" in state else None
        return Position(int(state["next_sample"]), left_out, iterators, ledger)
    if restarts:
        return Position(0, left_out, ledger=ledger[-1:])
    raise ConfigError(
        f"the data changed since the checkpoint ({'; '.join(changes)}): sample "
        f"{state['next_sample']} would differ, and rows would repeat or be left out. "
        "Restore the data and settings, or declare the change as a stage in data.mixture_weights: "
        "keep the old sources first, and name a step from this checkpoint on. override=data begins "
        "the new data at its start."
    )


def _check_ledger(ledger: tuple[Link, ...], dataset: Dataset, seed: int) -> None:
    index = first_mismatch(ledger, dataset.fingerprint_at, dataset.order(seed).rows)
    if index is not None:
        raise ConfigError(
            f"data ledger: the batch at sample {ledger[index].first_sample}, {len(ledger) - index} "
            "steps before the end of the checkpoint, had other rows than this version selects from "
            "the same data and seed: rows would repeat or be left out. Resume with the version of "
            "jaxdist that saved it, or set override=data and another seed to begin the data anew."
        )


def check_same_everywhere(dataset: TrainData) -> None:
    """Raise `ConfigError` unless all processes opened the same data; a collective call."""

    def compare(fingerprints: list[Any]) -> None:
        if other := [str(i) for i, value in enumerate(fingerprints) if value != fingerprints[0]]:
            raise ConfigError(
                f"processes {few(other, 8)} opened other data than process 0. Use the "
                "same files on every host (for stdlib: the same Python), or a shared path."
            )

    coordination.decide_from("dataset", dataset.fingerprint, compare)


def _own_state(
    iterators: tuple[dict[str, Any], ...] | None, shard: tuple[int, int]
) -> dict[str, Any] | None:
    index, count = shard
    if iterators is None:
        return None
    if len(iterators) != count:
        raise ConfigError(
            f"the checkpoint holds the positions of {len(iterators)} readers of the stream, "
            f"this run has {count}, and they cannot be redistributed. Resume with "
            "the processes and mesh of the checkpoint, or set override=data and another seed; a "
            "function without shard_index resumes on any number."
        )
    return iterators[index]


def _every_state(
    state: dict[str, Any], shard: tuple[int, int], *, everywhere: bool
) -> list[dict[str, Any]]:
    """Return the state of each reader; of several, [] in processes k > 0 unless `everywhere`."""
    index, count = shard
    if count == 1:
        return [state]
    states = dict(coordination.collect("stream", [index, state]))
    ordered = lambda: [states[number] for number in range(count)]
    if everywhere:
        return list(coordination.decide("states of the stream", ordered))
    return ordered() if states else []


def _check_batch(global_batch_size: int, sharding: NamedSharding) -> None:
    names = axes_of(PartitionSpec(*sharding.spec[:1]))
    parts = math.prod(sharding.mesh.shape[axis] for axis in names)
    if global_batch_size < 1 or global_batch_size % parts:
        raise ConfigError(
            f"global_batch_size={global_batch_size} is not a positive multiple of "
            f"{parts}, the devices along the mesh axes {', '.join(names)}. Use a multiple."
        )


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = sorted(then.keys() | now.keys())
    different = [name for name in names if then.get(name) != now.get(name)]
    words = {"parts": "the content, rules or order of the sources differs"}
    return [
        words.get(name, f"{name} was {then.get(name)!r} and is {now.get(name)!r}")
        for name in different
    ] or ["its fingerprint differs"]
