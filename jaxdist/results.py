"""`Run`: read measurements and weights of a run directory in a program."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, overload

from jaxdist.checkpoint.pytree import Weights
from jaxdist.config import RunConfig, settings_of_run
from jaxdist.core.types import Model, Objective, Params
from jaxdist.data.chat import BadRecord, checked_messages
from jaxdist.run.command_settings import TextSettings
from jaxdist.run.metrics_log import current, decode, read_outline, stream_records
from jaxdist.run.run_directory import RunDirectory, read_table
from jaxdist.run.text_generation import make_decoder, open_writer
from jaxdist.run.trained_run import LoadedWeights, TrainedRun, open_run, other_step, run_at
from jaxdist.runtime.storage import Location, is_url
from jaxdist.settings import ConfigError, read_settings
from jaxdist.tools.report.runs import read_run

Messages: TypeAlias = Sequence[Mapping[str, str]]
"""Turns of a conversation: {"role": "user", "content": "..."}."""


def check_type(name: str, value: Any, is_allowed: bool, allowed: str) -> None:
    """Raise ConfigError with the value of an argument and the allowed ones, unless `is_allowed`."""
    if not is_allowed:
        raise ConfigError(f"{name} is {value!r:.80}. Use {allowed}.")


class Run:
    """Measurements of a run, and its weights on this machine's devices; both are loaded lazily."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        mesh: str = "auto",
        weights: Weights = "auto",
        model: Callable[[int], Model] | None = None,
        objective: Objective | None = None,
        rows: Any = None,
    ):
        check_type("path", path, isinstance(path, str | os.PathLike), "the path of a run")
        is_step = step is None or (isinstance(step, int) and not isinstance(step, bool))
        check_type("step", step, is_step, "an integer or None")
        check_type("mesh", mesh, isinstance(mesh, str), 'a text such as "tp=2"')
        check_type("weights", weights, weights in get_args(Weights), '"auto", "ema" or "raw"')
        expanded = path if is_url(path) else os.path.expanduser(path)
        try:
            directory, named = run_at(expanded)
        except ConfigError:
            RunDirectory.existing(expanded)  # its error lists runs nearby
            raise
        self.path: Path | Location = directory if is_url(directory) else Path(directory)
        self._directory = RunDirectory.existing(directory)
        if None not in (step, named) and step != named:
            raise other_step(step, named, directory)
        self._step = named if step is None else step
        self._mesh, self._model, self._rows = mesh, model, rows
        self._objective = objective
        self._kind: Weights = weights

    def __repr__(self) -> str:
        try:
            end = self.exit_reason or "no end"
        except ConfigError:
            end = "summary.json damaged"
        return f"<jaxdist.Run {self.path}: {end}, step {self.last_step}>"

    def _repr_html_(self) -> str:
        from jaxdist.tools.report.page import html_summary

        return html_summary(read_run(str(self.path), str(self.path)))

    def plot(self, *, x: Literal["step", "tokens"] = "step", log_y: bool = False) -> Any:
        """Return a matplotlib figure with the curves of the run; None without finite values.

        `log_y` draws losses, gradient norm and learning rate on logarithmic axes.
        """
        from jaxdist.tools.report.page import draw_curves

        check_type("x", x, x in ("step", "tokens"), '"step" or "tokens"')
        return draw_curves([read_run(str(self.path), "run")], ["C0"], x=x, log_y=log_y)

    @property
    def config(self) -> RunConfig:
        """Return the settings of the newest intact checkpoint up to `step`, else `config.toml`."""
        return settings_of_run(self.path, self._step)

    @property
    def summary(self) -> dict[str, Any]:
        """Return summary.json; {} without one. Raise ConfigError if it is damaged."""
        return read_table(self._directory.summary, decode)

    @property
    def exit_reason(self) -> str:
        """Return `exit_reason` in summary.json: "finished", "preempted", ...; "" without one."""
        return str(self.summary.get("exit_reason", ""))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one record per step, oldest first: step, loss, grad_norm, learning_rate, rates.

        Loss and grad_norm of a step without labels are None. Records that a restart or rollback
        discarded are left out, also from `evaluations` and `losses`.
        """
        return [*self._records("train")]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Return one record per evaluation during training, oldest first."""
        return [*self._records("eval")]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return starts, saves, warnings and other events, oldest first."""
        return [*self._records("event")]

    @property
    def losses(self) -> list[float]:
        """Return the loss of each step, as in `metrics` but NaN without labels."""
        losses = (record["loss"] for record in self._records("train"))
        return [math.nan if loss is None else loss for loss in losses]

    @property
    def last_step(self) -> int:
        """Return the number of the last recorded step; 0 before the first."""
        outline = current(read_outline(self._directory.metrics, sys.maxsize))
        return max((record["step"] for record in outline if record["kind"] == "train"), default=0)

    def dataframe(self) -> Any:
        """Return `metrics` as a pandas DataFrame with the step as index; this needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("pandas is not installed: pip install pandas, or use .metrics") from (
                error
            )
        return pandas.DataFrame(self.metrics).set_index("step")

    @property
    def params(self) -> Params:
        """Return the parameters: a tree of arrays, layers stacked, sharded over `mesh`.

        Trained ones are float32. If the run has a moving average (`optim.ema_decay`), it is
        returned, except with weights="raw". Raise ConfigError if the checkpoint does not exist.
        """
        return self._weights.params

    @property
    def step(self) -> int:
        """Return the step of the checkpoint of `params`."""
        return self._weights.step

    @overload
    def generate(self, prompts: str | Messages, **options: Any) -> str: ...
    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Messages], **options: Any
    ) -> list[str]: ...
    def generate(self, prompts: Any, **options: Any) -> Any:
        """Continue texts, or answer conversations.

        Args:
            prompts: a text or several; or a conversation, [{"role", "content"}, ...], or several.
            options: max_new_tokens, temperature, top_k, top_p, seed, stop_at_end, show_special; see
                `python -m jaxdist.generate --help`.

        Returns:
            The generated text; for a list of prompts a list.

        Raises:
            ConfigError: a wrong option, a prompt that is empty or too long, or no model of text.
        """
        settings = read_settings(TextSettings, [], command="Run.generate", values=options)
        is_many = isinstance(prompts, list | tuple) and not isinstance([*prompts, 0][0], Mapping)
        batch = list(prompts) if is_many else [prompts]
        chat = bool(batch) and isinstance(batch[0], list | tuple)
        are_alike = all(isinstance(one, list | tuple if chat else str) for one in batch)
        check_type("prompts", prompts, are_alike, "a text, a conversation, or a list of either")
        try:
            talks = [checked_messages({"messages": [*m]}, answered=False) for m in batch if chat]
        except BadRecord as error:
            raise ConfigError(f"a conversation {error}") from None
        parts = self._opened.parts
        writer = open_writer(parts, settings, chat=chat)
        requests = [{"messages": m} for m in talks] or [{"prompt": text} for text in batch]
        prepared = writer.encode(requests)
        if not prepared:
            return []
        writer.decoder = make_decoder(parts, self.params, settings)
        texts = [text for text, _ in writer.write(prepared, stream=False)]
        return texts if is_many else texts[0]

    def evaluate(
        self, sources: str | Sequence[str] = (), *, max_batches: int = 0
    ) -> dict[str, float]:
        """Return metrics by name: loss and perplexity, or accuracy.

        Args:
            sources: data to evaluate on; none = the evaluation data of the run.
            max_batches: most batches of each set, spread over it; 0 = every row once.

        Raises:
            ConfigError: the run has no evaluation data, or the data do not fit the model.
        """
        names = [sources] if isinstance(sources, str) else sources
        are_names = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
        check_type("sources", sources, are_names, "a path or URL as text, or a list of them")
        check_type("max_batches", max_batches, type(max_batches) is int, "an integer")
        dataset = self._opened.open_held_out(list(names))
        return self._opened.evaluate(self.params, dataset, max_batches=max_batches)

    def export_hf(self, path: str | os.PathLike[str], *, dtype: str = "stored") -> Path:
        """Write the weights as a new Hugging Face model directory; return its path.

        Args:
            path: a directory that does not exist.
            dtype: dtype of the weights: "float32", "bfloat16", "float16"; "stored" = unchanged.

        Raises:
            ConfigError: the model is no decoder or has adapters, or the directory exists.
        """
        from jaxdist.tools.convert import to_hf

        check_type("path", path, isinstance(path, str | os.PathLike), "the path of a new directory")
        step = -1 if self._step is None else self._step
        values = {"src": str(self.path), "out": str(path), "step": step, "dtype": dtype}
        values |= {"weights": self._kind}
        to_hf.export(read_settings(to_hf.Config, [], command="export_hf", values=values))
        return Path(path)

    @functools.cached_property
    def _opened(self) -> TrainedRun:
        return open_run(
            self.path, step=self._step, mesh=self._mesh,
            model=self._model, objective=self._objective, rows=self._rows,
        )  # fmt: skip

    @functools.cached_property
    def _weights(self) -> LoadedWeights:
        return self._opened.weights(self._step, self._kind)

    def _records(self, kind: str) -> Iterator[dict[str, Any]]:
        records = stream_records(self._directory.metrics)
        return (record for record, counts in records if counts and record["kind"] == kind)
