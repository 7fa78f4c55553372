"""Read token files of other projects as a corpus, without a copy of their tokens.

| made by | files | documents end |
|---|---|---|
| nanoGPT | .bin: uint16 | after each end token |
| llm.c | .bin: 256 int32, then uint16 (GPT-2) or uint32 (Llama 3) | after each end token |
| OLMo | .npy: plain uint16, or the format of numpy | after each end token |
| Megatron-LM | .bin and .idx | in the .idx |
| Hugging Face datasets | folder of save_to_disk with a column input_ids | at row ends |

Files without a stated dtype have uint16 if the vocabulary allows it, else uint32. Three or more
Arrow rows of one length (except the last) are blocks: their documents end after each end token. The
first use reads all tokens, checks them, and caches an index: a corpus folder whose shards are parts
of these files.

References:
    karpathy/nanoGPT data/openwebtext/prepare.py; karpathy/llm.c dev/data/data_common.py;
    NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py; allenai/OLMo
    olmo/data/memmap_dataset.py; huggingface/datasets Dataset.save_to_disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.data.cache import cache_folder, only_one
from jaxdist.data.config import is_token_folder
from jaxdist.data.corpus import Corpus, cached_corpus, first_output, write_index
from jaxdist.data.encoding import Encoder
from jaxdist.data.files import DataFile, find_files, read_errors, size_of
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.progress import Progress
from jaxdist.runtime.storage import is_url
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

_FORMAT = "token-files-1"
"""Version of the rules from files to documents; changing it invalidates cached indices."""

_SIDECARS = (".idx", ".csv.gz")
_BLOCK_TOKENS = 1 << 23
_LLMC_HEADER_BYTES = 1024
_LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""(magic number, version) -> dtype of the training files of llm.c."""

