"""`convert add-tokens DIR OUT --tokens '<|im_start|>,<|im_end|>'`: a model with new special tokens.

DIR and OUT are Hugging Face model directories; DIR may be ORG/NAME[@REVISION] on the hub. Rows of
the embedding table and the head without an old token become the mean of the rows of all old tokens
(in float64, rounded once). All other weights keep every bit. Train OUT with `--init-from OUT`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.data.tokenizer import FileTokenizer, tokenizer_files
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.directory import HEAD, folder_of, open_weights, read_json
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.new_output import new_output
from jaxdist.settings import ConfigError, setting
from jaxdist.tools.convert.checkpoint_paths import new_local_directory

_SLAB_ROWS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert add-tokens`: source, destination and tokens."""

    src: str = setting(
        "", "Hugging Face model directory, or ORG/NAME[@REVISION] on the hub", required=True
    )
    out: str = setting("", "new model directory", required=True)
    tokens: list[str] = setting(
        [], "new special tokens, which are never split; a token that exists keeps its row"
    )
    shard_gb: float = setting(5.0, "largest file of several tensors, GB; 0 = one file", ge=0)


def run(config: Config) -> int:
    """Write a Hugging Face model with new tokens; print their ids and next commands; return 0."""
    out = Path(new_local_directory(config.out))
    if not config.tokens or "" in config.tokens:
        raise ConfigError("--tokens is empty. Name the new tokens, e.g. '<|im_start|>,<|im_end|>'.")
    source = folder_of(config.src, weights=True)
    weights, hf_config, files = open_weights(source), read_json(source), tokenizer_files(source)
    if "tokenizer.json" not in files:
        raise ConfigError(f"{config.src} has no tokenizer.json, to which tokens could be added.")
    FileTokenizer(source / "tokenizer.json")  # rejects a damaged file
    new, used = _add(files, config.tokens)
    if not new:
        raise ConfigError(
            f"{config.src} has all of {', '.join(config.tokens)} already. Train it directly."
        )
    vocab_size = weights.model.vocab_size
    size = max(vocab_size, *(id + 1 for id in new.values()))
    old = np.zeros(vocab_size, bool)
    old[[id for id in used if id < vocab_size]] = True
    tables = (weights.pieces["params/embed/table"][0].tensor_names[0], HEAD)
    tensors = {
        name: _resized(tensor, old, size)
        if name in tables
        else safetensors.Tensor(tensor.shape, tensor.dtype, _slabs(tensor))
        for name, tensor in safetensors.open_all(source).items()
    }
    with new_output(out) as partial:
        partial.mkdir()
        for name, content in files.items():
            (partial / name).write_bytes(content)
        text = json.dumps({**hf_config, "vocab_size": size}, indent=2)
        (partial / "config.json").write_text(text + "\n")
        safetensors.write_shards(partial, tensors, config.shard_gb, {"format": "pt"})
    names = ", ".join(f"{token} = {id}" for token, id in new.items())
    ids = ",".join(map(str, new.values()))
    print(
        f"{names}; embedding table {vocab_size} -> {size} rows: {out}\n"
        f"next: {shell_python()} -m jaxdist.train --init-from {shlex.quote(str(out))} …\n"
        f"with adapters, also train their rows: --lora.token-ids {ids}"
    )
    return 0


def _add(files: dict[str, bytes], tokens: list[str]) -> tuple[dict[str, int], set[int]]:
    """Add special tokens to a tokenizer's `files`; return new token -> id, and all old ids."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
    before = inner.get_vocab(with_added_tokens=True)
    added = [text for text in dict.fromkeys(tokens) if text not in before]
    inner.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in added]
    )
    after = inner.get_vocab(with_added_tokens=True)
    ids = {text: after[text] for text in added}
    if shared := {*ids.values()} & {*before.values()}:
        raise ConfigError(f"the tokenizer has gaps in its ids, and would use {shared} twice.")
    files["tokenizer.json"] = inner.to_str(pretty=True).encode("utf-8")
    settings: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "added_tokens_decoder" in settings:  # of all added tokens, in files of transformers 4
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        settings["added_tokens_decoder"] |= {
            str(id): {"content": text, **flags, "special": True} for text, id in ids.items()
        }
        files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode("utf-8")
    return ids, {*before.values()}


def _slabs(tensor: safetensors.StoredTensor) -> Iterator[np.ndarray]:
    """Yield a tensor in parts [rows, ...] of at most `_SLAB_ROWS` rows."""
    if not tensor.shape:
        yield tensor.read()
        return
    for start in range(0, tensor.shape[0], _SLAB_ROWS):
        yield tensor.read((slice(start, min(start + _SLAB_ROWS, tensor.shape[0])),))


def _resized(tensor: safetensors.StoredTensor, old: np.ndarray, size: int) -> safetensors.Tensor:
    """Return a table [vocab, d_model] with `size` rows; all but the `old` ones are their mean."""

    def parts() -> Iterator[np.ndarray]:
        """Yield rows [rows, d_model] in the stored dtype."""
        total, start = np.zeros(tensor.shape[1], np.float64), 0
        for slab in _slabs(tensor):
            total += slab[old[start : start + len(slab)]].astype(np.float64).sum(0)
            start += len(slab)
        mean = (total / old.sum()).astype(tensor.dtype)
        start = 0
        for slab in _slabs(tensor):
            yield np.where(old[start : start + len(slab), None], slab, mean)
            start += len(slab)
        yield np.tile(mean, (size - start, 1))

    return safetensors.Tensor((size, math.prod(tensor.shape[1:])), tensor.dtype, parts())
