"""`python -m jaxdist.spike RUN STEP`: list the rows behind the loss of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.config import settings_before
from jaxdist.core.losses import label_cross_entropy
from jaxdist.core.step.row_logps import make_row_values
from jaxdist.core.types import Array, Batch, Context, TokenHead
from jaxdist.data import Dataset
from jaxdist.objectives.cross_entropy import real_rows
from jaxdist.run.command_settings import DeviceSettings
from jaxdist.run.data_checks import in_examples, open_run_data
from jaxdist.run.metrics_log import encode
from jaxdist.run.reference import with_reference
from jaxdist.run.replay import read_history, state_before
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts
from jaxdist.run.teacher import with_teacher
from jaxdist.run.trained_run import open_run
from jaxdist.runtime import run_command
from jaxdist.runtime.formatting.numbers import percent
from jaxdist.runtime.formatting.tables import columns
from jaxdist.runtime.storage import read_url
from jaxdist.settings import ConfigError, read_settings, setting

SUMMARY = """\
List the rows of the batch behind a loss or gradient spike: each row's own loss, its source and its
text from the part with the highest loss on. For rows with a label: label and prediction.

    jaxdist data spike runs/NAME 1200      (also: python -m jaxdist.spike)

The losses are cross-entropies, by the state before the step: the nearest checkpoint, after
repeating the steps in between. They have no dropout, and batch norm uses its running averages."""

_NUM_PARTS = 8
"""A row is divided into as many parts; the excerpt begins at the one with the highest loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeConfig(DeviceSettings):
    """Settings: the step of a run whose rows are listed, their number, and the devices."""

    run: str = setting("", "run directory", required=True)
    step: int = setting(0, "step whose batch is listed", required=True, ge=0)
    top: int = setting(10, "number of rows to list, those with the highest loss; 0 = all", ge=0)
    width: int = setting(120, "number of characters of text printed for each row", ge=0)
    json: bool = setting(False, "print one JSON object instead of text")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows of a step with the highest losses; return 0."""
    config = read_settings(
        SpikeConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.data spike",
        summary=SUMMARY,
        positional=("run", "step"),
        read_url=read_url,
    )
    result = rows_of_step(config)
    print(encode(result) if config.json else "\n".join(_lines(result)))
    return 0


def rows_of_step(config: SpikeConfig) -> dict[str, Any]:
    """Return a step's recorded loss, the checkpoint used, and `rows` of highest loss first."""
    directory = RunDirectory.existing(config.run)
    history = read_history(directory, config.step)
    run = open_run(
        config.run, step=max(0, config.step - 1), mesh=config.mesh, simulate=config.simulate,
        repeats_steps=True,
    )  # fmt: skip
    settings = settings_before(run.path, config.step)
    opened, _ = open_run_data(settings)
    if not isinstance(opened, Dataset):
        raise ConfigError(
            f"data.sources={settings.data.sources} of {directory.path} is an IterDataset, whose "
            "rows have no numbers. Use python -m jaxdist.train --replay RUN:STEP."
        )
    parts = with_teacher(run.parts_for(opened.fields), opened.fields)
    (data,) = with_reference(parts, in_examples(parts, opened))
    state, loader, checkpoint = state_before(parts, data, directory, config.step, history)
    with contextlib.closing(loader):
        batch = next(loader)
        history.check(config.step, loader.first_sample, loader.digest)
        numbers = np.array(loader.rows(loader.first_sample))
    parts = parts.in_stage(config.step - 1)
    losses, weights, predicted = row_losses(parts, state.params, batch)
    if len(losses) > len(numbers):  # shorter rows are parts of a row
        losses, weights = (x.reshape(len(numbers), -1) for x in (losses, weights))
    recorded = history.recorded[config.step]
    return {
        "run": str(directory.path),
        "step": config.step,
        "checkpoint": checkpoint,
        "repeated_steps": config.step - 1 - checkpoint,
        "loss": recorded.get("loss"),
        "grad_norm": recorded.get("grad_norm"),
        "mean_row_loss": float(losses.sum() / max(weights.sum(), 1e-9)),
        "rows": _described(opened, numbers, losses, weights, predicted, config),
    }


