"""A user's stream of rows: a `grain.IterDataset`, read in its own order.

The checkpoint stores the state of its iterator. Every process reads the complete stream and keeps
its rows of each batch, so a run resumes on any number of processes. A function with arguments
`shard_index` and `num_shards` returns one shard; the run resumes only on as many shards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.data.custom import check_row, digest_of, fields_of, stack_rows, vocabulary_of
from jaxdist.data.packing import Fields
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.settings import ConfigError

if TYPE_CHECKING:
    import grain

    from jaxdist.data.batches import Held, StreamBatches

_PEEKED = 4
"""Rows read before training, for the fields, the fingerprint and a test of resuming."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamDataset:
    """Training data without random access.

    Attributes:
        open: (shard_index, num_shards) -> the stream of that shard.
        divides: whether `open` uses its arguments; else every shard is the complete stream.
        vocab_size: one more than the largest token, target or label in the first rows.
        identity: JSON of `fingerprint` and seq_len.
        fingerprint: digest of the first rows.
    """

    name: str
    open: Callable[[int, int], grain.IterDataset[Any]]
    divides: bool
    kind: Literal["text", "images"]
    fields: Fields
    vocab_size: int
    tokenizer: Tokenizer | None
    identity: dict[str, Any]
    fingerprint: str

    def describe(self) -> str:
        """Return one line for the log: the kind of the rows, and which processes read them."""
        how = "divided among the processes" if self.divides else "read by every process"
        return f"{self.kind}, a stream of rows {how}"

    def shard(self, sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
        """Return this process's shard and the number of shards; (0, 1) if not divided."""
        if not self.divides:
            return 0, 1
        held: dict[int, set[tuple[int, int]]] = {}
        device: Any
        rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
        for device, index in rows.devices_indices_map((batch_size,)).items():
            held.setdefault(device.process_index, set()).add(index[0].indices(batch_size)[:2])
        return shard_of(held, jax.process_index(), self.name)

    def batches(
        self, batch_size: int, held: Held, shard: tuple[int, int], *,
        start: int, left_out: Sequence[tuple[int, int]], num_workers: int,
    ) -> StreamBatches:  # fmt: skip
        """Return batches of this process's shard; the first begins at sample `start`."""
        from jaxdist.data.batches import StreamBatches

        if num_workers:
            raise ConfigError(
                f"data.num_workers={num_workers} with {self.name!r}, which returns an "
                "IterDataset: dividing it would change its order. Set data.num_workers=0 and "
                "call .mp_prefetch() inside the function, or return a grain.MapDataset."
            )
        reads_all = not self.divides
        return StreamBatches(
            self.open(*shard),
            lambda rows: stack_rows(rows, self.fields, self.name),
            batch_size=batch_size,
            num_read=batch_size if reads_all else len(held.rows),
            held=held if reads_all else held._replace(rows=np.arange(len(held.rows))),
            start=start,
            left_out=left_out,
        )


def open_stream(
    name: str,
    open_shard: Callable[[int, int], grain.IterDataset[Any]],
    *,
    divides: bool,
    tokenizer: Tokenizer,
    seq_len: int,
) -> StreamDataset:
    """Return the dataset of a stream; raises `ConfigError` if the stream cannot be resumed."""
    rows, state = _peek(name, open_shard)
    kind = check_row(rows[0], name)
    fields = fields_of(rows[0], name)
    if len(rows) > 1:
        _check_resumes(name, open_shard, state, rows[1])
    first = stack_rows(rows, fields, name)
    fingerprint = digest_of(first)
    return StreamDataset(
        name=name,
        open=open_shard,
        divides=divides,
        kind=kind,
        fields=fields,
        vocab_size=vocabulary_of(first),
        tokenizer=tokenizer if kind == "text" else None,
        identity={"kind": "stream", "seq_len": seq_len, "parts": [fingerprint]},
        fingerprint=fingerprint,
    )


def shard_of(held: Mapping[int, set[tuple[int, int]]], process: int, name: str) -> tuple[int, int]:
    """Return the shard of a process and the number of shards.

    Processes that hold the same rows of every batch (tensor or pipeline parallelism) read the same
    shard. `held` maps a process to ranges [first, end) of rows on its devices. Raises `ConfigError`
    if the rows of two processes partly overlap, or their row counts differ.
    """
    shards = sorted({tuple(sorted(parts)) for parts in held.values()})
    parts = [part for shard in shards for part in shard]
    sizes = {sum(end - first for first, end in shard) for shard in shards}
    if len(parts) != len(set(parts)) or len(sizes) > 1:
        raise ConfigError(
            f"data source {name!r} takes shard_index, but on this mesh the rows of two processes "
            "partly overlap or differ in number. Use a mesh that splits the batch between "
            "processes, or remove shard_index: every process then reads the complete stream."
        )
    return shards.index(tuple(sorted(held[process]))), len(shards)


def _peek(
    name: str, open_shard: Callable[[int, int], grain.IterDataset[Any]]
) -> tuple[list[Any], dict[str, Any]]:
    iterator = iter(open_shard(0, 1))
    rows = []
    try:
        for row in iterator:
            rows.append(row)
            if len(rows) == 1:
                state = _json_state(name, iterator)
            if len(rows) == _PEEKED:
                break
    finally:
        iterator.close()
    if not rows:
        raise ConfigError(f"data source {name!r} has no rows. Return at least one.")
    return rows, state


def _json_state(name: str, iterator: grain.DatasetIterator[Any]) -> dict[str, Any]:
    try:
        state = iterator.get_state()
        if json.loads(json.dumps(state)) == state:
            return state
        problem = "its state is not the same after a round trip through JSON"
    except Exception as error:  # the user's iterator may raise any error
        problem = f"its state cannot be saved ({type(error).__name__}: {error})"
    raise _not_resumable(name, problem)


def _check_resumes(
    name: str,
    open_shard: Callable[[int, int], grain.IterDataset[Any]],
    state: dict[str, Any],
    expected: Mapping[str, Any],
) -> None:
    iterator = iter(open_shard(0, 1))
    try:
        iterator.set_state(state)
        again = next(iterator)
        same = all(np.array_equal(again[field], value) for field, value in expected.items())
        problem = "" if same else "from the state after its first row it continues with another row"
    except Exception as error:
        problem = f"its state cannot be restored ({type(error).__name__}: {error})"
    finally:
        iterator.close()
    if problem:
        raise _not_resumable(name, problem)


def _not_resumable(name: str, problem: str) -> ConfigError:
    return ConfigError(
        f"data source {name!r} cannot be resumed: {problem}. Build it from grain's own "
        "datasets with a fixed seed, give its iterators get_state and set_state, or return "
        "rows by number (len() and [index])."
    )
