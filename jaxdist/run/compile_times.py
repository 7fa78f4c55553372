"""Durations of earlier compilations of a train step, stored next to the compile cache."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib

import jax

from jaxdist.run.setup import Parts
from jaxdist.runtime.storage import locate


class CompileTimes:
    """Compile time of a program, by its settings, mesh and devices."""

    def __init__(self, parts: Parts):
        config, device = parts.config, parts.devices[0]
        mesh = dataclasses.replace(config.mesh, shape="")  # `spec` is the resolved shape
        program = [
            *(config.model, config.optim, config.precision, config.pipeline, mesh),
            dataclasses.replace(config.train, steps=1),
            *(str(parts.spec), device.device_kind, len(parts.devices), jax.__version__),
        ]
        digest = hashlib.sha256(repr(program).encode()).hexdigest()[:24]
        folder = getattr(jax.config, "jax_compilation_cache_dir", None)
        self._file = locate(folder) / f"seconds-{digest}" if folder else None

    def last(self) -> float:
        """Return the seconds of the last compilation; 0 if unknown."""
        with contextlib.suppress(OSError, ValueError):
            return float(self._file.text()) if self._file else 0.0
        return 0.0

    def store(self, seconds: float) -> None:
        """Store the seconds for the next start."""
        if self._file:
            with contextlib.suppress(OSError):
                self._file.write(f"{seconds}", durable=False)
