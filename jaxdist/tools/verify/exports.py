"""Checks of an exported directory: it holds the trained weights, and computes the same logits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint import Checkpointer, CheckpointError
from jaxdist.checkpoint.blocks import dtype_of
from jaxdist.checkpoint.events import one_line
from jaxdist.config import RunConfig, settings_of_run
from jaxdist.core.parallel.pipeline.virtual_stages import LAYERS
from jaxdist.core.types import Array, Params
from jaxdist.models.adapters import LoraConfig, merge
from jaxdist.models.huggingface import peft, safetensors
from jaxdist.models.huggingface.directory import is_model, open_weights
from jaxdist.models.huggingface.families import decoder_of, read_config, write_config
from jaxdist.run.gradient_checks import named, part_names
from jaxdist.run.setup import Parts, assemble
from jaxdist.run.trained_run import open_run
from jaxdist.runtime.storage import Location, locate
from jaxdist.settings import ConfigError
from jaxdist.tools.convert import from_peft
from jaxdist.tools.convert.to_hf import write_tokenizer
from jaxdist.tools.verify.training import Check, Trained, sample_logits

_MERGED_ROUNDING = 1e-4
"""Maximum difference of merged and unmerged logits, relative to the largest logit."""

_SAME_WEIGHTS = 1e-5  # of the largest logit: another mesh sums in another order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """An export, loaded: its parts, its weights, and the dtype in which it stores each parameter.

    `differences` are settings that differ from those of the run.
    """

    parts: Parts
    params: Params
    dtypes: dict[str, np.dtype]
    differences: list[str]


def check_export(trained: Trained, path: str) -> list[Check]:
    """Import an exported directory, compare it with the loaded checkpoint; return the checks."""
    folder = locate(path).absolute()
    is_peft = (folder / peft.CONFIG).exists()
    try:
        if is_peft:
            exported = _open_peft(trained, folder)
        elif is_model(folder):
            exported = _open_model(trained, folder)
        elif (folder / "config.toml").exists():
            exported = _open_run(trained, folder)
        else:
            raise ConfigError(
                f"--export {path} is neither a Hugging Face model, a PEFT directory nor a run. "
                "Name the output of convert to-hf, to-peft or merge."
            )
    except CheckpointError as error:
        return [Check(name="export", summary="", problems=[one_line(error)])]
    except ConfigError as error:
        if not folder.exists():
            raise
        return [Check(name="export", summary="", problems=list(error.problems))]
    text = f"settings of {folder.name} are those of the run"
    checks = [
        Check(name="export", summary=text, problems=exported.differences),
        _check_values(trained, exported, is_peft),
    ]
    if is_peft or is_model(folder):
        checks.append(_check_tokenizer(trained, folder, with_ids=not is_peft))
    if not checks[0].problems and not checks[1].problems:
        checks += _check_logits(trained, exported, is_peft)
    return checks


def _open_model(trained: Trained, folder: Location) -> Exported:
    """Return the model of a Hugging Face directory, on the devices of the run."""
    weights = open_weights(folder)
    own = decoder_of(trained.parts.config.model, str(trained.run.path))
    expected = read_config(write_config(own, "float32"))
    expected = dataclasses.replace(expected, tie_embeddings=own.tie_embeddings)
    config = dataclasses.replace(
        trained.parts.config,
        model=weights.model,
        lora=LoraConfig(),
        init_from=str(folder),
        reinit_params=[],
    )
    parts = assemble(config, trained.parts.devices)
    dtypes = {
        name.removeprefix("params/"): weights.dtype(pieces)
        for name, pieces in weights.pieces.items()
    }
    problems = _differences(weights.model, expected, "config.json")
    return Exported(parts=parts, params=parts.initial_params(), dtypes=dtypes, differences=problems)


def _open_peft(trained: Trained, folder: Location) -> Exported:
    """Return the adapters of a PEFT directory with the frozen weights of the run."""
    own = trained.parts.config
    model = decoder_of(own.model, str(trained.run.path))
    if not own.lora.rank:
        raise ConfigError(f"{folder} has adapters, and the run has none. Export it with to-hf.")
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            from_peft.run(from_peft.Config(src=str(folder), out=str(run), base=own.init_from))
        imported = settings_of_run(run, 0)
        lora = dataclasses.replace(imported.lora, base_format=own.lora.base_format)
        parts = assemble(dataclasses.replace(own, lora=lora), trained.parts.devices)
        reader = Checkpointer(run / "checkpoints", own.checkpoint, read_only=True)
        params = parts.load_params(reader, 0, "raw")
    stored = safetensors.open_file(folder / peft.WEIGHTS)
    dtypes = {
        f"{module.array.removeprefix('params/')}/{kind}": stored[module.tensor_name(kind)].dtype
        for module in peft.modules(model, lora)
        for kind in ("a", "b", "scale")
        if module.tensor_name(kind) in stored
    } | {
        array.removeprefix("params/"): stored[peft.rows_name(module)].dtype
        for array, module in peft.token_tables(model, lora).items()
    }
    facts = lambda lora: {
        "alpha": lora.alpha,
        "variant": lora.variant,
        "token_ids": lora.token_ids,
        "ranks": lora.target_modules(model),
    }
    expected = facts(own.lora)
    problems = [
        f"{peft.CONFIG}: {name} is {value}, and the run has {expected[name]}."
        for name, value in facts(lora).items()
        if value != expected[name]
    ]
    return Exported(parts=parts, params=params, dtypes=dtypes, differences=problems)


def _open_run(trained: Trained, folder: Location) -> Exported:
    """Return the weights of another run directory, e.g. of merged weights."""
    opened = open_run(str(folder), mesh=str(trained.parts.spec))
    loaded = opened.weights()
    arrays = opened.path / "checkpoints" / loaded.step
    entries = Trained(opened, arrays, "auto").entries
    dtypes = {
        name.partition("/")[2]: dtype_of(entry["dtype"])
        for name, entry in entries.items()
        if name.partition("/")[0] == "params"
    }
    problems = _differences(opened.parts.config.model, trained.parts.config.model, "config.toml")
    return Exported(parts=opened.parts, params=loaded.params, dtypes=dtypes, differences=problems)


def _differences(others: Any, ours: Any, file: str) -> list[str]:
    return [
        f"{file}: {field.name} is {getattr(others, field.name)!r}, and the run has "
        f"{getattr(ours, field.name)!r}."
        for field in dataclasses.fields(ours)
        if getattr(others, field.name) != getattr(ours, field.name)
    ]


def _check_values(trained: Trained, exported: Exported, is_peft: bool) -> Check:
    """Check that each exported parameter equals the checkpoint's, rounded to the stored dtype."""
    assert trained.loaded is not None
    is_merged = trained.parts.has_adapters and not is_peft
    ours = named(jax.jit(merge)(trained.loaded) if is_merged else trained.loaded)
    others = named(exported.params)
    if is_peft:
        ours = {name: x for name, x in ours.items() if trained.updates[name] == "gradient"}
        others = {name: x for name, x in others.items() if name in ours or "/adapters/" in name}
    problems = [f"{name} is not in the export." for name in ours.keys() - others.keys()]
    problems += [f"{name} is only in the export." for name in others.keys() - ours.keys()]
    for name in sorted(ours.keys() & others.keys()):
        x, y = ours[name], others[name]
        if x.shape != y.shape:
            problems.append(f"{name} is {list(y.shape)} in the export, {list(x.shape)} in the run.")
            continue
        dtype = exported.dtypes.get(name, np.dtype(np.float32))
        is_stacked = name.partition("/")[0] == LAYERS
        differs = np.asarray(_differs(x, y, jnp.dtype(dtype), is_stacked, int(is_merged)))
        problems += [
            f"{text} has other values than the checkpoint." for text in part_names(name, differs)
        ]
    kinds = ", ".join(sorted({dtype.name for dtype in exported.dtypes.values()}))
    text = f"{len(ours)} parameters have the values of the checkpoint in {kinds}"
    return Check(name="values", summary=text, problems=sorted(problems))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _differs(ours: Array, others: Array, dtype: Any, is_stacked: bool, units: int) -> Array:
    """Return bool [num_layers] or []: arrays [...] differ by over `units` roundings of the peak."""
    rounded = ours.astype(dtype).astype(jnp.float32)
    bound = units * float(jnp.finfo(dtype).eps) * jnp.max(jnp.abs(rounded))
    is_close = jnp.abs(rounded - others.astype(jnp.float32)) <= bound
    return jnp.any(~is_close, axis=tuple(range(is_stacked, others.ndim)))


