"""The known GPUs, and a user's own."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from jaxdist.hardware.gpu import Gpu
from jaxdist.hardware.toml_files import read_tables
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError

_ALIASES = {
    "a100": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
}


def _read_known() -> dict[str, Gpu]:
    text = Path(__file__).with_name("known.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    kinds = {name: table.pop("device_kind") for name, table in tables.items()}
    found, problems = read_tables(tables, {}, {})
    assert not problems, problems
    return {name: dataclasses.replace(gpu, device_kind=kinds[name]) for name, gpu in found.items()}


GPUS: dict[str, Gpu] = _read_known()
"""Every GPU known here, by the name that `--gpus` takes."""


def gpu_of(device_kind: str) -> Gpu | None:
    """The GPU that a `jax.Device.device_kind` such as "NVIDIA H100 80GB HBM3" names.

    Devices that a program is only compiled for have the name in `GPUS` for their kind.
    The whole name must match, so that an L40S is no L4 and a MIG slice ("... MIG 1g.10gb") is no
    whole GPU; None when it is not known.
    """
    kind = re.sub(r"^((NVIDIA|Tesla)\s+)*", "", device_kind.strip())
    found = (gpu for gpu in GPUS.values() if re.fullmatch(gpu.device_kind, kind))
    return GPUS.get(device_kind) or next(found, None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for dense products in `dtype`, or None when not known."""
    gpu = gpu_of(device_kind)
    return None if gpu is None else gpu.peak_flops.get(dtype)


def find_gpu(name: str, known: Mapping[str, Gpu] = GPUS) -> Gpu:
    """The GPU of a name as users write it.

    Raises:
        ConfigError: there is none of this name.
    """
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"gpus: {name!r} is not known. {hint}Known: {', '.join(known)}. Describe others in a "
        "TOML file and name it with --hardware."
    )


def read_hardware(path: str | Path) -> dict[str, Gpu]:
    """A user's own GPUs from a TOML file, added to the known ones.

    A table per GPU; with `like` it starts from a known one and says what differs. Without it says
    all, as those of `known.toml` next to this file do; `device_kind`, the pattern of JAX's name for
    a device, stands only there.

    Raises:
        ConfigError: the file cannot be read, or with every problem found in it.
    """
    try:
        tables = tomllib.loads(locate(Path(path).expanduser()).read().decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"hardware {str(path)!r} cannot be read: {error}. Name a TOML file with a table per "
            "GPU, as jaxdist/hardware/known.toml has them."
        ) from error
    found, problems = read_tables(tables, GPUS, _ALIASES)
    if problems:
        raise ConfigError([f"hardware {str(path)!r}: {line}" for line in problems])
    return {**GPUS, **found}
