"""Evaluate a run on tasks of the lm-evaluation-harness (`lm_eval`, extra `eval`).

The harness makes the requests and computes the metrics. Windows, boundaries between context and
continuation, and stop sequences follow its backend for transformers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.core.parallel.context import CONTEXT, place_batch
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.step.row_logps import make_row_values, row_logps
from jaxdist.core.types import Array, Batch, Context, Params, TokenHead
from jaxdist.data.tokenizer import Tokenizer, begin_text, load_tokenizer
from jaxdist.run.command_settings import TextSettings
from jaxdist.run.setup import Parts
from jaxdist.run.text_generation import Decoder, make_decoder
from jaxdist.runtime.progress import Progress
from jaxdist.settings import ConfigError

_BUCKET = 64
"""Rows are padded to a multiple of this many tokens, to limit recompilations."""


def evaluate_tasks(
    parts: Parts,
    params: Params,
    tasks: Sequence[str],
    *,
    task_folder: str = "",
    num_fewshot: int | None = None,
    limit: int | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Return task -> metric -> value; raises `ConfigError` for an unknown task.

    `on_batch` is called after each batch of texts. `num_fewshot` None = as the task states, `limit`
    None = all its documents.
    """
    from lm_eval import simple_evaluate

    with _readable(tasks):
        evaluated = simple_evaluate(
            model=harness_model(parts, params, on_batch),
            tasks=list(tasks),
            task_manager=_manager(tasks, task_folder),
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
        )
    kept = lambda values: {
        name.removesuffix(",none"): value
        for name, value in values.items()
        if name not in ("alias", "name", "sample_len") and isinstance(value, int | float)
    }
    return {task: kept(values) for task, values in evaluated["results"].items()}


def task_metrics(parts: Parts, params: Params, on_batch: Callable[[], None]) -> dict[str, float]:
    """Return "task/NAME/METRIC" -> value of `eval.tasks`; `params` are in the model's order."""
    settings = parts.config.eval
    results = evaluate_tasks(
        parts,
        params,
        settings.tasks,
        task_folder=settings.task_folder,
        limit=settings.task_limit or None,
        on_batch=on_batch,
    )
    pairs = ((task, *pair) for task, values in results.items() for pair in values.items())
    return {f"task/{task}/{name}": float(value) for task, name, value in pairs}


def check_tasks(parts: Parts) -> None:
    """Raise ConfigError if `eval.tasks` cannot run or load, before their first evaluation."""
    settings = parts.config.eval
    if not settings.tasks:
        return
    problems = [task_problem("eval.tasks")] if importlib.util.find_spec("lm_eval") is None else []
    if jax.process_count() > 1:
        problems.append(
            f"eval.tasks={','.join(settings.tasks)} in a job of {jax.process_count()} processes: "
            "one process evaluates tasks. Use jaxdist.evaluate --tasks on its checkpoints."
        )
    if problems:
        raise ConfigError(problems)
    _ = harness_model(parts, None).eot_token_id  # rejects models and tokenizers without tasks
    with _readable(settings.tasks):
        _manager(settings.tasks, settings.task_folder).load(list(settings.tasks))


def task_problem(name: str) -> str:
    """Return the message that the setting `name` needs the harness, which is not installed."""
    return (
        f"{name} needs the lm-evaluation-harness. Install it: pip install -c constraints.txt "
        "-e '.[eval]'."
    )


