"""A Hugging Face model directory: its sizes, and its tensors checked against them."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import numpy as np

from jaxdist.data.tokenizer import TOKENIZER_FILES
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.families import read_config
from jaxdist.models.huggingface.tensors import Index, Piece, Source, pieces
from jaxdist.runtime import hub
from jaxdist.runtime.storage import Location, locate, url_problem
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

HEAD = "lm_head.weight"
"""Tensor of an output head that is not the embedding table."""

_COMPARED_ROWS = 4096  # of two tables, at a time
_CONSTANTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # saved, but no weights


def is_model(path: str | os.PathLike[str]) -> bool:
    """Whether a path, URL or hub name is that of a Hugging Face model (and not a run of ours)."""
    if hub.is_hub_name(path):
        return True
    if url_problem(path):  # whoever uses it says so
        return False
    folder = locate(path)
    return (folder / "config.json").exists() and not (folder / "config.toml").exists()


def folder_of(path: str | os.PathLike[str], *, weights: bool = False) -> Location:
    """The directory of a model; of a hub name the files are fetched, weights only where asked.

    Raises:
        ConfigError: there is no such model on the hub, or it cannot be reached.
    """
    if not hub.is_hub_name(path):
        return locate(path)
    name = os.fspath(path)
    folder = locate(hub.fetch(name, ("config.json", safetensors.INDEX, *TOKENIZER_FILES)))
    if weights:
        hub.fetch(name, (safetensors.SINGLE,))
        if not (folder / safetensors.SINGLE).exists():  # shards, or another name and no index
            hub.fetch(name, tuple(safetensors.indexed_files(folder)) or ("*.safetensors",))
    return folder


def read_json(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The directory's `config.json`; raises `ConfigError` when it cannot be read."""
    try:
        return (locate(folder) / "config.json").json()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{folder}/config.json cannot be read ({error}). Name a Hugging Face model directory."
        ) from error


def read_model(folder: str | os.PathLike[str]) -> DecoderConfig:
    """Return the settings of a directory's model, as `open_weights` does if its weights are there.

    Raises:
        ConfigError: an unsupported model.
    """
    theirs = read_json(folder)
    model = read_config(theirs)
    try:
        return _resolve_head(model, theirs["model_type"], safetensors.open_all(folder))[0]
    except ConfigError:  # not fetched yet, or damaged: loading them reports it
        return model


@dataclasses.dataclass(frozen=True)
class Weights:
    """The tensors of a directory.

    Attributes:
        model: the sizes that its `config.json` gives.
        pieces: our array's name -> its parts, layer by layer.
        tensors: their name -> tensor, not read yet.
    """

    model: DecoderConfig
    pieces: dict[str, list[Piece]]
    tensors: dict[str, safetensors.StoredTensor]

    def dtype(self, piece: Piece) -> np.dtype:
        """What a part is stored in, or what holds all of it exactly."""
        return np.result_type(*(self.tensors[name].dtype for name in piece.theirs))

    def fetch(self, source: Source, index: Index) -> np.ndarray:
        """A block of a tensor's view, [*lengths of `index`] in the stored dtype, from its file."""
        tensor = self.tensors[source.name].rows(source.first_row, source.num_rows)
        return tensor.reshape(source.view).read(index)


def open_weights(folder: str | os.PathLike[str]) -> Weights:
    """Find every tensor that the model needs; reads headers only.

    Raises:
        ConfigError: an unsupported model; tensors that are missing, of another shape, or would be
            dropped; files that are cut short.
    """
    theirs = read_json(folder)
    config = read_config(theirs)
    model, tensors = _resolve_head(config, theirs["model_type"], safetensors.open_all(folder))
    if model != config:
        log.warning(
            "%s: config.json sets tie_word_embeddings, but %s differs from the embedding table. "
            "Both are loaded, and the head is not tied.",
            folder,
            HEAD,
        )
    listed: dict[str, list[Piece]] = {}
    for piece in pieces(model, theirs["model_type"]):
        listed.setdefault(piece.name, []).append(_found(piece, tensors))
    _check_complete([piece for parts in listed.values() for piece in parts], tensors, model)
    return Weights(model, listed, tensors)


def _found(piece: Piece, tensors: dict[str, safetensors.StoredTensor]) -> Piece:
    """The piece with the names that this checkpoint uses; base models leave the prefix out."""
    short = [name.partition(".")[2] for name in piece.theirs]
    if all(name in tensors for name in piece.theirs) or not all(n in tensors for n in short):
        return piece
    renamed = (
        dataclasses.replace(source, name=name)
        for source, name in zip(piece.sources, short, strict=True)
    )
    return dataclasses.replace(piece, sources=tuple(renamed))


def _resolve_head(
    model: DecoderConfig, family: str, tensors: dict[str, safetensors.StoredTensor]
) -> tuple[DecoderConfig, dict[str, safetensors.StoredTensor]]:
    """Decide whether the head of a tied model is tied, as transformers 5 does.

    Returns:
        The model, untied if the stored head differs from the embedding table, and the tensors. A
        tied head without a table is the table.
    """
    head = tensors.get(HEAD)
    if not model.tie_embeddings or head is None:
        return model, tensors
    name = _found(next(pieces(model, family)), tensors).theirs[0]
    if name not in tensors:
        return model, {**tensors, name: head}
    table = tensors[name]
    blocks = [(slice(at, at + _COMPARED_ROWS),) for at in range(0, head.shape[0], _COMPARED_ROWS)]
    is_equal = head.shape == table.shape and all(
        np.array_equal(head.read(block), table.read(block)) for block in blocks
    )
    return dataclasses.replace(model, tie_embeddings=is_equal), tensors


def _check_complete(
    listed: list[Piece], tensors: dict[str, safetensors.StoredTensor], model: DecoderConfig
) -> None:
    """Refuse missing tensors, tensors of other shapes, and tensors that would be dropped."""
    needed = {source.name: source.shape for piece in listed for source in piece.sources}
    fix = {HEAD: " If the embedding table is the head, set tie_word_embeddings in config.json."}
    problems = [
        f"tensor {name} is missing.{fix.get(name, '')}"
        for name in sorted(needed.keys() - tensors.keys())
    ]
    problems += [
        f"tensor {name} is {list(tensors[name].shape)}, and config.json describes {list(shape)}."
        for name, shape in sorted(needed.items())
        if name in tensors and tensors[name].shape != shape
    ]
    tied = {HEAD} if model.tie_embeddings else set()
    problems += [
        f"tensor {name} has no place in the model that config.json describes."
        for name in sorted(tensors.keys() - needed.keys() - tied)
        if not name.endswith(_CONSTANTS)
    ]
    if problems:
        raise ConfigError(problems[:20])
