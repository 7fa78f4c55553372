"""Text to token numbers and back: raw bytes, or any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxdist.core.types import ConfigError

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""How published tokenizers spell the end of a text; the first that exists is used."""


class ByteTokenizer:
    """Each UTF-8 byte is a token; byte 0, which text does not use, ends a document.

    Attributes:
        name: for logs: "bytes" or the file's path.
        eos_token: the end token that the user asked for; "" = the tokenizer's own.
        vocab_size: one more than the largest token number.
        end_id: token put after each document, or None.
        fingerprint: changes whenever the same text could become other tokens.
    """

    name = "bytes"
    eos_token = ""
    vocab_size = 256
    end_id: int | None = 0
    fingerprint = "bytes-end0"

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, uint8 [n], without an end token."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text: one array [n] per text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return bytes(t for t in (int(t) for t in tokens) if 0 < t < 256).decode("utf-8", "replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, used without its special-token template.

    It has the attributes of `ByteTokenizer`, and `json`, the file's bytes.
    """

    def __init__(self, path: str | Path, eos_token: str = ""):
        """Read the file.

        Raises:
            ConfigError: the file is missing or broken, or has no `eos_token`.
        """
        import tokenizers

        try:
            self.json = Path(path).read_bytes()
            self._inner: Any = tokenizers.Tokenizer.from_str(self.json.decode("utf-8"))
        except OSError as error:
            raise ConfigError(
                f"tokenizer {str(path)!r} cannot be read: {error.strerror}. Check the path."
            ) from None
        except Exception as error:  # the library raises bare Exception for a broken file
            raise ConfigError(
                f"tokenizer {str(path)!r} is not a tokenizer.json of the tokenizers library "
                f"({_first_line(error)}). Use the file named tokenizer.json of a model."
            ) from None
        # A stored truncation or padding would silently drop or add tokens of long documents.
        self._inner.no_truncation()
        self._inner.no_padding()
        vocab = self._inner.get_vocab(with_added_tokens=True)
        if eos_token and eos_token not in vocab:
            known = [name for name in END_TOKENS if name in vocab] or "none of the usual ones"
            raise ConfigError(
                f"data.eos_token={eos_token!r} is not a token of {str(path)!r} (it has: "
                f"{known}). Use one of its tokens, or leave eos_token empty."
            )
        candidates = [eos_token] if eos_token else END_TOKENS
        self.name = str(path)
        self.eos_token = eos_token
        self.vocab_size = max(vocab.values()) + 1
        added = self._inner.get_added_tokens_decoder()
        self._special = np.array([id for id, token in added.items() if token.special], np.uint32)
        self.end_id = next((vocab[name] for name in candidates if name in vocab), None)
        digest = hashlib.sha256(self.json).hexdigest()[:16]
        self.fingerprint = f"file-{digest}-end{self.end_id}"

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, uint32 [n], without an end token."""
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores: one array [n] per text."""
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.uint32) for e in encoded]

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens uint32 [n], the characters [start, stop) each stands for [n, 2], is it special."""
        encoded = self._inner.encode(text, add_special_tokens=False)
        tokens = np.asarray(encoded.ids, np.uint32)
        offsets = np.asarray(encoded.offsets, np.int64).reshape(-1, 2)
        return tokens, offsets, np.isin(tokens, self._special)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, special tokens left out."""
        return self._inner.decode([int(t) for t in tokens], skip_special_tokens=True)


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def load_tokenizer(name: str, eos_token: str = "") -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises:
        ConfigError: no such file, a broken one, or an `eos_token` it does not have.
    """
    if name != "bytes":
        return FileTokenizer(name, eos_token)
    if eos_token:
        raise ConfigError(
            f'data.eos_token={eos_token!r} with tokenizer "bytes", which ends documents with '
            "byte 0. Leave eos_token empty."
        )
    return ByteTokenizer()


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> None:
    """Learn a byte-level BPE of `vocab_size` tokens and write it as a `tokenizer.json`.

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
            f"--train-bpe {vocab_size}: a byte-level BPE holds 256 bytes and the end token. "
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
