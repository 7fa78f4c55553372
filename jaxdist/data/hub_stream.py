"""Stream data sets of the hub: shards are tokenized ahead of training and deleted after use.

A shard is a file of the data set at its commit, or a part of a Parquet or tar file; rows do not
cross shards. The cache has the tokens of each shard in use, stream-KEY/000012, with a lock that
its readers share. The first process of a host that needs a missing shard downloads and tokenizes
it, under another lock; the last one that no longer needs it deletes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

import numpy as np

from jaxdist.data.cache import cache_folder, flock
from jaxdist.data.corpus import Corpus, corpus_key, write_shard
from jaxdist.data.encoding import Encoder
from jaxdist.data.files import kind_of
from jaxdist.data.hub_sets import HubFile
from jaxdist.data.order import Order, keys_of, permute
from jaxdist.data.packing import Fields, Part, Rows, Spans, gather_rows
from jaxdist.data.parquet import download_row_groups
from jaxdist.data.tars import download_samples
from jaxdist.runtime import hub
from jaxdist.runtime.progress import waiting
from jaxdist.settings import ConfigError

SHARD_ROWS = 1 << 32
"""Row r of shard i has number i * SHARD_ROWS + r."""

PART_BYTES = 64 << 20
"""Parquet files and uncompressed tars are divided into parts of at least this size."""

_NUM_THREADS = 4
"""Shards that are downloaded concurrently; one at a time is tokenized, on all cores."""

Split: TypeAlias = Callable[[Corpus, float], tuple[Part, Part | None]]
"""(tokens of a shard, fraction to hold out) -> training rows, and held-out rows or None."""

_tokenizing = threading.Lock()


class _Shard(NamedTuple):
    rows: Part
    held_out: Part | None
    lock: TextIO


@dataclasses.dataclass(frozen=True)
class _LocalFile(HubFile):
    """A file of the hub that has been downloaded."""

    local: Path = Path()

    def download(self) -> Path:
        return self.local


class StreamedPart:
    """Rows of a data set whose shards are on disk only while they are needed, a `Part`.

    `counts` are the training rows of each shard, -1 = not yet tokenized; checkpoints store them.
    The rows of `buffer_shards` shards are shuffled jointly.
    """

    def __init__(
        self,
        source: str,
        files: Sequence[HubFile],
        encoder: Encoder,
        split: Split,
        *,
        held: float,
        buffer_shards: int,
        fields: Fields,
        label: str,
    ):
        """Open a source without reading it.

        `split` cuts a shard's tokens into training and held-out rows; the fraction `held` of the
        first shard is held out. `label` identifies the packing in the fingerprint.
        """
        self._source, self._encoder = source, encoder
        self._split, self._held = split, held
        self._files = [part for file in files for part in _parts_of(file)]
        self.num_shards, self.buffer_shards = len(self._files), buffer_shards
        key = f"{corpus_key(files, encoder)}-{self.num_shards}"
        self._folder = cache_folder() / f"stream-{key}"
        self.counts = [-1] * self.num_shards
        self.fields = fields
        self.fingerprint = f"streamed-{key}-{label}-{held}-{buffer_shards}"
        self._changed = threading.Condition()
        self._ready: dict[int, _Shard] = {}
        self._errors: dict[int, Exception] = {}
        self._window: tuple[int, ...] = ()
        self._queue: list[int] = []  # in this order
        self._busy: set[int] = set()

    @property
    def num_rows(self) -> int:
        """Upper bound of row numbers; the number of rows is unknown before the first pass ends."""
        return self.num_shards * SHARD_ROWS

    @property
    def held_out(self) -> list[Part]:
        """Held-out rows of the first shard, [] if all are for training."""
        held_out = self._get(0).held_out if self._held else None
        if held_out is not None and not held_out.num_rows:
            raise ConfigError(
                f"the held-out part of the first shard of {self._source!r} holds no row. Raise "
                f"data.eval_fraction={self._held}, set it to 0, or use a smaller seq_len."
            )
        return [] if held_out is None else [held_out]

    def origin(self, row: int) -> tuple[str, int]:
        """Return the shard of a row, as "FILE, part 1 of 3", and the number of the row in it."""
        shard, number = divmod(row, SHARD_ROWS)
        file = self._files[shard]
        part = f", part {file.part + 1} of {file.num_parts}" if file.num_parts > 1 else ""
        return f"{file}{part}", number

    def count(self, shard: int) -> int:
        """Return the number of training rows of a shard; tokenize it if the number is unknown."""
        if self.counts[shard] < 0:  # also of a shard that was opened before a rollback
            self.counts[shard] = self._get(shard).rows.num_rows
        return self.counts[shard]

    def row_at_hand(self) -> int:
        """Return the first row of a shard that is on disk, if one has rows, else of the first."""
        with self._changed:
            return min((n for n in self._ready if self.counts[n] > 0), default=0) * SHARD_ROWS

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return rows of `indices` int64 [n], name -> [n, ...]; `spans` as in `Part.rows`."""
        shards, offsets = np.divmod(indices, SHARD_ROWS)
        return gather_rows(shards, lambda one, of: self._get(one).rows.rows(offsets[of], spans))

    def keep(self, window: Iterable[int]) -> None:
        """Prepare these shards in the background, in this order, and delete others not in use."""
        window = tuple(window)
        with self._changed:
            if window == self._window:
                return
            self._window, self._queue = window, list(window)
            kept = {*window, *[0] * bool(self._held)}
            for shard in self._ready.keys() - kept:
                self._ready.pop(shard).lock.close()
            self._start()
        for path in self._folder.glob("*") if self._folder.exists() else ():
            number = path.name.lstrip(".").partition(".")[0]
            if number.isdigit() and int(number) not in kept and path.suffix != ".lock":
                with self._lock(number) as lock, contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else in use
                    shutil.rmtree(path, ignore_errors=True)

    def _get(self, shard: int) -> _Shard:
        """Return a shard as soon as it is ready; raises the error of preparing it."""
        with self._changed:
            if shard in self._ready:
                return self._ready[shard]
        with waiting(f"shard {shard} of {self._source}"), self._changed:
            while shard not in self._ready:
                if shard not in self._busy:  # also after an error in the background
                    self._errors.pop(shard, None)
                    self._queue = [shard, *(one for one in self._queue if one != shard)]
                    self._start()
                self._changed.wait()
                if shard in self._errors:
                    raise self._errors.pop(shard)
            return self._ready[shard]

    def _start(self) -> None:
        """Start threads for the requested shards; the caller holds `_changed`."""
        while len(self._busy) < _NUM_THREADS:
            done = self._ready.keys() | self._busy | self._errors.keys()
            if (shard := next((one for one in self._queue if one not in done), None)) is None:
                return
            self._busy.add(shard)
            threading.Thread(
                target=self._work, args=(shard,), name=f"shard {shard}", daemon=True
            ).start()

    def _work(self, shard: int) -> None:
        try:
            made: _Shard | Exception = self._open(shard)
        except Exception as error:  # raised where the shard is needed
            made = error
        with self._changed:
            self._busy.discard(shard)
            done: dict[int, Any] = self._errors if isinstance(made, Exception) else self._ready
            done[shard] = made
            self._start()
            self._changed.notify_all()

    def _lock(self, name: str) -> TextIO:
        # NFS grants shared locks only on files that may be read.
        return (self._folder / f"{name}.lock").open("w+")

    def _open(self, shard: int) -> _Shard:
        """Return a shard with a shared lock, after downloading and tokenizing it if necessary."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, lock = self._folder / f"{shard:06d}", self._lock(f"{shard:06d}")
        try:
            flock(lock, fcntl.LOCK_SH)  # from here on nobody deletes it
            # An exclusive `lock` would wait until all readers end, who may wait for this process.
            with self._lock(f"{shard:06d}.making") as making:
                flock(making, fcntl.LOCK_EX)
                if not (path / "corpus.json").exists():
                    self._make(self._files[shard], path)
            rows, held_out = self._split(Corpus(path), 0.0 if shard else self._held)
            if self.counts[shard] not in (-1, rows.num_rows):
                raise ConfigError(
                    f"{self.origin(shard * SHARD_ROWS)[0]} has {rows.num_rows} rows, and had "
                    f"{self.counts[shard]} when the checkpoint was saved: a library changed. "
                    "Resume with the versions that saved it."
                )
            self.counts[shard] = rows.num_rows
            return _Shard(rows, held_out, lock)
        except BaseException:
            lock.close()
            raise

    def _make(self, file: HubFile, path: Path) -> None:
        raw = path.with_suffix(".raw")
        try:
            if file.num_parts == 1 or hub.in_cache(file.repo, file.path):
                local = file.download_to(raw)
            else:
                local = raw / file.name
                download = download_row_groups if kind_of(file) == "parquet" else download_samples
                download(file, local)
            if file.num_parts == 1:
                hub.check_digest(str(file), _digest_of(local, file.tag), file.tag)
            with _tokenizing:
                write_shard(_LocalFile(**vars(file), local=local), path, self._encoder)
        except hub.Unreachable:
            raise  # the next start continues the download
        except ConfigError:
            shutil.rmtree(raw, ignore_errors=True)
            raise
        shutil.rmtree(raw, ignore_errors=True)


def _parts_of(file: HubFile) -> list[HubFile]:
    has_parts = kind_of(file) == "parquet" or file.name.endswith(".tar")
    count = max(1, file.num_bytes // PART_BYTES) if has_parts else 1
    return [dataclasses.replace(file, part=part, num_parts=count) for part in range(count)]


def _digest_of(path: Path, tag: str) -> str:
    """Return the digest of a file in the format of `tag`: SHA-256, or the id of a git blob."""
    blob = lambda: hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256" if len(tag) == 64 else blob).hexdigest()


class StreamOrder(Order):
    """The order of training with streamed parts: each has shuffled shards in shuffled buffers.

    An epoch of a streamed part is one pass over its shards in shuffled order; the first epoch
    begins with the first shard. Buffers of `buffer_shards` shards (1, 2, 4, ... at the start) are
    read one after another, each in shuffled order. So the row of a sample depends on the row counts
    of the shards up to the end of its buffer.
    """

    samples_at_once = 0  # later samples need shards that are not yet there

    def __init__(
        self, streams: dict[int, StreamedPart], *about: object, ahead: bool, **more: object
    ):
        """Order parts, some streamed; with `ahead`, prepare shards of this and the next buffer."""
        super().__init__(*about, **more)  # type: ignore[arg-type]
        self._streams = {
            number: _Buffers(part, self.seed, number, self._size, ahead)
            for number, part in streams.items()
        }

    def _group_rows(self, parts: tuple[int, ...], samples: np.ndarray) -> np.ndarray:
        """Return the example of each sample, int64 [n]; samples are numbered within these parts."""
        if parts[0] not in self._streams:
            return super()._group_rows(parts, samples)
        return self._starts[parts[0]] + self._streams[parts[0]].examples(samples)


class _Buffers:
    """Buffers of shards of one part, in the order of training."""

    def __init__(self, part: StreamedPart, seed: int, number: int, size: int, ahead: bool):
        self._part, self._seed, self._number = part, seed, number
        self._size, self._ahead = size, ahead
        self._sequence = functools.lru_cache(maxsize=2)(self._shuffled)
        self._ends = np.zeros(1, np.int64)  # examples before each buffer
        first, step = [0], 1
        while first[-1] < part.num_shards:
            first.append(min(first[-1] + step, part.num_shards))
            step = min(2 * step, part.buffer_shards)
        self._bounds = first
        self._later = [*range(0, part.num_shards, part.buffer_shards), part.num_shards]

    def examples(self, samples: np.ndarray) -> np.ndarray:
        """Return the example of each sample of the part; int64 [n] -> int64 [n]."""
        while self._ends[-1] <= samples.max():
            self._extend(int(np.searchsorted(self._ends, samples.min(), side="right")) - 1)
        buffers = np.searchsorted(self._ends, samples, side="right") - 1
        if self._ahead:
            self._keep(int(buffers.min()), int(buffers.max()))
        examples = np.empty_like(samples)
        for buffer in np.unique(buffers):
            chosen, shards = buffers == buffer, self._shards(int(buffer))
            ends = np.cumsum(self._counts(shards))
            keys = keys_of(self._seed, self._number, int(buffer))
            rows = permute(samples[chosen] - self._ends[buffer], int(ends[-1]), keys)
            of = np.searchsorted(ends, rows, side="right")
            starts = np.append(0, ends[:-1])
            examples[chosen] = shards[of] * (SHARD_ROWS // self._size) + rows - starts[of]
        return examples

    def _extend(self, first: int) -> None:
        """Compute the end of the next buffer, in samples; buffers from `first` on are in use."""
        buffer = len(self._ends) - 1
        shards = self._shards(buffer)
        if self._ahead and min(self._part.counts[shard] for shard in shards) < 0:
            self._keep(first, buffer)
        if buffer == len(self._bounds) - 1 and not self._ends[-1]:
            raise ConfigError(
                "no shard of a streamed source holds a row. Raise train.seq_len with "
                "data.long_records=drop, else lower it."
            )
        self._ends = np.append(self._ends, self._ends[-1] + self._counts(shards).sum())

    def _keep(self, first: int, last: int) -> None:
        """Keep the shards of buffers `first` to `last`, and prepare those of the next one."""
        shards = np.concatenate([self._shards(buffer) for buffer in range(first, last + 2)])
        self._part.keep(dict.fromkeys(shards.tolist()))

    def _counts(self, shards: np.ndarray) -> np.ndarray:
        """Return the number of examples of each shard, int64 [n]."""
        return np.array([self._part.count(one) // self._size for one in shards.tolist()], np.int64)

    def _shards(self, buffer: int) -> np.ndarray:
        """Return the shards of a buffer, int64 [n]."""
        epoch, bounds = 0, self._bounds
        if buffer >= len(bounds) - 1:
            epoch, buffer = divmod(buffer - len(bounds) + 1, len(self._later) - 1)
            epoch, bounds = epoch + 1, self._later
        return self._sequence(epoch)[bounds[buffer] : bounds[buffer + 1]]

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Return the order of all shards in an epoch, int64 [num_shards]."""
        size = self._part.num_shards
        keys = keys_of(self._seed, self._number, -1 - epoch)  # rows have those from 0 on
        order = permute(np.arange(size, dtype=np.int64), size, keys)
        return order if epoch else np.append(0, order[order > 0])