def row_losses(
    parts: Parts, params: Any, batch: Batch
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return summed losses and weights, float64 [rows, parts], and predicted classes [rows].

    A row of text is divided into _NUM_PARTS parts of equal length, without predictions (None); a
    row with a label has one part.
    """

    def values_of(output: Any, rows: Batch, context: Context) -> dict[str, Array]:
        """Return sums of loss and weight, float32 [batch, parts]."""
        if not isinstance(output, TokenHead):
            return _label_values(parts.model.name, output, rows, context)
        targets, weights = rows["targets"], rows["weights"]
        positions = context.position_ids(targets.shape[1])
        length = targets.shape[1] * context.sum(1, "seq")
        part = (positions * _NUM_PARTS // length)[:, None] == jnp.arange(_NUM_PARTS)
        logps = context.token_logps(output, targets).logps
        by_part = lambda x: context.sum(x @ part.astype(jnp.float32), "seq")
        return {"row_loss": by_part(-logps * weights), "row_weight": by_part(weights)}

    compute = make_row_values(parts.model, parts.layout, parts.plan, parts.step.context, values_of)
    values = jax.jit(compute, out_shardings=parts.layout.sharding(P()))(params, batch)
    host = {name: np.asarray(x, np.float64) for name, x in jax.device_get(values).items()}
    return host["row_loss"], host["row_weight"], host.get("predicted")


def _label_values(name: str, output: Any, rows: Batch, context: Context) -> dict[str, Array]:
    """Return loss and weight, float32 [batch, 1], and the predicted class, float32 [batch]."""
    labels = rows.get("labels")
    if labels is None or not jnp.issubdtype(labels.dtype, jnp.integer) or output.ndim != 2:
        raise ConfigError(
            f"{name} has a head without a vocabulary or classes: losses of single rows need one. "
            "Use python -m jaxdist.train --replay RUN:STEP."
        )
    weights = rows["weights"] if rows["weights"].ndim == 1 else real_rows(rows, context)
    one = lambda *row: label_cross_entropy(*(x[None] for x in row))
    sums = jax.vmap(one)(output, labels, weights)
    values = {"row_loss": sums["loss"][:, None], "row_weight": sums["weight"][:, None]}
    return {**values, "predicted": jnp.argmax(output, -1).astype(jnp.float32)}


def _described(
    data: Dataset,
    numbers: np.ndarray,
    losses: np.ndarray,
    weights: np.ndarray,
    predicted: np.ndarray | None,
    config: SpikeConfig,
) -> list[dict[str, Any]]:
    """Return records of the `config.top` rows with the highest mean loss, highest first.

    `numbers` int64 [rows] are indices in `data`; losses and weights are [rows, parts].
    """
    total, count = losses.sum(1), weights.sum(1)
    means = np.where(count > 0, total / np.maximum(count, 1e-9), -math.inf)  # last: no labels
    order = np.argsort(-np.nan_to_num(means, nan=math.inf), kind="stable")
    records = []
    for row in order[: config.top or None].tolist():
        share = losses[row] / np.maximum(weights[row], 1e-9)
        worst = int(np.argmax(np.nan_to_num(share, nan=math.inf)))
        fields = data[int(numbers[row])]
        tokens = fields.get("tokens", np.zeros(0, np.int64))
        start = worst * len(tokens) // losses.shape[1]
        source, number = _origin(data, numbers[row])
        classes = {}
        if predicted is not None:
            classes = {"label": int(fields["labels"]), "predicted": int(predicted[row])}
        records.append(
            {
                "row": int(numbers[row]),
                "source": source,
                "row_of_source": number,
                **classes,
                "loss": float(total[row] / count[row]) if count[row] else None,
                "tokens": float(count[row]),
                "share": float(total[row] / total.sum()),
                "text": _text(data, tokens[start:], config.width),
            }
        )
    return records


def _origin(data: Dataset, row: int) -> tuple[str, int]:
    """Return (source of a row, or file of a streamed row; number of the row in it)."""
    (part,), (number,) = data.part_of(np.array([row]))
    if (stream := data.streams.get(part)) is not None:
        return stream.origin(int(number))
    return data.names[part] if data.names else "", int(number)


def _text(data: Dataset, tokens: np.ndarray, width: int) -> str:
    """Return the start of the text of tokens [n], or their numbers without a tokenizer."""
    tokens = tokens[: max(width, 1)]  # a token is a character or more
    if data.token_bytes is None or data.tokenizer is None:
        return " ".join(map(str, tokens.tolist()))[:width]
    return " ".join(data.tokenizer.decode(tokens).split())[:width]


def _lines(result: dict[str, Any]) -> list[str]:
    number = lambda x: f"{x:.4f}" if isinstance(x, float) else "none"
    repeated = result["repeated_steps"]
    classes = [name for name in ("label", "predicted") if name in result["rows"][0]]
    texts = ["text"] * any(row["text"] for row in result["rows"])
    rows = [("loss", "share", "source", "row", *classes, *texts)]
    rows += [
        (
            number(row["loss"]), percent(row["share"]), row["source"], str(row["row_of_source"]),
            *(str(row[name]) for name in classes), *(repr(row[name]) for name in texts),
        )
        for row in result["rows"]
    ]  # fmt: skip
    return [
        f"step {result['step']} of {result['run']}: recorded loss {number(result['loss'])}, "
        f"gradient norm {number(result['grad_norm'])}",
        f"losses of the state after step {result['checkpoint'] + repeated} (checkpoint "
        f"{result['checkpoint']} and {repeated} repeated steps), without dropout: mean "
        f"{number(result['mean_row_loss'])}",
        "",
        *columns(rows, left=len(rows[0])),
    ]


if __name__ == "__main__":
    run_command(main)
