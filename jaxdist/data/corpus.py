"""A tokenized corpus: memory-mapped shards, document ends, and a metadata file.

DIR/corpus.json        written last; a folder without it is not a corpus
DIR/tokens-00000.bin   little-endian uint8, uint16 or uint32
DIR/weights-00000.bin  uint8, 0 if a token is not learned; absent for text
DIR/documents.bin      little-endian uint64, the end of each document in tokens
DIR/tokenizer.json     the tokenizer, the files next to it and the chat template; absent for bytes

On an object store, only the token ranges that rows need are read; document ends and weights are
read completely on first use.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxdist.data.cache import cache_folder, only_one
from jaxdist.data.chat import JinjaTemplate, PlainTemplate
from jaxdist.data.encoding import Encoder
from jaxdist.data.files import DataFile, changed_objects, size_of, source_digest
from jaxdist.data.hub_sets import downloading
from jaxdist.data.tokenizer import (
    OLD_TEXT_FORMAT,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
)
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.new_output import new_output
from jaxdist.runtime.progress import Progress
from jaxdist.runtime.storage import REQUESTS, Location, locate
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

FORMAT = "jaxdist-tokens-1"
_READING = 2
"""Version of the rules from files to text; changing it invalidates cached corpora."""

SHARD_TOKENS = 1 << 28
"""Tokens of one shard: half a GiB of uint16."""

PART_BYTES = 64 << 20
"""A part ends with the file that reaches this size. An interruption loses at most one part."""

_WEIGHT_DTYPE = np.dtype("u1")


class Corpus:
    """A tokenized corpus, opened but not read.

    `weighted`: whether weights are stored (else all are 1). `records`: as in `data.records`.
    `fingerprint`: digest of tokens, weights and document ends, independent of shards and path.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = locate(folder)
        about = _read_about(self.folder)
        self.num_tokens: int = about["num_tokens"]
        self.num_documents: int = about["num_documents"]
        self.fingerprint: str = about["fingerprint"]
        self._dtype = np.dtype(about["dtype"])
        sizes = [shard["num_tokens"] for shard in about["shards"]]
        self._starts = [0, *itertools.accumulate(map(int, sizes))]
        stored = None if self.folder.is_local else self.folder.sizes()
        open_file = lambda name, dtype, count: _open(self.folder / name, dtype, count, stored)
        map_file = functools.cache(lambda file: np.memmap(file, np.uint8, "r"))
        self._shards = [
            _map_part(shard, self._dtype, map_file)
            if "offset" in shard
            else open_file(shard["file"], self._dtype, shard["num_tokens"])
            for shard in about["shards"]
        ]
        self._weights = [
            open_file(shard["file"], _WEIGHT_DTYPE, shard["num_tokens"])
            for shard in about.get("weights", [])
        ]
        self.weighted = bool(self._weights)
        self.records: str = about.get("records", "text")
        self._ends = open_file("documents.bin", np.dtype("<u8"), self.num_documents)
        text_format = about.get("text_format", OLD_TEXT_FORMAT)
        self._about_tokenizer: dict[str, Any] = {**about["tokenizer"], "text_format": text_format}
        self._requests: ThreadPoolExecutor | None = None
        if not self.folder.is_local:
            self._requests = ThreadPoolExecutor(REQUESTS, "corpus")

    def __reduce__(self) -> tuple[type[Corpus], tuple[Location]]:
        """Pickle only the path, because worker processes open the files themselves."""
        return Corpus, (self.folder.absolute(),)

    @functools.cached_property
    def document_ends(self) -> np.ndarray:
        """End of each document, exclusive and ascending: uint64 [num_documents]."""
        return self._ends[:]

    def ends(self, first: int, last: int) -> np.ndarray:
        """Return the ends of documents [first, last) that exist, uint64 [n]."""
        # Pages of a mapped file would count as memory of the process.
        if not self.folder.is_local:
            return self.document_ends[first:last]
        count = max(0, min(last, self.num_documents) - first)
        return np.fromfile((self.folder / "documents.bin").path, "<u8", count, offset=8 * first)

    def ended_before(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the number of document ends that are below each of `tokens`, int64 [n]."""
        # A key of another dtype would convert all ends.
        return np.searchsorted(self.document_ends, np.array(tokens, np.uint64), side="left")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens, loaded on first use; reading rows does not need it."""
        about = self._about_tokenizer
        name = "bytes" if about["name"] == "bytes" else str(self.folder / "tokenizer.json")
        tokenizer = load_tokenizer(name, about["eos_token"], about["text_format"])
        if tokenizer.fingerprint != about["fingerprint"]:
            raise ConfigError(
                f"{str(self.folder)!r}: the tokenizer's files are not those of the tokens. "
                "Make the folder again with `python -m jaxdist.data`."
            )
        return tokenizer

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop), unsigned [stop - start]."""
        return self._part(self._shards, start, stop)

    def ranges(self, bounds: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yield `tokens` of each range, [stop - start]; object stores are read concurrently."""
        if self._requests is None:
            return (self.tokens(start, stop) for start, stop in bounds)
        return self._requests.map(lambda range: self.tokens(*range), bounds)

    def weights(self, start: int, stop: int) -> np.ndarray:
        """Return the weights of tokens [start, stop), 0 = not learned; uint8 [stop - start]."""
        if not self.weighted:
            return np.ones(stop - start, _WEIGHT_DTYPE)
        return self._part(self._held_weights, start, stop)

    @functools.cached_property
    def _held_weights(self) -> list[np.ndarray]:
        """Weights of each shard in memory, uint8 [tokens of the shard]; avoids many small reads."""
        return [shard[:] for shard in self._weights]

    def _part(self, shards: list[Any], start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) of the concatenated shards: [stop - start]."""
        first = bisect.bisect_right(self._starts, start) - 1
        if stop <= self._starts[first + 1]:
            offset = self._starts[first]
            return shards[first][start - offset : stop - offset]
        middle = self._starts[first + 1]
        return np.concatenate([self._part(shards, start, middle), self._part(shards, middle, stop)])


def write_corpus(
    files: Sequence[DataFile],
    folder: Path,
    encoder: Encoder,
    *,
    shard_tokens: int = SHARD_TOKENS,
    sources: Sequence[str] = (),
) -> None:
    """Tokenize files into a new folder, atomically; a later call continues after complete parts.

    If another process writes the same corpus first, its folder is kept. `sources` are the names
    of the files in the settings; objects of a store are listed again at the end, to detect
    changes. Raises `ConfigError` for a bad file, a changed object, or files without a token.
    """
    parts = _in_parts(files)
    work = folder.with_name(f".{folder.name}.parts")
    with first_output(folder) as partial, downloading(files):
        if len(parts) == 1:
            with Progress("tokenizing", total_bytes(files), "B") as progress:
                _fill(partial, files, encoder, shard_tokens, progress)
        else:
            _join(partial, _fill_parts(work, parts, encoder, shard_tokens), encoder)
        if changed := changed_objects(files, sources):
            raise ConfigError(
                f"{few(changed, 3)} changed while being read, so the tokens may be a mixture. "
                "Start the command again when the files no longer change."
            )
        if not _read_about(locate(partial))["num_tokens"]:
            names = ", ".join(repr(str(path)) for path in files[:3])
            what = "records" if encoder.weighted else "text"
            raise ConfigError(f"{names} holds no {what}: nothing to train on. Check the path.")
    shutil.rmtree(work, ignore_errors=True)


def write_shard(file: DataFile, folder: Path, encoder: Encoder) -> None:
    """Tokenize one file, which may have no text, into a new folder, atomically."""
    with first_output(folder) as partial:
        _fill(partial, [file], encoder, SHARD_TOKENS)


@contextlib.contextmanager
def first_output(folder: Path) -> Iterator[Path]:
    """Yield a new folder as `new_output` does; keep the corpus of another process that is first."""
    try:
        with new_output(folder) as partial:
            partial.mkdir()
            yield partial
    except OSError:
        if not (folder / "corpus.json").exists():
            raise


def corpus_key(files: Sequence[DataFile], encoder: Encoder) -> str:
    """Return a digest of the files' content and of the rules that determine their tokens."""
    about = [FORMAT, _READING, source_digest(files), *encoder.identity]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def cached_corpus(files: Sequence[DataFile], source: str, encoder: Encoder) -> Corpus:
    """Return the corpus of files, tokenized on first use and cached under `corpus_key`."""
    key = corpus_key(files, encoder)
    root = cache_folder()
    folder = root / key
    with only_one(root / f"{key}.lock"):  # one process per host tokenizes
        if not (folder / "corpus.json").exists():
            log.info(
                "tokenizing %s: %d files, %s, tokenizer %s, cached in %s",
                source, len(files), in_bytes(total_bytes(files)), encoder.tokenizer.name, folder,
            )  # fmt: skip
            write_corpus(files, folder, encoder, sources=[source])
    return Corpus(folder)


