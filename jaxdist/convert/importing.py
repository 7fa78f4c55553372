"""`convert from-hf DIR OUT`: a Hugging Face model as a run directory of ours.

The run directory can be evaluated and generated from at once, and trained from. Weights keep their
dtype and move layer by layer: memory holds one layer's largest product, or one embedding table.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxdist.checkpoint.arrays import CheckpointWriter, Index
from jaxdist.checkpoint.journal import size_text
from jaxdist.config import RunConfig, read_settings, write_toml
from jaxdist.convert import safetensors
from jaxdist.convert.families import Piece, pieces, read_config
from jaxdist.convert.places import new_directory
from jaxdist.models.configs import DecoderConfig
from jaxdist.types import ConfigError, setting

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
"""Copied beside the weights in both directions, those that there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromHfConfig:
    """Where the model is, and where it goes."""

    src: str = setting("", "directory with config.json and *.safetensors")
    out: str = setting("", "new run directory")

    def problems(self) -> list[str]:
        """Every violated rule."""
        if self.src and self.out:
            return []
        return ["a source and an output are needed: jaxdist convert from-hf DIR OUT."]


def main(argv: Sequence[str]) -> int:
    """Convert; prints what it made and what to run next."""
    config = read_settings(
        FromHfConfig,
        argv,
        command="jaxdist.convert from-hf",
        summary=__doc__ or "",
        positional=("src", "out"),
    )
    source, out = Path(config.src).expanduser(), new_directory(config.out)
    theirs = _config_json(source)
    model = read_config(theirs)
    tensors = safetensors.open_all(source)
    listed = [_found(piece, tensors) for piece in pieces(model, theirs["model_type"])]
    _check_complete(listed, tensors, model)
    (out / "checkpoints").mkdir(parents=True)
    writer = CheckpointWriter(out / "checkpoints" / "0")
    for name, group in itertools.groupby(listed, key=lambda piece: piece.name):
        _write(writer, name, list(group), tensors)
    settings = _settings(model, source, out)
    writer.finish({"mesh": "", "config": settings, "source": str(source)})
    (out / "config.toml").write_text(settings)
    print(
        f"{theirs['model_type']}, {model.num_params:,} parameters, {size_text(writer.num_bytes)}: "
        f"{out}\nnext: python -m jaxdist.generate {out} --prompt 'Once'"
    )
    return 0


def _config_json(source: Path) -> dict:
    try:
        return json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            [f"{source}/config.json cannot be read ({error}). Name a Hugging Face model directory."]
        ) from error


def _found(piece: Piece, tensors: dict[str, safetensors.StoredTensor]) -> Piece:
    """The piece with the names that this checkpoint uses; base models leave the prefix out."""
    if all(name in tensors for name in piece.theirs):
        return piece
    short = tuple(name.partition(".")[2] for name in piece.theirs)
    return dataclasses.replace(
        piece, theirs=short if all(n in tensors for n in short) else piece.theirs
    )


def _check_complete(
    listed: list[Piece], tensors: dict[str, safetensors.StoredTensor], model: DecoderConfig
) -> None:
    """Refuse missing tensors, and tensors that would be dropped."""
    needed = {name for piece in listed for name in piece.theirs}
    problems = [f"tensor {name} is missing." for name in sorted(needed - set(tensors))]
    ignored = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # constants, not weights
    tied = ("lm_head.weight",) if model.tie_embeddings else ()
    problems += [
        f"tensor {name} has no place in the model that config.json describes."
        for name in sorted(set(tensors) - needed)
        if not name.endswith((*ignored, *tied))
    ]
    if problems:
        raise ConfigError(problems[:20])


def _write(
    writer: CheckpointWriter,
    name: str,
    group: list[Piece],
    tensors: dict[str, safetensors.StoredTensor],
) -> None:
    """One array of ours, a layer at a time where layers are stacked."""
    first = _joined(group[0], tensors)
    stacked = group[0].layer is not None
    shape = (len(group), *first.shape) if stacked else first.shape
    entry = {"shape": list(shape), "dtype": first.dtype.name, "path": name.split("/")[1:]}

    def parts() -> Iterator[tuple[Index, np.ndarray]]:
        for piece in group:
            part = first if piece is group[0] else _joined(piece, tensors)
            index = tuple(slice(0, size) for size in part.shape)
            if piece.layer is not None:
                part, index = part[None], (slice(piece.layer, piece.layer + 1), *index)
            yield index, part

    writer.write(name, entry, (1, *first.shape) if stacked else first.shape, parts())


def _joined(piece: Piece, tensors: dict[str, safetensors.StoredTensor]) -> np.ndarray:
    return piece.join([tensors[name].read() for name in piece.theirs])


def _settings(model: DecoderConfig, source: Path, out: Path) -> str:
    """The run's config.toml; the tokenizer is copied, so that the run stands alone."""
    run = RunConfig(name=source.resolve().name, model=model)
    there = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if there:
        (out / "tokenizer").mkdir()
    for name in there:
        shutil.copyfile(source / name, out / "tokenizer" / name)
    if "tokenizer.json" in there:
        path = str((out / "tokenizer" / "tokenizer.json").absolute())
        data = dataclasses.replace(run.data, tokenizer=path, vocab_size=model.vocab_size)
        run = dataclasses.replace(run, data=data)
    return write_toml(run)
