"""Tokenize a corpus into memory-mapped shards: `python -m jaxdist.data SRC … --out DIR`."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist.data.chat import RecordKind
from jaxdist.data.corpus import Corpus, total_bytes, write_corpus
from jaxdist.data.documents import read_pieces
from jaxdist.data.encoding import make_encoder
from jaxdist.data.files import DataFile, find_files
from jaxdist.data.prepare import prepare
from jaxdist.data.tokenizer import TOKENIZER_FILES, load_tokenizer, train_bpe
from jaxdist.runtime import run_command
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.formatting.numbers import in_bytes, percent
from jaxdist.runtime.progress import Progress
from jaxdist.runtime.storage import Location, is_url, locate, read_url
from jaxdist.settings import ConfigError, read_settings, setting

SUMMARY = """\
Tokenize text once into memory-mapped shards that training reads at random.

    python -m jaxdist.data book.txt --out tokens
    python -m jaxdist.data 'crawl/*.jsonl.zst' --out tokens --tokenizer gpt2/tokenizer.json
    python -m jaxdist.data stdlib --out tokens --train-bpe 8192
    python -m jaxdist.data chats.jsonl --out tokens --records chat --tokenizer qwen3/tokenizer.json
    python -m jaxdist.data hf://HuggingFaceFW/fineweb-edu/sample-10BT --out tokens
    python -m jaxdist.data 's3://bucket/crawl/*.parquet' --out s3://bucket/tokens

The data of a shipped config, downloaded and tokenized:

    python -m jaxdist.data prepare gpt2_124m

The rows behind a loss spike of a run (`spike --help`):

    jaxdist data spike runs/NAME 1200

Then train on it:

    python -m jaxdist.train --data.sources tokens

A local folder appears complete or not at all. After an interruption start the same command again:
it continues after complete parts of 64 MiB or more (from the beginning if DIR is a URL)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Settings of the command: sources, tokenizer and output folder."""

    sources: list[str] = setting(
        [],
        'text files, folders, globs, .jsonl[.gz|.zst], .parquet, .tar, as paths or URLs, "stdlib", '
        "or hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT] on the Hugging Face hub",
        required=True,
    )
    out: str = setting("", "path or URL of the new folder; it must not exist", required=True)
    tokenizer: str = setting(
        "bytes",
        'a tokenizer.json, ORG/NAME[@REVISION] on the Hugging Face hub, "bytes" (256 tokens) or '
        '"code" (1,024 tokens, learned from Python)',
    )
    train_bpe: int = setting(
        0,
        "first learn a byte-level BPE with this many tokens on the sources, and store it as "
        "tokenizer.json in the folder; 0 = no",
        ge=0,
    )
    bpe_mb: float = setting(
        200.0, "largest part of the files to learn the BPE on, in MB as stored", gt=0
    )
    text_field: str = setting(
        "text", "field of a JSON line, or column of a Parquet file, that holds the text"
    )
    records: RecordKind = setting(
        "text",
        'content of a JSON line or Parquet row: a text, a conversation {"messages": [{"role", '
        '"content"}, ...]}, {"prompt", "completion"}, for preference {"prompt", "chosen", '
        '"rejected"}, labeled {"prompt", "completion", "label"} or text_label {"text", "label"}; '
        "except with text, only the answers are learned, with chat_last the last one, with "
        "chat_all every token",
    )
    chat_template: str = setting(
        "auto", "auto = the tokenizer's own, else plain; plain; or the path or URL of a Jinja file"
    )
    eos_token: str = setting(
        "", "token after each document; empty = the tokenizer's own end of text, if it has one"
    )

    def problems(self) -> list[str]:
        """Return the error of settings that exclude each other, if any."""
        if self.train_bpe and self.tokenizer != "bytes":
            return [
                f"--train-bpe makes a tokenizer, but --tokenizer is {self.tokenizer}. Remove one."
            ]
        if self.train_bpe and self.records != "text":
            return [
                f"--train-bpe needs text, not --records {self.records}. Learn it on text "
                "first, then set --tokenizer to DIR/tokenizer.json."
            ]
        return []


_UPLOADED_TOKENS = 1 << 24
"""Tokens per shard on an object store: shards are uploaded from memory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Make a folder of tokens, or the data of a shipped config (`prepare NAME`); return 0."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["prove"]:
        raise ConfigError(
            "`data prove` was removed. `python -m jaxdist.train --replay RUN:STEP` lists the rows "
            "of a step."
        )
    if argv[:1] == ["prepare"]:
        prepare(argv[1:], main)
        return 0
    if argv[:1] == ["spike"]:
        raise ConfigError("`spike` reads a run. Use `jaxdist data spike` or `-m jaxdist.spike`.")
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # like Ctrl-C: removes partial output
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = read_settings(
        PrepareConfig,
        argv,
        command="jaxdist.data",
        summary=SUMMARY,
        positional=("sources",),
        read_url=read_url,
    )
    try:
        _prepare(config, locate(config.out))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        fix = "" if is_url(config.out) else " Name another folder with --out."
        raise ConfigError(
            f"--out {config.out} cannot be written: {error.strerror or error}.{fix}"
        ) from error
    return 0