@functools.cache
def _index(task_folder: str) -> Any:
    """Return the harness's index of its own tasks and a folder's, which takes seconds to build."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=task_folder or None)


def _manager(tasks: Sequence[str], task_folder: str) -> Any:
    manager = _index(task_folder)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(
            f"tasks={', '.join(unknown)}: the harness has no such task. List them with "
            "`lm-eval ls tasks`, or name a folder of task files in task_folder."
        )
    return manager


@contextlib.contextmanager
def _readable(tasks: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, FileNotFoundError) as error:
        raise ConfigError(
            f"the data of tasks={','.join(tasks)} cannot be read ({error}). Check the network, or "
            "fill the cache of Hugging Face's datasets (HF_HOME) and set HF_HUB_OFFLINE=1."
        ) from None


def harness_model(
    parts: Parts, params: Params | None, on_batch: Callable[[], None] = lambda: None
) -> Any:
    """Return a run as a model of the harness, on the mesh of its parts."""
    from lm_eval.api.model import TemplateLM

    return type("RunModel", (_RunModel, TemplateLM), {})(parts, params, on_batch)


class _RunModel:
    """Methods that the harness calls; `harness_model` adds its base class."""

    def __init__(self, parts: Parts, params: Params | None, on_batch: Callable[[], None]) -> None:
        """Prepare a run for the harness without compiling; `params` are in model order."""
        super().__init__()
        if parts.model.decoding is None:
            raise ConfigError(
                f"model {parts.model.name!r} does not generate text. Name a decoder's run."
            )
        data = parts.config.data
        self._parts, self._on_batch = parts, on_batch
        self._params: Any = params
        self._tokenizer: Tokenizer = load_tokenizer(
            data.tokenizer_name, data.eos_token, data.text_format
        )
        # Rotary positions have no end, but longer texts than those of the training are unusual.
        trained = parts.config.model.max_seq_len or parts.config.train.seq_len
        self.max_length = min(parts.model.decoding.max_len, trained)
        self.batch_size = parts.config.train.global_batch_size
        values = make_row_values(
            parts.model, parts.layout, parts.plan, parts.step.context, _row_values
        )
        replicated = parts.layout.sharding(P())
        self._values = jax.jit(values, out_shardings=replicated)
        self._decoders: dict[TextSettings, Decoder] = {}
        self._execution_params = None if params is None else parts.in_execution_order(params)

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text; raise ConfigError without one."""
        if self._tokenizer.end_id is None:
            raise ConfigError(
                f"tokenizer {self._tokenizer.name!r} has no end token, which tasks need. Use a run "
                "with data.eos_token."
            )
        return self._tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that begins a text without a context."""
        begin = self._tokenizer.bos_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text, with those that begin one if the tokenizer adds them."""
        del kwargs
        tokens = self._tokenizer.encode(string)
        if add_special_tokens is not False:
            tokens = begin_text(self._tokenizer, tokens)
        return tokens.tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether its tokens are the likeliest."""
        del kwargs
        rows = [(context + target, len(target)) for _, context, target in requests]
        rows = [(tokens[-(self.max_length + 1) :], count) for tokens, count in rows]
        if long := [count for _, count in rows if count > self.max_length]:
            raise ConfigError(
                f"{len(long)} continuations have more than {self.max_length} tokens, the longest "
                "rows of this model. Use other tasks, or a model with longer rows."
            )
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        with Progress("scoring", len(rows), "texts") as progress:
            for first in range(0, len(order), self.batch_size):
                chosen = order[first : first + self.batch_size]
                values = self._score([rows[i] for i in chosen])
                for i, logp, misses in zip(chosen, *values, strict=False):
                    results[i] = float(logp), not misses
                progress.advance(len(chosen))
                self._on_batch()
        return results

    def _score(self, rows: list[tuple[list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's log-probability and number of misses, float32 [batch_size] each.

        A row is a text's token ids and the number of scored ones at its end. A miss is a scored
        token that is not the most likely.
        """
        layout, longest = self._parts.layout, max(len(tokens) - 1 for tokens, _ in rows)
        shards = 2 * layout.size(CONTEXT) * layout.size(TENSOR)
        multiple = math.lcm(_BUCKET, shards)
        width = -(-longest // multiple) * multiple
        if self.max_length % shards == 0:
            width = min(width, self.max_length)
        batch: dict[str, Any] = {
            name: np.zeros((self.batch_size, width), dtype)
            for name, dtype in (("tokens", "i4"), ("targets", "i4"), ("weights", "f4"))
        }
        for row, (tokens, count) in enumerate(rows):
            length = len(tokens) - 1
            batch["tokens"][row, :length] = tokens[:-1]
            batch["targets"][row, :length] = tokens[1:]
            batch["weights"][row, length - count : length] = 1
        placed = place_batch(batch, self._parts.step.batch_sharding)
        values = jax.device_get(self._values(self._execution_params, placed))
        return values["logps"], values["misses"]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each complete text, in disjoint windows."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        del disable_tqdm
        windows, owners = [], []
        for number, request in enumerate(requests):
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for part in parts:
                windows.append((None, *make_disjoint_window(part)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (logp, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += logp
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of its stop sequences."""
        del disable_tqdm
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        with Progress("generating", len(requests), "texts") as progress:
            for numbers in groups.values():
                # Contexts of similar length share a batch, the longest first.
                encode = lambda text: self.tok_encode(text) or [self.prefix_token_id]
                prompts = {i: encode(requests[i].args[0]) for i in numbers}
                numbers.sort(key=lambda i: -len(prompts[i]))
                for first in range(0, len(numbers), self.batch_size):
                    chosen = numbers[first : first + self.batch_size]
                    options = requests[chosen[0]].args[1]
                    texts = self._generate([prompts[i] for i in chosen], options)
                    for i, text in zip(chosen, texts, strict=True):
                        answers[i] = text
                    progress.advance(len(chosen))
                    self._on_batch()
        return answers

    def _generate(self, prompts: list[list[int]], options: dict[str, Any]) -> list[str]:
        """Return the continuations of a batch of prompts with the same options."""
        from lm_eval.models import utils

        kwargs = utils.normalize_gen_kwargs(options, 256)
        until = utils.handle_stop_sequences(kwargs.pop("until", None), eos=None)
        count = min(kwargs.pop("max_gen_toks"), self.max_length - 1)
        sampled = kwargs.get("do_sample", False)
        settings = TextSettings(
            max_new_tokens=count, temperature=kwargs.get("temperature", 1.0) if sampled else 0.0
        )
        cut = [np.array(prompt[-(self.max_length - count) :]) for prompt in prompts]
        # Devices share the rows of a complete batch.
        cut += [cut[0]] * (self.batch_size - len(cut))
        if settings not in self._decoders:
            self._decoders[settings] = make_decoder(self._parts, self._params, settings)
        decoder = self._decoders[settings]
        generated: list[list[int]] = [[] for _ in prompts]
        texts, open_rows = [""] * len(prompts), {*range(len(prompts))}
        for tokens in decoder.tokens(cut, max_new_tokens=count, stop=self._tokenizer.stop_ids):
            for row in open_rows.copy():
                token = tokens[row]
                if token is None or token in self._tokenizer.stop_ids:
                    open_rows.remove(row)
                    continue
                generated[row].append(token)
                texts[row] = self._tokenizer.decode(generated[row])
                if any(stop in texts[row] for stop in until):
                    open_rows.remove(row)
            if not open_rows:
                break
        return [utils.postprocess_generated_text(text, until, None) for text in texts]


def _row_values(output: TokenHead, batch: Batch, context: Context) -> dict[str, Array]:
    """Return each row's log-probability and number of targets that are not likeliest, [batch]."""
    most_likely = context.token_logps(output, batch["targets"], top_k=1).logps
    is_missed = (batch["weights"] > 0) & jnp.isneginf(most_likely)
    misses = context.sum(jnp.sum(is_missed.astype(jnp.float32), axis=1), "seq")
    return {"logps": row_logps(output, batch, context), "misses": misses}
