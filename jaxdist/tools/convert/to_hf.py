"""`convert to-hf RUN OUT`: write the weights of a run as a Hugging Face model directory.

`config.json`, safetensors (shards with an index if large), the tokenizer's files, if any, and a
`README.md` that shows how transformers opens it.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxdist import __version__
from jaxdist.checkpoint import manifest, pytree
from jaxdist.checkpoint.blocks import Index, dtype_of
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import RunConfig, settings_of_run
from jaxdist.data import DataConfig, load_tokenizer
from jaxdist.data.chat import load_template
from jaxdist.data.custom import is_custom
from jaxdist.data.tokenizer import FileTokenizer, tokenizer_file
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.families import decoder_of, family_of, write_config
from jaxdist.models.huggingface.tensors import Piece, Source, pieces
from jaxdist.runtime import hub
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.new_output import new_output
from jaxdist.settings import ConfigError, setting
from jaxdist.tools.convert.checkpoint_paths import Export, checkpoint_of, new_local_directory

_SLAB_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Export):
    """Settings of `convert to-hf`: weights and form of the output."""

    dtype: Literal["stored", "float32", "bfloat16", "float16"] = setting(
        "stored", "dtype of the weights; stored = that of the embedding table"
    )
    shard_gb: float = setting(5.0, "largest file of several tensors, GB; 0 = one file", ge=0)


def run(config: Config) -> int:
    """Write a run's weights as a Hugging Face model, upload it if requested; return 0."""
    hub.open_for_push(config.push)
    print(export(config))
    if config.push:
        print(f"pushed to {hub.push(config.push, config.out)}")
    return 0


def export(config: Config) -> str:
    """Write the Hugging Face model directory; return a summary line."""
    out = Path(new_local_directory(config.out))
    checkpoint = checkpoint_of(config.src, config.step)
    stored = StoredArrays(checkpoint)
    settings = settings_of_run(checkpoint.parent.parent, int(checkpoint.name))
    model = decoder_of(settings.model, config.src)
    if settings.lora.rank:
        raise ConfigError(
            f"{config.src} has adapters. Use to-peft to export them alone, or merge first: python "
            f"-m jaxdist.convert merge {config.src} OUT."
        )
    is_stored = config.dtype == "stored"
    dtype = dtype_of(stored.entries["params/embed/table"]["dtype"] if is_stored else config.dtype)
    item = pytree.weights_item(config.weights, stored.entries)
    tensors = _tensors(stored, model, dtype, item)
    with new_output(out) as partial:
        partial.mkdir()
        ids = write_tokenizer(settings.data, partial)
        metrics = manifest.read(checkpoint)["metrics"]
        card = model_card(settings, int(checkpoint.name), metrics, "transformers")
        (partial / "README.md").write_text(card)
        files = safetensors.write_shards(partial, tensors, config.shard_gb, {"format": "pt"})
        (partial / "config.json").write_text(
            json.dumps(write_config(model, dtype.name) | ids, indent=2) + "\n"
        )
    total = sum(tensor.num_bytes for tensor in tensors.values())
    return (
        f"{family_of(model)}, {len(tensors)} tensors{' (EMA)' if item in pytree.OPTIONAL else ''}, "
        f"{in_bytes(total)}, {len(files)} file(s): {out}"
    )


def _tensors(
    stored: StoredArrays, model: DecoderConfig, dtype: np.dtype, item: str
) -> dict[str, safetensors.Tensor]:
    """Return Hugging Face name -> tensor of the weights in `item`, read when it is written."""

    def stored_name(name: str) -> str:
        """Return the name of the array in `item`, or in `params`: the EMA lacks frozen weights."""
        own = name.replace("params/", f"{item}/", 1)
        return own if own in stored.entries or name not in stored.entries else name

    ours = [
        dataclasses.replace(piece, name=stored_name(piece.name))
        for piece in pieces(model, family_of(model))
    ]
    _check_shapes(stored, ours, item)
    return {
        source.name: safetensors.Tensor(source.shape, dtype, _rows(stored, piece, source, dtype))
        for piece in ours
        for source in piece.sources
    }


def _check_shapes(stored: StoredArrays, ours: list[Piece], item: str) -> None:
    layers = collections.Counter(piece.name for piece in ours)
    expected = {p.name: [*[layers[p.name]][: p.layer is not None], *p.shape] for p in ours}
    held = {
        n: e["shape"] for n, e in stored.entries.items() if pytree.under(n, [item]) or n in expected
    }
    problems = [
        f"{name} is {held.get(name, 'absent')} in checkpoint {stored.checkpoint.name}, but "
        f"{expected.get(name, 'absent')} in the settings of its run. Restore the settings or the "
        "checkpoint, or use another one with --step."
        for name in sorted(expected.keys() | held.keys())
        if expected.get(name) != held.get(name)
    ]
    if problems:
        raise ConfigError(problems)


