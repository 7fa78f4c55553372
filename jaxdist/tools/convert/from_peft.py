"""`convert from-peft DIR OUT`: import adapters of PEFT as a run directory.

The run can be evaluated, used for generation, merged into complete weights, and exported.
"""

from __future__ import annotations

import collections
import dataclasses
import shlex

import numpy as np

from jaxdist.checkpoint.streaming_io import CheckpointWriter
from jaxdist.models.huggingface import peft, safetensors
from jaxdist.models.huggingface.directory import folder_of, is_model, read_model
from jaxdist.runtime import hub
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError, setting
from jaxdist.tools.convert.checkpoint_paths import making_run, new_run_directory
from jaxdist.tools.convert.from_hf import settings_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert from-peft`: adapters, their base model and the destination."""

    src: str = setting("", "directory with adapter_config.json", required=True)
    out: str = setting("", "new run directory", required=True)
    base: str = setting(
        "",
        "base model: a Hugging Face directory or ORG/NAME on the hub; empty = as in "
        "adapter_config.json",
    )


def run(config: Config) -> int:
    """Import PEFT adapters as a run; print a summary and the next command; return 0."""
    out, source = new_run_directory(config.out), locate(config.src).absolute()
    try:
        settings = (source / peft.CONFIG).json()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source / peft.CONFIG} cannot be read: {error}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{source / peft.CONFIG} is not an object but a {type(settings).__name__}."
        )
    base, revision = str(settings.get("base_model_name_or_path", "")), settings.get("revision")
    base = config.base or (f"{base}@{revision}" if revision and hub.is_hub_name(base) else base)
    if not is_model(base):
        raise ConfigError(
            f"the base model {base!r} is neither a model directory nor a name on the hub. Name it "
            "with --base."
        )
    folder = folder_of(base, weights=True)
    model = read_model(folder)
    lora = peft.read_config(settings, model, str(source))
    values = {n: t.read() for n, t in safetensors.open_file(source / peft.WEIGHTS).items()}
    arrays: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    score = values.pop(peft.SCORE, None)
    if score is not None:
        model = dataclasses.replace(model, num_labels=len(score))
    problems, ranks, others = [], lora.target_modules(model), dict[str, None]()
    rows: dict[str, np.ndarray] = {}
    for module in peft.modules(model, lora):
        shapes = module.shapes(lora, ranks[module.target])
        own = {name: values.pop(name, np.empty(0)) for name in shapes}
        name = module.tensor_name("a")
        if (first := own[name].shape[:1]) not in ((), (0,), shapes[name][:1]):
            others[f"{module.target}={first[0] // (module.num_experts or 1)}"] = None
        problems += [
            f"{name} {f'is {list(own[name].shape)}' if own[name].size else 'is missing'}; "
            f"{list(shape)} is needed."
            for name, shape in shapes.items()
            if own[name].shape != shape
        ]
        if not problems:
            for kind, x in module.from_peft(own).items():
                arrays[f"{module.array}/{kind}"].append(x.astype(np.float32))
    shape = (len(lora.token_ids), model.d_model)
    for array, part in peft.token_tables(model, lora).items():
        own_rows = values.pop(peft.rows_name(part), np.empty(0))
        if own_rows.shape != shape:
            problems.append(f"{peft.rows_name(part)} is missing or not {list(shape)}.")
        rows[array] = own_rows.astype(np.float32)
    problems += [f"{name} is not an adapter of a target module." for name in values]
    if others:
        text = f"r={lora.rank} in {peft.CONFIG}, but the arrays have ranks {', '.join(others)}."
        problems = [f"{text} Correct r or rank_pattern."]
    if problems:
        raise ConfigError([f"{source}: {problem}" for problem in problems])
    with making_run(out):
        is_stacked = lambda name: name.startswith("params/layers/")
        stacked = {n: np.stack(x) if is_stacked(n) else x[0] for n, x in arrays.items()} | rows
        if score is not None:
            stacked["params/head/score"] = score.T.astype(np.float32)
        writer = CheckpointWriter(
            out / "checkpoints" / "0", sum(x.nbytes for x in stacked.values())
        )
        for name, x in stacked.items():
            entry = {"shape": list(x.shape), "dtype": "float32", "path": name.split("/")[1:]}
            writer.write(name, entry, x.shape, [(tuple(slice(0, n) for n in x.shape), x)])
        start = base if hub.is_hub_name(base) else str(locate(base).absolute())
        text = settings_of(source.name, model, folder, out, lora=lora, init_from=start)
        writer.finish({"mesh": "", "config": text, "source": str(source)})
        (out / "config.toml").write(text)
    print(
        f"adapters of {base}, {in_bytes(writer.num_bytes)}: {out}\n"
        f"next: {shell_python()} -m jaxdist.generate {shlex.quote(str(out))} --prompt Once"
    )
    return 0
