"""A tokenised corpus on disk: memory-mapped shards, document ends, a sidecar that makes it whole.

DIR/corpus.json        written last; a folder without it is not a corpus
DIR/tokens-00000.bin   little-endian uint8, uint16 or uint32
DIR/documents.bin      little-endian uint64, where each document ends, in tokens
DIR/tokenizer.json     the tokenizer, unless it is bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxdist.data.documents import Piece, content_digest, read_pieces
from jaxdist.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from jaxdist.types import ConfigError

log = logging.getLogger("jaxdist")

FORMAT = "jaxdist-tokens-1"
SHARD_TOKENS = 1 << 28
"""Tokens of one shard: half a GiB of uint16, small enough to copy, few enough to keep open."""

_BATCH_CHARACTERS = 4 << 20
"""Text given to the tokenizer at once, so that it can use all cores."""

Progress = Callable[[int, int], None]
"""Called with (bytes of input read so far, tokens written so far)."""


class Corpus:
    """A tokenised corpus, opened by memory map.

    Attributes:
        num_tokens: tokens of all shards.
        num_documents: documents.
        vocab_size: of the tokenizer.
        fingerprint: digest of tokens and document ends, whatever the shards and the place.
        document_ends: uint64 [num_documents], exclusive, ascending.
        tokenizer: the tokenizer it was made with.
    """

    def __init__(self, folder: Path):
        """Open a folder.

        Raises:
            ConfigError: not a whole corpus, or one of another version.
        """
        self.folder = folder
        about = _read_about(folder)
        self.num_tokens: int = about["num_tokens"]
        self.num_documents: int = about["num_documents"]
        self.fingerprint: str = about["fingerprint"]
        self._dtype = np.dtype(about["dtype"])
        sizes = [shard["num_tokens"] for shard in about["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._shards = [
            _map(folder / shard["file"], self._dtype, shard["num_tokens"])
            for shard in about["shards"]
        ]
        self.document_ends = _map(folder / "documents.bin", np.dtype("<u8"), self.num_documents)
        name = about["tokenizer"]["name"]
        self.tokenizer: Tokenizer = (
            load_tokenizer("bytes")
            if name == "bytes"
            else FileTokenizer(folder / "tokenizer.json", about["tokenizer"]["end_token"])
        )
        self.vocab_size = self.tokenizer.vocab_size
        if self.tokenizer.fingerprint != about["tokenizer"]["fingerprint"]:
            raise ConfigError(
                [
                    f"{str(folder)!r}: tokenizer.json is not the one the tokens were made with. "
                    "Make the folder again with `python -m jaxdist.data`."
                ]
            )

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), across shards where needed; a view inside one shard."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        if stop <= self._starts[first + 1]:
            offset = self._starts[first]
            return self._shards[first][start - offset : stop - offset]
        middle = int(self._starts[first + 1])
        return np.concatenate([self.tokens(start, middle), self.tokens(middle, stop)])


def write_corpus(
    files: list[Path],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenise files into a new folder, which appears whole or not at all.

    Raises:
        ConfigError: `folder` exists, or a file is bad (see `documents.read_pieces`).
    """
    if folder.exists():
        raise ConfigError(
            [f"{str(folder)!r} exists: a corpus is never overwritten. Remove it or name another."]
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _write(files, folder, tokenizer, text_field, progress, shard_tokens)


def _write(
    files: list[Path],
    folder: Path,
    tokenizer: Tokenizer,
    text_field: str,
    progress: Progress | None,
    shard_tokens: int,
) -> None:
    partial = folder.with_name(f".{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        _fill(partial, files, tokenizer, text_field, progress, shard_tokens)
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "corpus.json").exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cached_corpus(files: list[Path], name: str, tokenizer: Tokenizer, text_field: str) -> Corpus:
    """The corpus of text files, tokenised on first use and kept by content.

    Args:
        files: what to read, in order.
        name: the source as the user wrote it, for the log.
        tokenizer: how.
        text_field: of JSON lines and Parquet.
    """
    key = hashlib.sha256(
        json.dumps([FORMAT, content_digest(files), tokenizer.fingerprint, text_field]).encode()
    ).hexdigest()[:24]
    root = cache_folder()
    folder = root / key
    with _only_one(root / f"{key}.lock"):  # the processes of a host tokenise once, not each
        if not (folder / "corpus.json").exists():
            log.info(
                "tokenising %s: %d files, %.1f MB, tokenizer %s, kept in %s",
                name, len(files), total_bytes(files) / 1e6, tokenizer.name, folder,
            )  # fmt: skip
            _write(files, folder, tokenizer, text_field, None, SHARD_TOKENS)
    return Corpus(folder)


def cache_folder() -> Path:
    """Where tokenised sources are kept: $JAXDIST_CACHE, else ~/.cache/jaxdist, else a temporary."""
    named = os.environ.get("JAXDIST_CACHE")
    wanted = Path(named).expanduser() if named else _home() / ".cache" / "jaxdist"
    folder = wanted / "corpora"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        if named:
            raise ConfigError(
                [
                    f"JAXDIST_CACHE={named!r} cannot be written: {error.strerror}. Name another "
                    "folder."
                ]
            ) from None
        spare = Path(tempfile.gettempdir()) / f"jaxdist-cache-{os.getuid()}"
        spare.mkdir(mode=0o700, exist_ok=True)
        log.info("%s cannot be written (%s): caching in %s", folder, error.strerror, spare)
        return spare


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a container without a user entry
        return Path("/nonexistent")


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock file; released by the system when the process dies, so nobody waits forever."""
    import fcntl

    with path.open("w") as file:
        # A file system without locks: every process tokenises, the first rename wins.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fill(
    folder: Path,
    files: list[Path],
    tokenizer: Tokenizer,
    text_field: str,
    progress: Progress | None,
    shard_tokens: int,
) -> None:
    dtype = _dtype(tokenizer.vocab_size)
    shards = _ShardWriter(folder, dtype, shard_tokens)
    ends: list[np.ndarray] = []
    with contextlib.closing(shards):
        for pieces, position in _batches(files, text_field):
            ends.append(_write_batch(shards, pieces, tokenizer))
            if progress is not None:
                progress(position, shards.num_tokens)
    all_ends = np.concatenate([np.zeros(0, np.uint64), *ends]).astype("<u8")
    if not shards.num_tokens:
        names = ", ".join(repr(str(path)) for path in files[:3])
        raise ConfigError([f"{names} holds no text: nothing to train on. Check the path."])
    (folder / "documents.bin").write_bytes(all_ends.tobytes())
    if isinstance(tokenizer, FileTokenizer):
        (folder / "tokenizer.json").write_bytes(tokenizer.json)
    digest = hashlib.sha256(f"{FORMAT} {dtype.str} ".encode() + shards.digest.digest())
    digest.update(all_ends.tobytes())
    about = {
        "format": FORMAT,
        "dtype": dtype.str,
        "num_tokens": shards.num_tokens,
        "num_documents": len(all_ends),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": {
            "name": Path(tokenizer.name).name,
            "fingerprint": tokenizer.fingerprint,
            "end_id": tokenizer.end_id,
            "end_token": _end_token(tokenizer),
        },
        "fingerprint": digest.hexdigest()[:32],
        "shards": shards.about,
    }
    (folder / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")


def _end_token(tokenizer: Tokenizer) -> str:
    return getattr(tokenizer, "end_token", "")


def _batches(files: list[Path], text_field: str) -> Iterator[tuple[list[Piece], int]]:
    held: list[Piece] = []
    characters, before = 0, 0
    for path in files:
        position = before
        for piece in read_pieces(path, text_field):
            held.append(piece)
            characters += len(piece.text)
            position = before + piece.position
            if characters >= _BATCH_CHARACTERS:
                yield held, position
                held, characters = [], 0
        before += path.stat().st_size
    if held:
        yield held, before


def _write_batch(shards: _ShardWriter, pieces: list[Piece], tokenizer: Tokenizer) -> np.ndarray:
    """Write the tokens of pieces; returns where their documents end."""
    ends = []
    parts: list[np.ndarray] = []
    total = shards.num_tokens
    end = [] if tokenizer.end_id is None else [np.array([tokenizer.end_id], shards.dtype)]
    encoded = tokenizer.encode_batch([piece.text for piece in pieces])
    for piece, tokens in zip(pieces, encoded, strict=True):
        parts.append(tokens.astype(shards.dtype, copy=False))
        total += len(tokens)
        if piece.last:
            parts += end
            total += len(end)
            ends.append(total)
    shards.write(np.concatenate(parts))
    return np.array(ends, np.uint64)


class _ShardWriter:
    def __init__(self, folder: Path, dtype: np.dtype[Any], shard_tokens: int):
        self.dtype = dtype
        self.num_tokens = 0
        self.digest = hashlib.sha256()  # over all shards: where they are cut does not count
        self.about: list[dict[str, Any]] = []
        self._folder, self._shard_tokens = folder, shard_tokens
        self._file: BinaryIO | None = None

    def write(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self._file is None:
                name = f"tokens-{len(self.about):05d}.bin"
                self._file = (self._folder / name).open("wb")
                self.about.append({"file": name, "num_tokens": 0})
            room = self._shard_tokens - self.about[-1]["num_tokens"]
            part, tokens = tokens[:room], tokens[room:]
            data = part.tobytes()
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


def _dtype(vocab_size: int) -> np.dtype[Any]:
    if vocab_size <= 1 << 8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "corpus.json"
    again = "Make it again with `python -m jaxdist.data SRC --out DIR`."
    try:
        about = json.loads(path.read_text())
        if about["format"] != FORMAT:
            raise ConfigError(
                [
                    f"{str(path)!r} has format {about['format']!r}, this version reads {FORMAT!r}. "
                    f"{again}"
                ]
            )
        needed = ("dtype", "num_tokens", "num_documents", "tokenizer", "fingerprint", "shards")
        missing = [key for key in needed if key not in about]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError([f"{str(path)!r} cannot be read ({error}). {again}"]) from None
    if missing:
        raise ConfigError([f"{str(path)!r} lacks {', '.join(missing)}. {again}"])
    return about


def _map(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    size = path.stat().st_size if path.is_file() else 0
    if size != count * dtype.itemsize:
        raise ConfigError(
            [
                f"{str(path)!r} has {size} bytes, corpus.json says "
                f"{count * dtype.itemsize}: it was cut off or changed. Remove the folder (a cached "
                "one is then made again by itself, others with `python -m jaxdist.data`)."
            ]
        )
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)  # slices of the subclass cost 3 us


def total_bytes(files: Iterable[Path]) -> int:
    """Bytes of files on disk."""
    return sum(path.stat().st_size for path in files)