def _in_parts(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Divide files into groups of at least `PART_BYTES` (but the last), in order."""
    parts: list[list[DataFile]] = [[]]
    num_bytes = 0
    for file in files:
        if num_bytes >= PART_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(file)
        num_bytes += size_of(file)
    return parts


def _fill_parts(
    work: Path, parts: list[list[DataFile]], encoder: Encoder, shard_tokens: int
) -> list[Path]:
    """Tokenize each part into a folder in `work`, unless it is complete; return the folders."""
    key = corpus_key([file for part in parts for file in part], encoder)
    for other in work.glob("*"):
        if other.name != key:  # of other files or settings
            shutil.rmtree(other, ignore_errors=True)
    folders = [work / key / f"{number:05d}" for number in range(len(parts))]
    complete = sum((folder / "corpus.json").exists() for folder in folders)
    if complete:
        log.info(
            "continuing to tokenize: %d of %d parts of the files are done", complete, len(parts)
        )
    total = sum(map(total_bytes, parts))
    with Progress("tokenizing", total, "B") as progress:
        for part, folder in zip(parts, folders, strict=True):
            if (folder / "corpus.json").exists():
                progress.skip(total_bytes(part))
                continue
            with first_output(folder) as partial:
                _fill(partial, part, encoder, shard_tokens, progress)
    return folders


def _join(folder: Path, parts: Sequence[Path], encoder: Encoder) -> None:
    """Join the corpora `parts` to a corpus `folder`, with hard links to their files if possible."""
    abouts = [_read_about(locate(part)) for part in parts]
    digests = {stem: hashlib.sha256() for stem in ("tokens", "weights")}
    shards: dict[str, list[dict[str, Any]]] = {"tokens": [], "weights": []}
    starts = [0, *itertools.accumulate(about["num_tokens"] for about in abouts)]
    for stem, key in (("tokens", "shards"), ("weights", "weights")):
        for part, about in zip(parts, abouts, strict=True):
            for shard in about.get(key, []):
                name = f"{stem}-{len(shards[stem]):05d}.bin"
                _link(part / shard["file"], folder / name)
                digests[stem].update(np.memmap(folder / name, np.uint8, "r").data)
                shards[stem].append({"file": name, "num_tokens": shard["num_tokens"]})
    ends = [
        np.fromfile(part / "documents.bin", "<u8") + np.uint64(start)
        for part, start in zip(parts, starts, strict=False)
    ]
    dtype = np.dtype(abouts[0]["dtype"])
    write_index(folder, encoder, dtype, shards, np.concatenate(ends), digests)


def _link(file: Path, name: Path) -> None:
    try:
        os.link(file, name)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, name)


def _fill(
    folder: Path,
    files: Sequence[DataFile],
    encoder: Encoder,
    shard_tokens: int,
    progress: Progress | None = None,
) -> None:
    tokenizer = encoder.tokenizer
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
    writers = {
        "tokens": _ShardWriter(folder, "tokens", dtype, shard_tokens),
        "weights": _ShardWriter(folder, "weights", _WEIGHT_DTYPE, shard_tokens),
    }
    tokens, weights = writers.values()
    ends: list[np.ndarray] = [np.zeros(0, np.uint64)]
    position = 0
    with contextlib.closing(tokens), contextlib.closing(weights):
        for chunk in encoder.chunks(files):
            ends.append(chunk.ends + np.uint64(tokens.num_tokens))
            tokens.write(chunk.tokens)
            if chunk.weights is not None:
                weights.write(chunk.weights)
            if progress is not None:
                progress.advance(chunk.position - position)
            position = chunk.position
    shards = {stem: writer.about for stem, writer in writers.items()}
    digests = {stem: writer.digest for stem, writer in writers.items()}
    write_index(folder, encoder, dtype, shards, np.concatenate(ends), digests)


def write_index(
    folder: Path,
    encoder: Encoder,
    dtype: np.dtype[Any],
    shards: dict[str, list[dict[str, Any]]],
    ends: np.ndarray,
    digests: dict[str, Any],
) -> None:
    """Write all files of a corpus except tokens and weights; `ends`: uint64 [num_documents].

    `shards` and `digests` (hashes of the content) are those of "tokens" and, if the encoder has
    weights, "weights". A shard with an `offset` in bytes is a part of a file elsewhere.
    """
    ends = ends.astype("<u8")
    digest = hashlib.sha256(f"{FORMAT} {dtype.str} ".encode() + digests["tokens"].digest())
    digest.update(ends.tobytes())
    weights = {}
    if encoder.weighted:
        digest.update(digests["weights"].digest())
        weights["weights"] = shards["weights"]
    tokenizer = encoder.tokenizer
    (folder / "documents.bin").write_bytes(ends.tobytes())
    if isinstance(tokenizer, FileTokenizer):
        for name, content in tokenizer.files.items():
            (folder / name).write_bytes(content)
    template = encoder.template
    if isinstance(template, JinjaTemplate):
        (folder / "chat_template.jinja").write_text(template.source)
    about = {
        "format": FORMAT,
        "text_format": tokenizer.text_format,
        "dtype": dtype.str,
        "num_tokens": sum(shard["num_tokens"] for shard in shards["tokens"]),
        "num_documents": len(ends),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": {
            "name": Path(tokenizer.name).name,
            "fingerprint": tokenizer.fingerprint,
            "end_id": tokenizer.end_id,
            "eos_token": tokenizer.eos_token,
        },
        "records": encoder.records,
        "chat_template": "plain" if isinstance(template, PlainTemplate) else "auto",
        "fingerprint": digest.hexdigest()[:32],
        "shards": shards["tokens"],
        **weights,
    }
    (folder / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")


class _ShardWriter:
    def __init__(self, folder: Path, stem: str, dtype: np.dtype[Any], shard_tokens: int):
        self.dtype, self._stem = dtype, stem
        self.num_tokens = 0
        self.digest = hashlib.sha256()  # over all shards, independent of their boundaries
        self.about: list[dict[str, Any]] = []
        self._folder, self._shard_tokens = folder, shard_tokens
        self._file: BinaryIO | None = None

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens or weights, unsigned [n], to one or more files."""
        while len(tokens):
            if self._file is None:
                name = f"{self._stem}-{len(self.about):05d}.bin"
                self._file = (self._folder / name).open("wb")
                self.about.append({"file": name, "num_tokens": 0})
            rest = self._shard_tokens - self.about[-1]["num_tokens"]
            part, tokens = tokens[:rest], tokens[rest:]
            data = part.astype(self.dtype, copy=False).tobytes()
            self._file.write(data)
            self.digest.update(data)
            self.about[-1]["num_tokens"] += len(part)
            self.num_tokens += len(part)
            if self.about[-1]["num_tokens"] == self._shard_tokens:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _read_about(folder: Location) -> dict[str, Any]:
    path = folder / "corpus.json"
    again = "Make it again with `python -m jaxdist.data SRC --out DIR`."
    try:
        about = path.json()
        if about["format"] != FORMAT:
            raise ConfigError(
                f"{str(path)!r} has format {about['format']!r}, this version reads {FORMAT!r}. "
                f"{again}"
            )
        needed = ("dtype", "num_tokens", "num_documents", "tokenizer", "fingerprint", "shards")
        missing = [key for key in needed if key not in about]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error}). {again}") from None
    if missing:
        raise ConfigError(f"{str(path)!r} lacks {', '.join(missing)}. {again}")
    return about


