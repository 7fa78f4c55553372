"""Open a Hugging Face model directory: model settings, and tensors checked against them."""

from __future__ import annotations

import dataclasses
import logging
import os
from functools import reduce
from typing import Any

import numpy as np

from jaxdist.data.tokenizer import TOKENIZER_FILES
from jaxdist.models.adapters import SCORE
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.families import decoder_of, family_of, read_config
from jaxdist.models.huggingface.mxfp4 import with_unpacked
from jaxdist.models.huggingface.peft import rename_problems
from jaxdist.models.huggingface.tensors import Index, Piece, Source, pieces
from jaxdist.runtime import hub
from jaxdist.runtime.storage import Location, is_url, locate, url_problem
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

HEAD = "lm_head.weight"
"""Name of the tensor of an untied output head."""

_COMPARED_ROWS = 4096  # rows of two tables compared at a time
_CONSTANTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # constants, not weights


def is_model(path: str | os.PathLike[str]) -> bool:
    """Return whether a path, URL or hub name is a Hugging Face model, not a run of ours."""
    if hub.is_hub_name(path):
        return True
    if url_problem(path):  # opening it reports the error
        return False
    folder = locate(path)
    return (folder / "config.json").exists() and not (folder / "config.toml").exists()


def adapter_problems(run: Any, base: str) -> list[str]:
    """Return why PEFT cannot use the adapters of `run`, a `RunConfig`, with `base` if not ""."""
    if not run.lora.rank:
        return []
    problems, merge = rename_problems(run.model, run.lora), "Use convert merge, then to-hf."
    if base and (new := [n for n in run.reinit_params if n.removeprefix("params/") != SCORE]):
        problems.append(f"{base} lacks the run's own {', '.join(new)} (reinit_params). {merge}")
    if base and is_model(base) and read_json(folder_of(base))["model_type"] == "phi3":
        problems.append(f"{base} fuses modules that have adapters of their own here. {merge}")
    return problems


def export_problems(run: Any) -> list[str]:
    """Return error messages if a run with these settings, a `RunConfig`, cannot be exported."""
    if run.checkpoint.export == "none":
        return []
    try:
        family_of(decoder_of(run.model, "the run"))
        problems = adapter_problems(run, run.init_from)
    except ConfigError as error:
        problems = list(error.problems)
    if is_url(run.named_directory):
        problems.append("safetensors are written to a local disk, and run_dir is a URL.")
    if run.lora.rank and not (run.init_from and is_model(run.init_from)):
        problems.append(f"adapters need a Hugging Face model in init_from, not {run.init_from!r}.")
    return [f"checkpoint.export=hf: {problem} Use export=none." for problem in problems]


def folder_of(path: str | os.PathLike[str], *, weights: bool = False) -> Location:
    """Return a model's directory; download a hub name: config, tokenizer and, if set, `weights`."""
    if not hub.is_hub_name(path):
        return locate(path)
    name = os.fspath(path)
    folder = locate(hub.fetch(name, ("config.json", safetensors.INDEX, *TOKENIZER_FILES)))
    if weights:
        hub.fetch(name, (safetensors.SINGLE,))
        if not (folder / safetensors.SINGLE).exists():  # sharded, or a single file of another name
            hub.fetch(name, tuple(safetensors.indexed_files(folder)) or ("*.safetensors",))
    return folder


def read_json(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the directory's `config.json`."""
    try:
        return (locate(folder) / "config.json").json()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{folder}/config.json cannot be read ({error}). Use a Hugging Face model directory."
        ) from error


def read_model(folder: str | os.PathLike[str]) -> DecoderConfig:
    """Return a directory's model settings; a tied head is untied if readable weights differ."""
    hf = read_json(folder)
    model = read_config(hf)
    try:
        return _resolve_head(model, hf["model_type"], safetensors.open_all(folder))[0]
    except ConfigError:  # weights missing or damaged: loading them reports the error
        return model


@dataclasses.dataclass(frozen=True)
class Weights:
    """The tensors of a directory, and the parts of each of our arrays, one per layer if stacked."""

    model: DecoderConfig
    pieces: dict[str, list[Piece]]
    tensors: dict[str, safetensors.StoredTensor]

    def dtype(self, parts: list[Piece]) -> np.dtype:
        """Return the stored dtype of parts, or one that holds their tensors exactly."""
        own = {self.tensors[name].dtype for piece in parts for name in piece.tensor_names}
        return own.pop() if len(own) == 1 else reduce(np.promote_types, own, np.dtype("float32"))

    def fetch(self, source: Source, index: Index) -> np.ndarray:
        """Read a block of a tensor's view, [*lengths of `index`] in the stored dtype."""
        tensor = self.tensors[source.name].rows(source.first_row, source.num_rows)
        return tensor.reshape(source.view).read(index)


def open_weights(folder: str | os.PathLike[str]) -> Weights:
    """Return the model of a directory and its tensors; reads headers, and a tied head and table."""
    hf = read_json(folder)
    config = read_config(hf)
    stored = with_unpacked(safetensors.open_all(folder))
    model, tensors = _resolve_head(config, hf["model_type"], stored)
    if model != config:
        log.warning(
            "%s: by config.json the head is tied, but %s differs from the embedding table. "
            "Both are loaded, and the head is not tied.",
            folder,
            HEAD,
        )
    listed: dict[str, list[Piece]] = {}
    for piece in pieces(model, hf["model_type"]):
        listed.setdefault(piece.name, []).append(_with_stored_names(piece, tensors))
    _check_complete([piece for parts in listed.values() for piece in parts], tensors, model)
    return Weights(model, listed, tensors)


def _with_stored_names(piece: Piece, tensors: dict[str, safetensors.StoredTensor]) -> Piece:
    short = [name.partition(".")[2] for name in piece.tensor_names]
    if all(name in tensors for name in piece.tensor_names) or not all(n in tensors for n in short):
        return piece
    renamed = (
        dataclasses.replace(source, name=name)
        for source, name in zip(piece.sources, short, strict=True)
    )
    return dataclasses.replace(piece, sources=tuple(renamed))


def _resolve_head(
    model: DecoderConfig, family: str, tensors: dict[str, safetensors.StoredTensor]
) -> tuple[DecoderConfig, dict[str, safetensors.StoredTensor]]:
    """Return the model and its tensors; untie the model if the stored head differs from the table.

    If a tied model has a head but no table, the head becomes the table, as in transformers 5.
    """
    head = tensors.get(HEAD)
    if not model.tie_embeddings or head is None:
        return model, tensors
    name = _with_stored_names(next(pieces(model, family)), tensors).tensor_names[0]
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
        f"tensor {name} is not part of the model that config.json describes."
        for name in sorted(tensors.keys() - needed.keys() - tied)
        if not name.endswith(_CONSTANTS)
    ]
    if problems:
        raise ConfigError(problems[:20])