def _rows(
    stored: StoredArrays, piece: Piece, source: Source, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Yield a Hugging Face tensor in slabs [rows, ...], to avoid a complete second copy.

    If both formats store dims in the same order, slabs are read one by one. If dims are transposed,
    the complete tensor is read first, because every slab would touch every chunk on disk.
    """
    same = source.order == tuple(range(len(source.order)))
    step = max(1, _SLAB_BYTES * source.view[0] // max(1, math.prod(source.view) * dtype.itemsize))
    tensor = None if same else _read(stored, piece, source.block)
    for start in range(0, source.view[0], step):
        rows = slice(start, min(start + step, source.view[0]))
        if tensor is None:
            block = (slice(source.block[0].start + rows.start, source.block[0].start + rows.stop),)
            part = _read(stored, piece, block + source.block[1:])
        else:
            part = tensor[tuple(rows if dim == 0 else slice(None) for dim in source.order)]
        yield part.transpose(np.argsort(source.order)).astype(dtype)


def _read(stored: StoredArrays, piece: Piece, index: Index) -> np.ndarray:
    """Return a block of a piece, of `index`'s shape [...], in the stored dtype."""
    if piece.layer is None:
        return stored.gather(piece.name, index)
    return stored.gather(piece.name, (slice(piece.layer, piece.layer + 1), *index))[0]


def write_tokenizer(data: DataConfig, out: Path) -> dict[str, Any]:
    """Write the run's tokenizer files, if any, to `out`; return token ids for `config.json`."""
    unknown = {"bos_token_id": None, "eos_token_id": None}
    if any(map(is_custom, data.sources)) and data.tokenizer_name == "bytes":
        return unknown  # the user's own token numbers
    name = data.tokenizer_name
    try:
        exists = name == "bytes" or tokenizer_file(name).exists()
    except ConfigError as error:
        print("\n".join(error.problems))
        exists = False
    if not exists:
        print(f"no tokenizer is written: {name!r} does not exist. Copy it to the output.")
        return unknown
    tokenizer = load_tokenizer(name, data.eos_token)
    stops = set(tokenizer.stop_ids)
    if data.is_chat or data.has_single_rows:
        stops |= load_template(data.chat_template, tokenizer).stop_ids
    ends = sorted(stops, key=lambda id: (id != tokenizer.end_id, id))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else None}
    if len(ends) == 1:
        ids["eos_token_id"] = ends[0]
    if tokenizer.pad_id is not None:
        ids["pad_token_id"] = tokenizer.pad_id
    if isinstance(tokenizer, FileTokenizer):
        for name, content in tokenizer.files.items():
            (out / name).write_bytes(content)
        # transformers prefers the ids of this file to those of config.json.
        generation = json.loads(tokenizer.files.get("generation_config.json", b"{}")) | ids
        (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return ids


_CLASSES = {"transformers": "AutoModelFor", "peft": "AutoPeftModelFor"}


def model_card(settings: RunConfig, step: int, metrics: dict[str, Any], library: str) -> str:
    """Return the README.md of an export; `library`, transformers or peft, loads the model."""
    start = settings.init_from
    scores = settings.model.num_labels > 0
    pipeline = "text-classification" if scores else "text-generation"
    header = {"library_name": library, "pipeline_tag": pipeline, "tags": ["jaxdist"]}
    if hub.is_hub_name(start):
        header["base_model"] = start.partition("@")[0]
    train = settings.train
    most = "up to " * (len(train.stages) > 1)
    facts = {
        "initial weights": start or f"random, seed {settings.seed}",
        "steps": f"{step:,} of {most}{train.global_batch_size:,} rows of {train.seq_len:,} tokens",
        "data": ", ".join(map(str, settings.data.sources)),
        "records": settings.data.records,
        "objective": settings.objective.kind,
        "optimizer": f"{settings.optim.optimizer}, peak learning rate {settings.optim.peak_lr}",
        **{f"evaluation: {name}": f"{value:.4g}" for name, value in metrics.items()},
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in header.items())
    name = _CLASSES[library] + ("SequenceClassification" if scores else "CausalLM")
    return (
        f"---\n{lines}\n---\n\n# {settings.name}\n\nTrained with jaxdist {__version__}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n```python\nfrom {library} import {name}\n\n"
        f"model = {name}.from_pretrained(FOLDER)\n```\n"
    )
