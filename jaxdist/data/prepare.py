"""Download the data of a shipped config: `python -m jaxdist.data prepare NAME`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxdist.data.corpus import total_bytes
from jaxdist.data.files import DataFile, find_files, library_files
from jaxdist.data.tokenizer import Tokenizer, load_tokenizer
from jaxdist.runtime.formatting.numbers import duration, in_bytes
from jaxdist.runtime.new_output import new_output
from jaxdist.runtime.progress import Progress
from jaxdist.settings import ConfigError
from jaxdist.settings.sources import NAMED_FILES

_FINEWEB = "hf://HuggingFaceFW/fineweb-edu/sample-10BT"


@dataclasses.dataclass(frozen=True)
class ShippedSet:
    """A data set of shipped configs.

    Attributes:
        out: path in `data.sources` of the configs.
        source: data set on the hub, which is tokenized, or URL of a file (a .tar.gz is unpacked).
        tokenizer: `data.tokenizer` of the tokens; "" for a file.
        sha256, num_bytes: digest and size of the file.
    """

    out: str
    source: str
    tokenizer: str = ""
    sha256: str = ""
    num_bytes: int = 0


SHIPPED_SETS = {
    "fineweb_edu_gpt2": ShippedSet("data/fineweb_edu_gpt2", _FINEWEB, "openai-community/gpt2"),
    "fineweb_edu_llama2": ShippedSet(
        "data/fineweb_edu_llama2", _FINEWEB, "meta-llama/Llama-2-13b-hf"
    ),
    "fineweb_edu_llama3": ShippedSet(
        "data/fineweb_edu_llama3", _FINEWEB, "meta-llama/Meta-Llama-3-8B"
    ),
    "fineweb_edu_mixtral": ShippedSet(
        "data/fineweb_edu_mixtral", _FINEWEB, "mistralai/Mixtral-8x7B-v0.1"
    ),
    "fineweb_edu_qwen3": ShippedSet("data/fineweb_edu_qwen3", _FINEWEB, "Qwen/Qwen3-0.6B"),
    "tinyshakespeare": ShippedSet(
        "data/tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/"
        "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        num_bytes=1_115_394,
    ),
    "cifar10": ShippedSet(
        "data/cifar-10-batches-bin",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        num_bytes=170_052_171,
    ),
}


def prepare_command(source: str) -> str:
    """Return the command that makes a missing source of a shipped config; "" for other sources."""
    names = [name for name, shipped in SHIPPED_SETS.items() if shipped.out == source]
    return f"jaxdist data prepare {names[0]}" if names else ""


_BYTES_PER_TOKEN = 4.5  # of English text, with vocabularies of 32,000 to 150,000
_TEXT_PER_BYTE = 1.7  # of compressed files
_TRIAL_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20


def prepare(words: Sequence[str], tokenize: Callable[[list[str]], object]) -> None:
    """Download a data set, and tokenize it if it has a tokenizer, unless the result exists.

    `words` are the arguments: the name of a data set or of a shipped config. `tokenize` is the
    command that writes a token folder.
    """
    name, shipped = _find(words)
    out = Path(shipped.out)
    if out.exists():
        print(f"{out} exists already\n{_next_line(shipped)}")
        return
    if shipped.tokenizer:
        files, tokenizer = find_files(shipped.source), load_tokenizer(shipped.tokenizer)
        print(f"{name}: {_estimate(files, tokenizer)}", file=sys.stderr)
        tokenize([shipped.source, "--out", shipped.out, "--tokenizer", shipped.tokenizer])
    else:
        print(f"{name}: {in_bytes(shipped.num_bytes)} from {shipped.source}", file=sys.stderr)
        out.parent.mkdir(parents=True, exist_ok=True)
        _make_from_file(shipped, out)
    print(_next_line(shipped))


def _find(words: Sequence[str]) -> tuple[str, ShippedSet]:
    """Return name and data set for the name of a data set, or of a config that uses it."""
    choices = f"Use one of {', '.join(SHIPPED_SETS)}, or the name of a shipped config."
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"jaxdist data prepare takes one name. {choices}")
    name = words[0]
    if name in SHIPPED_SETS:
        return name, SHIPPED_SETS[name]
    file = NAMED_FILES / f"{name}.toml"
    if Path(name).name != name or not file.exists():
        raise ConfigError(f"jaxdist data prepare {name!r}: no such data set. {choices}")
    sources = tomllib.loads(file.read_text()).get("data", {}).get("sources", [])
    for each, shipped in SHIPPED_SETS.items():
        if [shipped.out] == sources:
            return each, shipped
    what = f"reads {sources[0]!r}" if sources else "trains on data of your own: set data.sources"
    raise ConfigError(f"jaxdist data prepare {name}: the config {what}, so nothing is downloaded.")


def _next_line(shipped: ShippedSet) -> str:
    files = sorted(NAMED_FILES.glob("*.toml"))
    names = [file.stem for file in files if f'"{shipped.out}"' in file.read_text()]
    return f"configs with these data: {', '.join(names)}"


def _estimate(files: Sequence[DataFile], tokenizer: Tokenizer) -> str:
    """Return one line with the sizes of files and tokens and, by a short trial, the time."""
    text = "".join(path.read_text("utf-8", "replace") for path in library_files()[:100])
    pieces = [text[at : at + 8192] for at in range(0, min(len(text), _TRIAL_BYTES), 8192)]
    begun = time.monotonic()
    tokenizer.encode_batch(pieces)
    rate = sum(map(len, pieces)) / (time.monotonic() - begun)
    is_packed = [not file.name.endswith((".txt", ".jsonl")) for file in files]
    stored = total_bytes(files)
    packed = total_bytes(file for file, is_one in zip(files, is_packed, strict=True) if is_one)
    num_bytes = stored + (_TEXT_PER_BYTE - 1) * packed
    width = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    tokens = in_bytes(num_bytes / _BYTES_PER_TOKEN * width)
    return (
        f"{len(files)} files, {in_bytes(stored)} to download, about {tokens} of tokens; about "
        f"{duration(num_bytes / rate)} of tokenizing on {os.cpu_count()} cores, if the download is "
        "not slower"
    )


def _make_from_file(shipped: ShippedSet, out: Path) -> None:
    part = out.with_name(f".{out.name}.download")
    try:
        _download(shipped, part)
    except (OSError, urllib.error.URLError) as error:
        raise ConfigError(
            f"{shipped.source} cannot be downloaded ({error}). Start the command again to "
            f"continue, or copy the data to {out}."
        ) from None
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != shipped.sha256:
        part.unlink()
        raise ConfigError(
            f"{shipped.source} has SHA-256 {digest} instead of {shipped.sha256}: it was changed or "
            f"damaged. Start the command again, or copy the data to {out}."
        )
    if not shipped.source.endswith(".tar.gz"):
        part.rename(out)
        return
    with new_output(out) as partial, tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with tarfile.open(part) as archive:
            archive.extractall(folder, filter="data")
        (Path(folder) / out.name).rename(partial)
    part.unlink()


def _download(shipped: ShippedSet, part: Path) -> None:
    """Download the file of a data set to `part`; continue an incomplete file at its end."""
    start = part.stat().st_size if part.exists() else 0
    if start >= shipped.num_bytes:
        return
    headers = {"User-Agent": "jaxdist", **({"Range": f"bytes={start}-"} if start else {})}
    request = urllib.request.Request(shipped.source, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        is_rest = answer.status == 206
        with (
            part.open("ab" if is_rest else "wb") as file,
            Progress("downloading", shipped.num_bytes, "B") as progress,
        ):
            progress.skip(start if is_rest else 0)
            while block := answer.read(_BLOCK_BYTES):
                file.write(block)
                progress.advance(len(block))
    if part.stat().st_size < shipped.num_bytes:
        raise OSError("the server closed the connection early")
