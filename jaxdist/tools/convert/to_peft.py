"""`convert to-peft RUN OUT`: write the adapters of a run as a PEFT directory.

`adapter_config.json`, `adapter_model.safetensors`, the tokenizer's files, if any, and a `README.md`
that shows how PEFT opens it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import numpy as np

from jaxdist.checkpoint import manifest, pytree
from jaxdist.checkpoint.blocks import dtype_of
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import settings_of_run
from jaxdist.models.huggingface import peft, safetensors
from jaxdist.models.huggingface.directory import adapter_problems, is_model
from jaxdist.models.huggingface.families import decoder_of
from jaxdist.runtime import hub
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.new_output import new_output
from jaxdist.settings import ConfigError, setting
from jaxdist.tools.convert.checkpoint_paths import Export, checkpoint_of, new_local_directory
from jaxdist.tools.convert.to_hf import model_card, write_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Export):
    """Settings of `convert to-peft`: adapters and form of the output."""

    base: str = setting(
        "", "name of the base model in adapter_config.json; empty = init_from of the run"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "dtype of the adapters")


def run(config: Config) -> int:
    """Write a run's adapters as a PEFT directory, upload it if requested; return 0."""
    hub.open_for_push(config.push)
    print(export(config))
    if config.push:
        print(f"pushed to {hub.push(config.push, config.out)}")
    return 0


def export(config: Config) -> str:
    """Write the PEFT directory; return a summary line."""
    out = Path(new_local_directory(config.out))
    checkpoint = checkpoint_of(config.src, config.step)
    stored = StoredArrays(checkpoint)
    settings = settings_of_run(checkpoint.parent.parent, int(checkpoint.name))
    model, lora = decoder_of(settings.model, config.src), settings.lora
    start = settings.init_from
    if not lora.rank:
        raise ConfigError(f"{config.src} has no adapters. Use to-hf for complete weights.")
    if not config.base and not (start and is_model(start)):
        raise ConfigError(
            f"{config.src} was not trained from a Hugging Face model (init_from={start!r}). Name "
            "the base model with --base."
        )
    if problems := adapter_problems(settings, "" if config.base else start):
        raise ConfigError(problems)
    item = pytree.weights_item(config.weights, stored.entries)
    dtype = dtype_of(config.dtype)
    tensors: dict[str, safetensors.Tensor] = {}
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for module in peft.modules(model, lora):
        name = module.array.replace("params/", f"{item}/", 1)
        if name not in arrays:
            names = [n for n in stored.entries if pytree.under(n, [name])]
            arrays[name] = {n.rpartition("/")[2]: stored.read(n) for n in names}
        adapter = {kind: x[module.layer] for kind, x in arrays[name].items()}
        for tensor_name, values in module.to_peft(adapter).items():
            tensors[tensor_name] = safetensors.Tensor(values.shape, dtype, [values.astype(dtype)])
    for array, table in peft.token_tables(model, lora).items():
        rows = stored.read(array.replace("params/", f"{item}/", 1)).astype(dtype)
        tensors[peft.rows_name(table)] = safetensors.Tensor(rows.shape, dtype, [rows])
    if model.num_labels:
        score = stored.read(f"{item}/head/score").T.astype(dtype)
        tensors[peft.SCORE] = safetensors.Tensor(score.shape, dtype, [score])
    base = config.base or start
    base, _, revision = base.partition("@") if hub.is_hub_name(base) else (base, "", "")
    with new_output(out) as partial:
        partial.mkdir()
        write_tokenizer(settings.data, partial)
        (partial / "generation_config.json").unlink(missing_ok=True)  # of complete models only
        metrics = manifest.read(checkpoint)["metrics"]
        card = model_card(settings, int(checkpoint.name), metrics, "peft")
        (partial / "README.md").write_text(card)
        safetensors.write(partial / peft.WEIGHTS, tensors, {"format": "pt"})
        settings_of_peft = peft.write_config(model, lora, base) | {"revision": revision or None}
        text = json.dumps(settings_of_peft, indent=2, sort_keys=True)
        (partial / peft.CONFIG).write_text(text + "\n")
    total = sum(tensor.num_bytes for tensor in tensors.values())
    return f"adapters of {base}: {len(tensors)} tensors, {in_bytes(total)}: {out}"