def _check_tokenizer(trained: Trained, folder: Location, *, with_ids: bool) -> Check:
    """Check that tokenizer files are the run's; of a complete model also end-of-text ids."""
    settings: RunConfig = settings_of_run(trained.run.path, trained.step)
    problems = []
    with tempfile.TemporaryDirectory() as temporary:
        with contextlib.redirect_stdout(io.StringIO()):
            ids = write_tokenizer(settings.data, Path(temporary))
        files = {file.name: file.read_bytes() for file in Path(temporary).iterdir()}
    files.pop("generation_config.json", None)  # its ids are compared
    for name, content in files.items():
        if not (folder / name).exists():
            problems.append(f"{name} is missing.")
        elif (folder / name).read() != content:
            problems.append(f"{name} differs from the tokenizer of the run.")
    records = ["config.json", "generation_config.json"] if with_ids else []
    for name in records:
        record = (folder / name).json() if (folder / name).exists() else {}
        problems += [
            f"{name}: {key} is {record[key]}, and the run has {value}."
            for key, value in ids.items()
            if key in record and record[key] != value
        ]
    text = f"{len(files)} files are those of the run" if files else "the run has no tokenizer files"
    is_done = bool(files or problems)
    return Check(name="tokenizer", summary=text, problems=problems, is_done=is_done)


def _check_logits(trained: Trained, exported: Exported, is_peft: bool) -> Iterator[Check]:
    """Yield a check of whether export and run compute equal logits; none without decoding."""
    assert trained.loaded is not None
    is_merged = trained.parts.has_adapters and not is_peft
    is_float32 = all(dtype == np.float32 for dtype in exported.dtypes.values())
    if is_merged and not is_float32:
        parts, params = exported.parts, jax.jit(merge)(trained.loaded)
    else:
        parts, params = trained.parts, trained.loaded
    rounded = {
        name: x.astype(dtype).astype(x.dtype)
        for name, x in named(params).items()
        if (dtype := exported.dtypes.get(name)) is not None
    }
    pick = lambda path, x: rounded.get(jax.tree_util.keystr(path, simple=True, separator="/"), x)
    ours = sample_logits(parts, jax.tree_util.tree_map_with_path(pick, params))
    others = sample_logits(exported.parts, exported.params)
    if ours is None or others is None:
        return
    largest = float(np.max(np.abs(ours - others))) if ours.shape == others.shape else np.inf
    bound = (_MERGED_ROUNDING if is_merged else _SAME_WEIGHTS) * float(np.max(np.abs(ours)))
    problems = []
    if not largest <= bound:
        problems = [f"logits differ by up to {largest:.2g} from those of the run."]
    text = f"logits of the export and of the run differ by at most {largest:.2g}"
    yield Check(name="logits", summary=text, problems=problems)
