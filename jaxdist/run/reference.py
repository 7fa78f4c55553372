"""Log-probabilities by the weights that a run starts from, computed once for every row.

Preference tuning of all weights compares with them, so that no second copy of the weights is held.
They are kept in the cache folder, by the digests of weights and rows and the model's settings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint.checksum import digest_of
from jaxdist.core.step.row_logps import make_row_logps
from jaxdist.core.types import MISMATCHED, REFERENCE, Params
from jaxdist.data import Dataset, eval_batches
from jaxdist.data.cache import cache_folder
from jaxdist.data.packing import Fields, Part, Rows, Spans
from jaxdist.objectives.preference import mismatched
from jaxdist.run.setup import Parts
from jaxdist.runtime import coordination
from jaxdist.runtime.progress import Progress
from jaxdist.runtime.storage import locate

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithColumns:
    """Rows of a part of the data, with further fields (`columns`): name -> float32 [num_rows]."""

    part: Part
    columns: dict[str, np.ndarray]

    @property
    def num_rows(self) -> int:
        """Number of rows of one epoch."""
        return self.part.num_rows

    @property
    def fields(self) -> Fields:
        """Name -> (shape of one row, dtype) of all fields, the further ones included."""
        return {**self.part.fields, **{name: ((), x.dtype) for name, x in self.columns.items()}}

    @property
    def fingerprint(self) -> str:
        """Digest of the part without the further fields."""
        return self.part.fingerprint

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return the part's rows with the further fields; `indices` are int64 [n]."""
        more = {name: values[indices] for name, values in self.columns.items()}
        return {**self.part.rows(indices, spans), **more}


def with_reference(parts: Parts, *datasets: Any) -> tuple[Any, ...]:
    """Return the datasets, if needed with log-probabilities by the reference model; collective.

    If needed, store the weights' digest in `parts.base`, for the comparison of a resume.
    """
    if not parts.config.precomputes_reference:
        return datasets
    params = parts.initial_params()
    parts.base["digest"] = digest = digest_of(params)
    add = functools.partial(_with_columns, parts, parts.in_execution_order(params), digest)
    return tuple(dataset and add(dataset) for dataset in datasets)


def _with_columns(parts: Parts, params: Params, digest: str, dataset: Dataset) -> Dataset:
    names = [REFERENCE]
    if f"{MISMATCHED}tokens" in dataset.fields:
        names.append(f"{MISMATCHED}{REFERENCE}")
    computed = repr(parts.config.model), str(parts.plan.compute_dtype), parts.plan.matmul_dtype
    facts = [digest, dataset.fingerprint, names, *computed]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_folder() / f"reference-{key}.npy"
    # Processes may have different caches, and all must take part in the computation.
    if coordination.decide_from(f"reference {key}", path.exists(), all):
        values = np.load(path)
    else:
        values = _computed(parts, params, dataset, names)
        np.save(content := io.BytesIO(), values)
        locate(path).write(content.getbuffer())  # other jobs may write the same file
    new, start = [], 0
    for part in dataset.parts:
        end = start + part.num_rows
        columns = {name: x[start:end] for name, x in zip(names, values, strict=True)}
        new.append(WithColumns(part=part, columns=columns))
        start = end
    return dataclasses.replace(dataset, parts=tuple(new))


def _computed(parts: Parts, params: Params, dataset: Dataset, names: list[str]) -> np.ndarray:
    """Return the rows' reference log-probabilities, float32 [names, num_rows], on every process."""
    rows_of = lambda batch: [batch] if len(names) == 1 else [batch, mismatched(batch)]
    logps = make_row_logps(parts.model, parts.layout, parts.plan, parts.step.context)
    replicated = parts.layout.sharding(P())
    compute = jax.jit(
        lambda params, batch: [logps(params, rows, adapters=False) for rows in rows_of(batch)],
        out_shardings=replicated,
    )
    size = parts.config.train.global_batch_size
    batches = eval_batches(dataset, global_batch_size=size, sharding=parts.step.batch_sharding)
    results = []
    log.info("computing the reference model's log-probabilities of %d rows ...", dataset.num_rows)
    with Progress("reference", -(-dataset.num_rows // size), "batches") as progress:
        for batch in batches:
            results.append(np.asarray(jax.device_get(compute(params, batch)), np.float32))
            progress.advance()
    return np.concatenate(results, axis=1)[:, : dataset.num_rows]