_LLMC_EVAL = 20240522
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Consecutive tokens of a file; `ends`: document ends in tokens [n], None = at end tokens."""

    file: Path
    offset: int
    dtype: np.dtype[Any]
    num_tokens: int
    ends: np.ndarray | None = None


def saved_arrow_files(source: str) -> list[Path]:
    """Return the .arrow files of a `save_to_disk`, [] for other sources; rejects a DatasetDict."""
    path = Path(source).expanduser()
    if is_url(source):
        return []
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
        raise ConfigError(
            f"{source!r} is a DatasetDict with splits {', '.join(splits)}: a source is one of "
            f"them. Use {str(path / splits[0])!r}."
        )
    if not (path / "state.json").is_file():
        return []
    state = json.loads((path / "state.json").read_bytes())
    return [path / file["filename"] for file in state.get("_data_files", [])]


def select_token_files(files: Sequence[DataFile], source: str) -> list[Path]:
    """Return the local .bin or .npy files of a source; raises `ConfigError` if kinds are mixed."""
    local = [file for file in files if isinstance(file, Path)]
    chosen = [file for file in local if file.suffix in (".bin", ".npy")]
    others = [f for f in local if f not in set(chosen) and not f.name.endswith(_SIDECARS)]
    purposes = {word for file in chosen for word in re.findall("train|val", file.name)}
    is_mixed = others or len({file.suffix for file in chosen}) > 1 or len(purposes) > 1
    if chosen and is_mixed:
        names = ", ".join(file.name for file in [*chosen, *others][:4])
        raise ConfigError(
            f"data source {source!r} mixes kinds of files ({names}): the data are ambiguous. "
            f"Select token files of one kind with a glob, e.g. {source.rstrip('/')}/*train*.bin"
        )
    return chosen


def open_corpus(source: str, encoder: Encoder) -> Corpus:
    """Return a source as a corpus; text and records are tokenized and cached."""
    if is_token_folder(source):
        return Corpus(source)
    if arrow_files := saved_arrow_files(source):
        return open_token_files(arrow_files, source, encoder)
    files = find_files(source)
    if token_files := select_token_files(files, source):
        return open_token_files(token_files, source, encoder)
    if len(files) == 1 and size_of(files[0]) == 0:
        raise ConfigError(f"{str(files[0])!r} is empty: nothing to train on. Check the path.")
    if len(files) == 1 and files[0].name.endswith((".bin", ".npy", ".pt", ".safetensors")):
        raise ConfigError(
            f"{str(files[0])!r} is not text, and .bin and .npy token files are read only from a "
            "local path. Copy these, or make a token folder from text with `python -m jaxdist.data "
            "SRC --out DIR`."
        )
    return cached_corpus(files, source, encoder)


def open_token_files(files: Sequence[Path], source: str, encoder: Encoder) -> Corpus:
    """Return token files as a corpus of the encoder's tokenizer; the index is cached.

    Raises `ConfigError` if a file is damaged, or if its tokens are not of this tokenizer.
    """
    if encoder.weighted:
        raise ConfigError(
            f"data.records={encoder.records} with source {source!r}, which has tokens without "
            "weights. Use data.records=text, or make a token folder from the records."
        )
    with read_errors(source):
        stats = [(file.resolve(), file.stat()) for file in files]
        sidecars = [file.with_suffix(".idx") for file in files]
        stats += [(file.resolve(), file.stat()) for file in sidecars if file.exists()]
    states = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    identity = [_FORMAT, states, *encoder.identity]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    folder = cache_folder() / key
    with only_one(folder.with_suffix(".lock")):
        if not (folder / "corpus.json").exists():
            size = sum(size for _, size, _ in states)
            log.info(
                "checking the tokens of %s: %d files, %s; its index is cached in %s",
                *(source, len(files), in_bytes(size), folder),
            )
            with read_errors(source), first_output(folder) as partial:
                _index(partial, files, source, encoder)
    return Corpus(folder)


def _index(folder: Path, files: Sequence[Path], source: str, encoder: Encoder) -> None:
    tokenizer = encoder.tokenizer
    shards = [shard for file in files for shard in _shards(file.resolve(), tokenizer)]
    shards = [shard for shard in shards if shard.num_tokens]
    dtypes = {shard.dtype for shard in shards}
    if not dtypes:
        raise ConfigError(f"{source!r} holds no tokens: nothing to train on. Check the path.")
    if len(dtypes) > 1:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        raise ConfigError(
            f"data source {source!r} has tokens of {names}: a source has one dtype. Use several "
            "sources, one for each."
        )
    # As unsigned numbers, negative ones are larger than any vocabulary.
    dtype = np.dtype(dtypes.pop().str.replace("i", "u"))
    num_tokens = sum(shard.num_tokens for shard in shards)
    digest, start, ends, is_ended = hashlib.sha256(), 0, [], True
    with Progress("checking", num_tokens * dtype.itemsize, "B") as progress:
        for shard in shards:
            tokens = np.memmap(shard.file, dtype, "r", shard.offset, (shard.num_tokens,))
            after_end = [np.zeros(0, np.int64)]
            for at in range(0, shard.num_tokens, _BLOCK_TOKENS):
                block = tokens[at : at + _BLOCK_TOKENS]
                _check_tokens(block, at, shard, tokenizer)
                digest.update(block.tobytes())
                if tokenizer.end_id is not None:
                    after_end.append(np.flatnonzero(block == tokenizer.end_id) + (at + 1))
                progress.advance(block.nbytes)
            ended = np.concatenate(after_end)
            stated = ended if shard.ends is None else shard.ends
            is_ended &= len(ended) > 0 and bool(np.isin(stated, ended).all())
            ends.append(stated + start)
            start += shard.num_tokens
    if not is_ended:
        log.warning(
            "not all documents of %s end with the end token (%s of tokenizer %s), so a model does "
            "not learn where these end. Check data.tokenizer and data.eos_token",
            source, tokenizer.end_id, tokenizer.name,
        )  # fmt: skip
    all_ends = np.unique(np.append(np.concatenate(ends), num_tokens))
    parts = [
        {"file": str(shard.file), "offset": shard.offset, "num_tokens": shard.num_tokens}
        for shard in shards
    ]
    write_index(folder, encoder, dtype, {"tokens": parts}, all_ends, {"tokens": digest})


def _check_tokens(block: np.ndarray, at: int, shard: _Shard, tokenizer: Tokenizer) -> None:
    """Reject tokens [n], from index `at` of a shard, that are not of the tokenizer."""
    index = int(block.argmax())
    if block[index] >= tokenizer.vocab_size:
        wrong = block.view(shard.dtype)[index]
        raise ConfigError(
            f"{str(shard.file)!r} has {shard.dtype.name} {wrong} at token {at + index:,}, and "
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size:,} tokens. Set "
            "data.tokenizer to the tokenizer of the file."
        )
    if shard.dtype.itemsize == 2 and len(block) > 64 and not block[1::2].any():
        raise ConfigError(
            f"{str(shard.file)!r} is read as {shard.dtype.name}, and every second token is 0: its "
            "tokens have 32 bits. Convert them to uint16, or set data.tokenizer."
        )


def _shards(file: Path, tokenizer: Tokenizer) -> Iterator[_Shard]:
    if file.suffix == ".arrow":
        yield from _arrow_shards(file)
    elif (index := file.with_suffix(".idx")).exists():
        yield _megatron_shard(file, index)
    else:
        yield _plain_shard(file, tokenizer)


def _plain_shard(file: Path, tokenizer: Tokenizer) -> _Shard:
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(_LLMC_HEADER_BYTES)
    offset, dtype = 0, np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    if head.startswith(b"\x93NUMPY"):
        try:
            array = np.load(file, mmap_mode="r")
        except ValueError as error:
            raise ConfigError(f"{str(file)!r} is damaged ({error}). Copy it again.") from None
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
            raise ConfigError(
                f"{str(file)!r} holds {array.dtype} {list(array.shape)}: tokens are one row of "
                "little-endian integers. Convert it."
            )
        return _Shard(file, array.offset, array.dtype, len(array))
    if len(head) == _LLMC_HEADER_BYTES:
        magic, version, count = map(int, np.frombuffer(head, "<i4", 3))
        if magic == _LLMC_EVAL:
            raise ConfigError(
                f"{str(file)!r} is an evaluation file of llm.c, which has questions and not "
                "text. Use a training or validation file."
            )
        if (magic, version) in _LLMC:
            offset, dtype = _LLMC_HEADER_BYTES, np.dtype(_LLMC[magic, version])
            if size != offset + count * dtype.itemsize:
                raise ConfigError(
                    f"{str(file)!r} has {size} bytes, its header says "
                    f"{offset + count * dtype.itemsize}: it is damaged. Copy it again."
                )
    if (size - offset) % dtype.itemsize:
        raise ConfigError(
            f"{str(file)!r} has {size} bytes, which are not {dtype.name} tokens: it is truncated, "
            "or data.tokenizer is not the tokenizer of the file. Copy it again, or set it."
        )
    return _Shard(file, offset, dtype, (size - offset) // dtype.itemsize)


def _megatron_shard(file: Path, index: Path) -> _Shard:
    data = index.read_bytes()
    damaged = f"{str(index)!r} is not a complete index of Megatron-LM ({{}}). Copy it again."
    if not data.startswith(b"MMIDIDX\0\0") or len(data) < 34:
        raise ConfigError(damaged.format("its header is wrong"))
    code, version = data[17], int.from_bytes(data[9:17], "little")
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ConfigError(damaged.format(f"version {version}, dtype {code}"))
    num_sequences, num_ends = map(int, np.frombuffer(data, "<u8", 2, 18))
    needed = 34 + 12 * num_sequences + 8 * num_ends
    if len(data) != needed:
        raise ConfigError(damaged.format(f"{len(data)} bytes instead of {needed}"))
    lengths = np.frombuffer(data, "<i4", num_sequences, 34)
    offsets = np.frombuffer(data, "<i8", num_sequences, 34 + 4 * num_sequences)
    documents = np.frombuffer(data, "<i8", num_ends, 34 + 12 * num_sequences)
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if not np.array_equal(offsets, starts[:-1] * dtype.itemsize):
        raise ConfigError(damaged.format("sequences are not stored one after the other"))
    if len(documents) and not 0 <= documents.min() <= documents.max() <= num_sequences:
        raise ConfigError(damaged.format("documents beyond its sequences"))
    size, num_tokens = file.stat().st_size, int(starts[-1])
    if size != num_tokens * dtype.itemsize:
        raise ConfigError(
            f"{str(file)!r} has {size} bytes, its .idx says {num_tokens * dtype.itemsize}: it is "
            "damaged. Copy it again."
        )
    ends = starts[documents]
    return _Shard(file, 0, dtype, num_tokens, ends[ends > 0])


def _arrow_shards(file: Path) -> Iterator[_Shard]:
    import pyarrow as pa

    if not file.stat().st_size:
        raise ConfigError(f"{str(file)!r} is empty. Copy it again.")
    mapped = np.memmap(file, np.uint8, "r")
    try:
        batches = list(pa.ipc.open_stream(pa.py_buffer(mapped)))
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{str(file)!r} is damaged ({error}). Copy it again.") from None
    columns = [_arrow_tokens(file, batch) for batch in batches if len(batch)]
    offsets = [np.asarray(column.offsets, np.int64) for column in columns]
    lengths = np.concatenate([np.zeros(0, np.int64), *map(np.diff, offsets)])
    is_blocks = len(lengths) > 2 and bool((lengths[:-1] == lengths[0]).all())
    for column, each in zip(columns, offsets, strict=True):
        dtype = np.dtype(column.values.type.to_pandas_dtype())
        address = column.values.buffers()[1].address - mapped.ctypes.data
        if not 0 <= address < mapped.size:
            raise ConfigError(f"{str(file)!r} is compressed. Save it again with save_to_disk.")
        at = address + (column.values.offset + int(each[0])) * dtype.itemsize
        if each[-1] > each[0]:
            ends = None if is_blocks else each[1:] - each[0]
            yield _Shard(file, at, dtype, int(each[-1] - each[0]), ends)


def _arrow_tokens(file: Path, batch: Any) -> Any:
    """Return the column `input_ids`; rejects labels and masks that the loss would ignore."""
    import pyarrow as pa

    names = batch.schema.names
    if "input_ids" not in names:
        raise ConfigError(
            f"{str(file)!r} has no column input_ids (it has: {', '.join(names)}), so it is not "
            "tokenized. Save the text with Dataset.to_parquet, and use that file."
        )
    column = batch.column("input_ids")
    is_list = isinstance(column, pa.ListArray | pa.LargeListArray)
    if not is_list or not pa.types.is_integer(column.type.value_type):
        raise ConfigError(f"{str(file)!r} has input_ids of {column.type}: needed are lists of int.")
    if column.null_count or column.values.null_count:
        raise ConfigError(f"{str(file)!r} has empty values in input_ids. Remove these rows.")
    if "labels" in names and not batch.column("labels").cast(column.type).equals(column):
        raise ConfigError(
            f"{str(file)!r} has labels that differ from input_ids, which would be ignored. Remove "
            "the column, or use records of prompts and completions."
        )
    if (
        "attention_mask" in names
        and (np.asarray(batch.column("attention_mask").flatten()) != 1).any()
    ):
        raise ConfigError(
            f"{str(file)!r} has padding (attention_mask 0), which would be learned. Tokenize "
            "without padding."
        )
    return column
