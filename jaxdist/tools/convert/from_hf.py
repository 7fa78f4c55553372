"""`convert from-hf DIR OUT`: import a Hugging Face model as a run directory.

DIR is a model directory, its URL, or ORG/NAME[@REVISION] on the hub.

The run directory can be evaluated, used for generation, and trained. Weights keep their dtype and
are copied in blocks of at most 16 MiB: memory use does not depend on the size of the model.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdist.checkpoint.blocks import Index, even_chunk, grid
from jaxdist.checkpoint.streaming_io import CheckpointWriter
from jaxdist.config import RunConfig
from jaxdist.data.tokenizer import tokenizer_files
from jaxdist.models import DecoderConfig, build
from jaxdist.models.huggingface.directory import Weights, folder_of, open_weights, read_json
from jaxdist.models.huggingface.families import left_out
from jaxdist.models.huggingface.tensors import Piece
from jaxdist.models.weights import num_params
from jaxdist.runtime import hub
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.storage import Location
from jaxdist.settings import setting, write_toml
from jaxdist.tools.convert.checkpoint_paths import making_run, new_run_directory

_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert from-hf`: source and destination."""

    src: str = setting(
        "",
        "directory or URL with config.json and *.safetensors, or ORG/NAME[@REVISION] on the "
        "Hugging Face hub",
        required=True,
    )
    out: str = setting("", "new run directory", required=True)


def run(config: Config) -> int:
    """Import a Hugging Face model as a run; print a summary and the next command; return 0."""
    out, is_hub = new_run_directory(config.out), hub.is_hub_name(config.src)
    name = hub.with_commit(config.src) if is_hub else config.src
    source = folder_of(name, weights=True)
    weights = open_weights(source)
    run_name = hub.short_name(name) if is_hub else source.absolute().name
    hf_config, model = read_json(source), weights.model
    tensors = weights.tensors.values()
    total = sum(tensor.dtype.itemsize * math.prod(tensor.shape) for tensor in tensors)
    with making_run(out):
        writer = CheckpointWriter(out / "checkpoints" / "0", total)
        for array, parts in weights.pieces.items():
            _write(writer, array, parts, weights)
        settings = settings_of(run_name, model, source, out)
        writer.finish({"mesh": "", "config": settings, "source": name if is_hub else str(source)})
        (out / "config.toml").write(settings)
    count = num_params(build(model, seq_len=1))
    files = tokenizer_files(source)
    tokenizer_config = files.get("tokenizer_config.json", b"")
    has_template = "chat_template.jinja" in files or b'"chat_template"' in tokenizer_config
    prompt = "--chat" if has_template else "--prompt Once"
    lines = left_out(hf_config)
    if "tokenizer.json" not in files:
        lines.append(f"{source} has no tokenizer.json. Copy the model's to {out / 'tokenizer'}.")
    remarks = "".join(f"{line}\n" for line in lines)
    print(
        f"{hf_config['model_type']}, {count:,} parameters, {in_bytes(writer.num_bytes)}: "
        f"{out}\n{remarks}next: {shell_python()} -m jaxdist.generate {shlex.quote(str(out))} "
        f"{prompt}"
    )
    return 0


def _write(writer: CheckpointWriter, name: str, parts: list[Piece], weights: Weights) -> None:
    piece = parts[0]
    dtype = weights.dtype(parts)
    stacked = piece.layer is not None
    shape = (len(parts), *piece.shape) if stacked else piece.shape
    entry = {"shape": list(shape), "dtype": dtype.name, "path": name.split("/")[1:]}
    chunk = _chunk(piece, dtype.itemsize)

    def blocks() -> Iterator[tuple[Index, np.ndarray]]:
        """Yield (index in the array, values [shape of the index]) of each block."""
        for part in parts:
            for index in grid(part.shape, chunk):
                values = part.read(index, weights.fetch, dtype)
                if part.layer is None:
                    yield index, values
                else:
                    yield (slice(part.layer, part.layer + 1), *index), values[None]

    writer.write(name, entry, (1, *chunk) if stacked else chunk, blocks())


def _chunk(piece: Piece, itemsize: int) -> tuple[int, ...]:
    order = piece.stored_order
    cut = even_chunk(tuple(piece.shape[dim] for dim in order), itemsize, _CHUNK_BYTES)
    return tuple(cut[order.index(dim)] for dim in range(len(piece.shape)))


def settings_of(
    name: str, model: DecoderConfig, source: Location, out: Location, **settings: Any
) -> str:
    """Copy the tokenizer into the run and return the text of its config.toml.

    The text names the copy even if the model has no tokenizer, because no other tokenizer fits.
    """
    run = RunConfig(name=name, model=model, **settings)
    files = tokenizer_files(source)
    if files:
        (out / "tokenizer").make_directory()
    for name, content in files.items():
        (out / "tokenizer" / name).write(content)
    path = str(out / "tokenizer" / "tokenizer.json")
    return write_toml(dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=path)))
