"""Convert text to token numbers and back: raw bytes, or any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxdist.data.files import read_errors
from jaxdist.runtime import hub
from jaxdist.runtime.storage import Location, locate
from jaxdist.runtime.storage.location import panics_as
from jaxdist.settings import ConfigError

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Usual end-of-text tokens, for tokenizers whose files do not define one."""

BYTE_VALUES, CODE_VOCAB_SIZE = 256, 1024
"""Vocabulary sizes of the tokenizers `bytes` and `code`."""

BUILT_IN = {"code": locate(__file__).parent / "code_tokenizer" / "tokenizer.json"}
"""Bundled tokenizers. `code`: a BPE of 1,024 tokens of Python 3.11's standard library."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
"""Files of a tokenizer, which are copied with it if they exist."""

OLD_TEXT_FORMAT, TEXT_FORMAT = 1, 2
"""Rules of `data.text_format` for tokenization: the old rule, and that of the tokenizer's files."""


class ByteTokenizer:
    """Each UTF-8 byte is a token; byte 0, which text does not use, ends a document.

    Attributes:
        name: "bytes", "code" or the file's path.
        eos_token: the end token that the user set; "" = the tokenizer's own.
        end_id: token after each document, or None.
        bos_id, pad_id: start and padding token, or None; for exported models and tasks.
        stop_ids: tokens that end generation.
        begin_ids: tokens that the post-processor puts before a text; () for text_format 1.
        marks_start: whether a piece gets a leading space (sentencepiece); False for text_format 1.
        fingerprint: digest of the tokenizer's file and end token, without `text_format`.
        token_bytes: number of UTF-8 bytes per token, 0 for special ones; float32 [vocab_size].
    """

    name = "bytes"
    eos_token = ""
    vocab_size = BYTE_VALUES
    end_id: int | None = 0
    bos_id: int | None = None
    pad_id: int | None = None
    begin_ids: tuple[int, ...] = ()
    text_format = OLD_TEXT_FORMAT
    marks_start = False
    stop_ids = frozenset({0})
    fingerprint = "bytes-end0"
    token_bytes = np.ones(BYTE_VALUES, np.float32)
    token_bytes[0] = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, uint8 [n], without an end token."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text: one array [n] per text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int], *, show_special: bool = False) -> str:
        """Return the text; invalid UTF-8 is U+FFFD. With `show_special` the end token is U+2400."""
        text = bytes(t for t in map(int, tokens) if t < 256).decode("utf-8", "replace")
        return text.replace("\0", "\u2400" if show_special else "")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`; uses only the start tokens of its post-processor.

    The end token comes from the files next to it: `tokenizer_config.json` (and, without a list of
    added tokens there, `special_tokens_map.json`), then `generation_config.json` or `config.json`,
    else from `END_TOKENS`. Generation stops at each end token that these files name. `files`: name
    -> content of the file and those next to it.
    """

    def __init__(
        self, path: str | os.PathLike[str], eos_token: str = "", text_format: int = TEXT_FORMAT
    ):
        """Read the file at `path` and those next to it; `eos_token` replaces its end token."""
        import tokenizers

        path = locate(path)
        try:
            content = path.read()
        except OSError as error:
            raise ConfigError(
                f"tokenizer {str(path)!r} cannot be read: {error.strerror}. Check the path "
                "(of a run in its config.toml)."
            ) from None
        problem = (
            f"tokenizer {str(path)!r} is not a tokenizer.json of the tokenizers library ({{}}). "
            "Use the file named tokenizer.json of a model."
        )
        with panics_as(problem, Exception):  # the library raises Exception for a broken file
            self._inner: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            # A stored truncation or padding would silently drop or add tokens of long documents.
            self._inner.no_truncation()
            self._inner.no_padding()
            encoded = self._inner.encode("a")
        vocab = self._inner.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError(f"tokenizer {str(path)!r} has no tokens. Use the one of a model.")
        if eos_token and eos_token not in vocab:
            usual = [name for name in END_TOKENS if name in vocab] or "none of the usual ones"
            raise ConfigError(
                f"data.eos_token={eos_token!r} is not a token of {str(path)!r} (it has: "
                f"{usual}). Use one of its tokens, or leave eos_token empty."
            )
        self.files = {**tokenizer_files(path.parent), "tokenizer.json": content}
        self.settings = _table(self.files, "tokenizer_config.json", path)
        generation = _table(self.files, "generation_config.json", path)
        self.text_format = text_format
        # Like transformers, read this older file unless the settings list all added tokens.
        if text_format != OLD_TEXT_FORMAT and "added_tokens_decoder" not in self.settings:
            self.settings |= _table(self.files, "special_tokens_map.json", path)
        named = token_texts(self.settings)
        stated = [id for id in _ids(generation, "eos_token_id") if id <= max(vocab.values())]
        texts = [eos_token] if eos_token else [named.get("eos_token", "")]
        ends = [vocab[text] for text in texts if text in vocab] + stated
        ends = ends or [vocab[text] for text in END_TOKENS if text in vocab][:1]
        begins = [vocab[t] for k, t in named.items() if k == "bos_token" and t in vocab]
        self.name = str(path)
        self.eos_token = eos_token
        self.vocab_size = max(vocab.values()) + 1
        added = self._inner.get_added_tokens_decoder()
        self._special = np.array([id for id, token in added.items() if token.special], np.uint32)
        self.end_id = next(iter(ends), None)
        self.stop_ids = frozenset(ends)
        self.bos_id = next(iter([*begins, *_ids(generation, "bos_token_id")]), None)
        self.pad_id = vocab.get(named.get("pad_token", ""))
        is_added = encoded.special_tokens_mask
        start = is_added.index(0) if 0 in is_added else 0
        self.begin_ids = tuple(encoded.ids[:start]) if text_format != OLD_TEXT_FORMAT else ()
        one, two = self.encode("a"), self.encode("aa")
        is_changed = self.decode([*one, *one]) != self.decode(two)
        self.marks_start = text_format != OLD_TEXT_FORMAT and is_changed
        digest = hashlib.sha256(content).hexdigest()[:16]
        self.fingerprint = f"file-{digest}-end{self.end_id}"

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, uint32 [n], without an end token."""
        with self._text_errors():
            return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text, on all cores: one array [n] per text."""
        with self._text_errors():
            encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.uint32) for e in encoded]

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens uint32 [n], their character ranges [n, 2], and bool [n]: 1 = special."""
        with self._text_errors():
            encoded = self._inner.encode(text, add_special_tokens=False)
        tokens = np.asarray(encoded.ids, np.uint32)
        offsets = np.asarray(encoded.offsets, np.int64).reshape(-1, 2)
        return tokens, offsets, np.isin(tokens, self._special)

    def decode(self, tokens: Iterable[int], *, show_special: bool = False) -> str:
        """Return the text of tokens; special ones only with `show_special`."""
        with self._text_errors():
            ids = [int(t) for t in tokens]
            return self._inner.decode(ids, skip_special_tokens=not show_special)

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """Number of UTF-8 bytes of each token, 0 for special ones; float32 [vocab_size]."""
        steps = json.loads(self.files["tokenizer.json"])
        steps = [steps.get("decoder") or {}, steps.get("pre_tokenizer") or {}]
        is_byte_level = '"ByteLevel"' in json.dumps(steps)  # a character of a token is a byte
        added = self._inner.get_added_tokens_decoder()
        counts = np.zeros(self.vocab_size, np.float32)
        for text, id in self._inner.get_vocab(with_added_tokens=True).items():
            if is_byte_level and id not in added:
                counts[id] = len(text)
            elif re.fullmatch("<0x[0-9A-F]{2}>", text):
                counts[id] = 1
            else:
                counts[id] = len(text.replace("\u2581", " ").encode())
        counts[self._special] = 0
        return counts

    def _text_errors(self) -> contextlib.AbstractContextManager[None]:
        return panics_as(
            f"tokenizer {self.name!r} fails on a text ({{}}). Check the patterns of its "
            "tokenizer.json, or remove the text."
        )


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def begin_text(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Prepend the tokens that begin each text to tokens, unsigned [n]; never twice."""
    begin = tokenizer.begin_ids
    if not begin or tuple(tokens[: len(begin)].tolist()) == begin:
        return tokens
    return np.concatenate([np.array(begin, np.uint32), tokens])


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[np.ndarray]:
    """Encode pieces of one text; without `text_format` 1, together they decode to the text.

    If the tokenizer marks the start of a text, a later piece is encoded after the previous piece or
    a character that shares no token with it. Returns tokens of each piece, unsigned [length].
    """
    encoded = tokenizer.encode_batch(pieces)
    for number in range(1, len(pieces) if tokenizer.marks_start else 0):
        if before := pieces[number - 1]:
            encoded[number] = encode_after(tokenizer, (before, "\n", "."), pieces[number])
    return encoded


def encode_after(tokenizer: Tokenizer, before: Sequence[str], text: str) -> np.ndarray:
    """Return the tokens of `text` [length] after the first of `before` that shares none with it.

    If all share a token with it, `text` is encoded alone.
    """
    for start in before:
        first, both = tokenizer.encode_batch([start, start + text])
        if len(first) and np.array_equal(both[: len(first)], first):
            return both[len(first) :]
    return tokenizer.encode(text)


def load_tokenizer(name: str, eos_token: str = "", text_format: int = TEXT_FORMAT) -> Tokenizer:
    """Return the tokenizer of this name: `data.tokenizer` with `auto` resolved.

    With `text_format` 1 no token begins a text, and pieces are encoded separately.
    """
    if name != "bytes":
        text_format = min(text_format, TEXT_FORMAT)
        tokenizer = FileTokenizer(tokenizer_file(name), eos_token, text_format)
        tokenizer.name = name if name in BUILT_IN else tokenizer.name
        return tokenizer
    if eos_token:
        raise ConfigError(
            f'data.eos_token={eos_token!r} with tokenizer "bytes", which ends documents with '
            "byte 0. Leave eos_token empty."
        )
    return ByteTokenizer()


def tokenizer_file(name: str) -> Location:
    """Return the tokenizer.json of `data.tokenizer`; downloads it for a hub name."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not hub.is_hub_name(name):
        return locate(name)
    file = locate(hub.fetch(name, (*TOKENIZER_FILES, "config.json")) / "tokenizer.json")
    if not file.exists():
        raise ConfigError(
            f"the model {name!r} on the Hugging Face hub has no tokenizer.json. Make one with "
            "transformers (use_fast=True, save_pretrained), or use another model's."
        )
    return file


def tokenizer_files(folder: Location) -> dict[str, bytes]:
    """Return name -> content of the tokenizer's files in a folder.

    Without a `generation_config.json`, it is made of the token ids in `config.json`.
    """
    entries = folder.entries()

    def read(name: str) -> bytes:
        with read_errors(str(folder / name)):
            return (folder / name).read()

    files = {name: read(name) for name in TOKENIZER_FILES if name in entries}
    if "generation_config.json" not in files and "config.json" in entries:
        config = _table({"config.json": read("config.json")}, "config.json", folder)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if _ids(config, key)}
        if ids:
            files["generation_config.json"] = json.dumps(ids).encode()
    return files


def token_texts(settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of `bos_token`, `eos_token` ... in a `tokenizer_config.json`."""
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str) and text}


def _table(files: dict[str, bytes], name: str, path: Location) -> dict[str, Any]:
    try:
        table = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            [f"{name} of {str(path)!r} is not JSON ({error}). Copy it again."]
        ) from None
    return table if isinstance(table, dict) else {}


def _ids(table: dict[str, Any], key: str) -> list[int]:
    value = table.get(key)
    return [
        id for id in (value if isinstance(value, list) else [value]) if type(id) is int and id >= 0
    ]


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | os.PathLike[str]) -> None:
    """Learn a byte-level BPE of up to `vocab_size` tokens and write it as a `tokenizer.json`.

    Token 0 is `<|endoftext|>`; the 256 bytes follow, so every text can be encoded.

    References:
        Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units",
        2016; over bytes as in Radford et al., "Language Models are Unsupervised Multitask
        Learners", 2019, section 2.2.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise ConfigError(
            f"--train-bpe {vocab_size}: a byte-level BPE has 256 bytes and the end token. "
            "Use at least 257, e.g. 8192."
        )
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.save(str(path))
