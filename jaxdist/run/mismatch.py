"""Name the settings that make a checkpoint unusable for a resume."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from typing import Any

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.errors import MismatchError
from jaxdist.config import RunConfig, parse_run
from jaxdist.core.sharding import MeshConfig
from jaxdist.run.setup import Parts, assemble
from jaxdist.settings import ConfigError
from jaxdist.settings.schema import flag_of


def with_settings(error: MismatchError, parts: Parts, run: str) -> ConfigError:
    """Return an error that names the changed settings; `error` itself if no setting explains it.

    Each changed setting is tried separately on top of the stored settings.
    """
    text = error.document["meta"].get("config", "")
    if not text:
        return error
    stored = parse_run(text, f"checkpoint {error.step}")
    if _differs(stored, parts, error):
        return error
    causes = [x for x in _changes(stored, parts.config) if _differs(x[3], parts, error)]
    if not causes:
        return error
    named = ", ".join(f"{name}={before!r} (now {now!r})" for name, before, now, _ in causes)
    flags = " ".join(
        f"{flag_of(name)}={shlex.quote(before if isinstance(before, str) else json.dumps(before))}"
        for name, before, _, _ in causes
    )
    same_weights = not any(name.startswith("model.") for name, *_ in causes)
    weights = f" from its weights with --init-from={shlex.quote(run)}" if same_weights else ""
    return ConfigError(
        f"checkpoint {error.step} was saved with {named}, so its arrays do not fit. Use {flags}, "
        f"or start a new run{weights} in another --run-dir."
    )


def _changes(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any, RunConfig]]:
    """Yield name, old value and new value of each difference, and `old` with that new value."""
    for field in dataclasses.fields(old):
        before, now = getattr(old, field.name), getattr(new, field.name)
        is_section = dataclasses.is_dataclass(before)
        if not is_section:
            if before != now:
                yield field.name, before, now, dataclasses.replace(old, **{field.name: now})
        elif type(before) is not type(now):
            changed = dataclasses.replace(old, **{field.name: now})
            yield f"{field.name}.kind", before.kind, now.kind, changed
        else:
            for inner in dataclasses.fields(before):
                values = getattr(before, inner.name), getattr(now, inner.name)
                if values[0] != values[1]:
                    section: Any = dataclasses.replace(before, **{inner.name: values[1]})
                    changed = dataclasses.replace(old, **{field.name: section})
                    yield f"{field.name}.{inner.name}", *values, changed


def _differs(config: RunConfig, parts: Parts, error: MismatchError) -> bool:
    """Return whether the state of these settings has other arrays than the checkpoint."""
    same_model = (config.model, config.train.seq_len) == (
        parts.config.model,
        parts.config.train.seq_len,
    )
    train = dataclasses.replace(config.train, num_microbatches=0)
    config = dataclasses.replace(config, mesh=MeshConfig(shape="dp=1"), train=train)
    try:
        model = parts.model if same_model else None
        state = assemble(config, parts.devices[:1], model=model).abstract_state()
    except Exception:  # the model or optimizer rejects the value beside the stored ones
        return True
    leaves = [leaf for leaf in pytree.leaves_of(state) if leaf.item != "ema_params"]
    return bool(pytree.mismatches(leaves, error.document["arrays"], ignore=["ema_params"]))