def _prepare(config: PrepareConfig, out: Location) -> None:
    if out.exists() and not _is_cut_upload(out):
        raise ConfigError(f"--out {out} exists: a corpus is never overwritten. Choose another.")
    files = [path for source in config.sources for path in find_files(source)]
    size = total_bytes(files)
    print(f"{len(files)} files, {in_bytes(size)}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = config.tokenizer
        if config.train_bpe:
            tokenizer = str(Path(folder) / "tokenizer.json")
            _learn(files, config, tokenizer)
        encoder = make_encoder(
            load_tokenizer(tokenizer, config.eos_token),
            records=config.records,
            text_field=config.text_field,
            chat_template=config.chat_template,
        )
        if out.is_local:
            write_corpus(files, Path(out), encoder, sources=config.sources)
        else:
            made = Path(folder) / "tokens"
            write_corpus(
                files, made, encoder, shard_tokens=_UPLOADED_TOKENS, sources=config.sources
            )
            _upload(made, out)
    corpus = Corpus(out)
    source = f'["{out}"]' if "," in str(out) else str(out)  # commas separate sources
    print(
        f"{out}: {corpus.num_tokens:,} tokens in {corpus.num_documents:,} documents, vocabulary "
        f"{corpus.tokenizer.vocab_size:,}, {size / corpus.num_tokens:.2f} stored bytes per token\n"
        f"next: {shell_python()} -m jaxdist.train --data.sources={shlex.quote(source)}"
    )


def _upload(made: Path, folder: Location) -> None:
    if _is_cut_upload(folder):
        folder.delete_tree()
    names = sorted(path.name for path in made.iterdir() if path.name != "corpus.json")
    with Progress("uploading", total_bytes(made.iterdir()), "B") as progress:
        for name in [*names, "corpus.json"]:
            content = (made / name).read_bytes()
            (folder / name).write(content)
            progress.advance(len(content))


def _is_cut_upload(folder: Location) -> bool:
    names = {} if folder.is_local else folder.sizes()
    is_part = re.compile(r"(tokens|weights)-\d{5}\.bin|documents\.bin").fullmatch
    rest = {name for name in names if not is_part(name)}
    return len(rest) < len(names) and rest <= {*TOKENIZER_FILES}


def _learn(files: list[DataFile], config: PrepareConfig, path: str) -> None:
    started, vocab_size = time.monotonic(), config.train_bpe
    share = min(1.0, config.bpe_mb * 1e6 / max(1, total_bytes(files)))
    print(
        f"learning a BPE of {vocab_size} tokens on {percent(share, 0)} of the text", file=sys.stderr
    )
    train_bpe(_sample(files, share, config.text_field), vocab_size, path)
    size = load_tokenizer(path).vocab_size
    if size < vocab_size:
        raise ConfigError(
            f"--train-bpe {vocab_size}: the text yields only {size} tokens. Use --train-bpe "
            f"{size} or less, or more text."
        )
    print(f"learned in {time.monotonic() - started:.0f} s", file=sys.stderr)


def _sample(files: list[DataFile], share: float, text_field: str) -> Iterator[str]:
    due = 0.0
    for piece in itertools.chain.from_iterable(read_pieces(path, text_field) for path in files):
        due += share
        if due >= 1:
            due -= 1
            yield from re.findall(r"[^\n]*\n|[^\n]+", piece.text)


if __name__ == "__main__":
    run_command(main)