class _StoredArray:
    """An array [count] of `dtype` in a stored object; each slice is one request."""

    def __init__(self, file: Location, dtype: np.dtype[Any], count: int) -> None:
        self._file, self._dtype, self._count = file, dtype, count

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read the numbers of a slice: [length of the slice]."""
        start, stop, _ = part.indices(self._count)
        length = max(0, stop - start) * self._dtype.itemsize
        data = self._file.part(start * self._dtype.itemsize, length) if length else b""
        if len(data) != length:
            raise OSError(f"{self._file} has {len(data)} of {length} bytes: it changed")
        return np.frombuffer(data, self._dtype)


def _open(
    path: Location, dtype: np.dtype[Any], count: int, stored: dict[str, int] | None
) -> np.ndarray | _StoredArray:
    """Open a file as a read-only array [count] of `dtype`; `stored`: sizes on an object store."""
    if stored is not None:
        size = stored.get(path.name, 0)
    else:
        size = path.size() if path.exists() and not path.is_directory() else 0
    if size != count * dtype.itemsize:
        raise ConfigError(
            f"{str(path)!r} has {size} bytes, corpus.json says "
            f"{count * dtype.itemsize}: it is truncated or changed. Remove the folder (a cached "
            "corpus is rebuilt automatically, others with `python -m jaxdist.data`)."
        )
    if not count:
        return np.zeros(0, dtype)
    if stored is not None:
        return _StoredArray(path, dtype, count)
    # A slice of np.memmap, a subclass of ndarray, takes 3 us.
    return np.memmap(path.path, dtype, mode="r").view(np.ndarray)


def _map_part(shard: dict[str, Any], dtype: np.dtype[Any], map_file: Any) -> np.ndarray:
    """Map a part of a file elsewhere, as an array [num_tokens]; a map takes a file descriptor."""
    try:
        return np.frombuffer(map_file(shard["file"]), dtype, shard["num_tokens"], shard["offset"])
    except (OSError, ValueError) as error:  # removed or shortened since it was indexed
        raise ConfigError(f"{shard['file']!r} cannot be read: {error}. Check the file.") from None


def total_bytes(files: Iterable[DataFile]) -> int:
    """Return the total stored size of files in bytes."""
    return sum(map(size_of, files))
