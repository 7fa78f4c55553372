"""`python -m jaxdist.generate RUN`: generate text from a checkpoint.

Prompts of any lengths are continued together; a single one is printed as it grows. It runs on any
legal mesh, whatever mesh the run was trained on.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.core.types import ConfigError, setting
from jaxdist.runtime import run_command

if TYPE_CHECKING:
    import numpy as np

    from jaxdist.core.types import Array, Model, Params

_BUCKET = 64
"""Prompt and cache lengths are rounded up to a multiple of this, so that few programs compile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to continue, how, and where."""

    run: str = setting("", "run directory, or one of its checkpoints")
    prompt: tuple[str, ...] = setting(("\n",), "text to continue; may be given several times")
    prompt_file: str = setting("", "file with one prompt per line, instead of --prompt")
    max_new_tokens: int = setting(200, "tokens to add to each prompt", ge=1)
    temperature: float = setting(
        0.8, "divides the logits before sampling; 0 = always the likeliest token", ge=0
    )
    top_k: int = setting(0, "sample from this many likeliest tokens only; 0 = all", ge=0)
    top_p: float = setting(
        1.0, "sample from the likeliest tokens that hold this probability; 1 = all", gt=0, le=1
    )
    seed: int = setting(0, "seed of the sampling")
    stop_at_end: bool = setting(True, "stop a text at the tokenizer's end-of-text token")
    step: int = setting(-1, "step of the checkpoint; -1 = the newest valid one", ge=-1)
    mesh: str = setting("auto", "mesh axes, e.g. tp=2; auto = one device")
    simulate: int = setting(0, "simulated CPU devices; 0 = the machine's own devices", ge=0)

    def problems(self) -> list[str]:
        """Violated rules beyond the bounds of each setting."""
        problems = []
        if not self.run:
            problems.append("no run was named. Give a run directory: jaxdist generate runs/NAME.")
        if self.prompt_file and not Path(self.prompt_file).is_file():
            problems.append(f"prompt_file={self.prompt_file!r} is no file. Name a text file.")
        return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint and write continuations to stdout."""
    from jaxdist.core.settings import read_settings

    config = read_settings(
        GenerateConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.generate",
        summary=__doc__ or "",
        positional=("run",),
    )
    from jaxdist.data import load_tokenizer
    from jaxdist.run.trained_run import open_run

    run = open_run(config.run, mesh=config.mesh, simulate=config.simulate)
    model, data = run.parts.model, run.parts.config.data
    if model.decoding is None:
        raise ConfigError(f"model {model.name!r} does not generate text. Name a decoder's run.")
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    file = config.prompt_file
    prompts = Path(file).read_text().splitlines() if file else list(config.prompt)
    tokens = [tokenizer.encode(text) for text in prompts]
    _check_prompts(tokens, model.decoding.max_len, config.max_new_tokens)
    params, step = run.params(None if config.step < 0 else config.step)
    print(f"checkpoint {step} of {run.path}, mesh {run.parts.spec}", file=sys.stderr)
    stop = tokenizer.end_id if config.stop_at_end else None
    dtype = run.parts.compute_dtype
    texts = generate(model, params, run.parts.layout, tokens, config, dtype=dtype, stop=stop)
    _write(texts, prompts, tokenizer)
    return 0


def generate(
    model: Model,
    params: Params,
    layout: Any,
    prompts: Sequence[np.ndarray],
    config: GenerateConfig,
    *,
    dtype: Any,
    stop: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue prompts together, one token of each at a time.

    Args:
        model: a model with `decoding`.
        params: tree of float32 arrays, sharded as in training.
        layout: of the mesh that holds the parameters.
        prompts: token ids, int [length] each; lengths ≥ 1 may differ.
        config: number of tokens and sampling.
        dtype: compute dtype.
        stop: token id that ends a text; None = none does.

    Yields:
        The next token id of each text; None for texts that have ended.
    """
    import jax
    import numpy as np

    decode, sample = _compiled(model, layout, config, dtype)
    lengths = np.array([len(p) for p in prompts])
    width = _round_up(int(lengths.max()))
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    index = np.arange(width)
    positions = np.where(index < lengths[:, None], index, -1).astype(np.int32)
    cache = _new_cache(model, layout, len(prompts), width + config.max_new_tokens, dtype)
    logits, cache = decode(params, cache, tokens, positions)
    last = logits[np.arange(len(prompts)), lengths - 1]
    key = jax.random.key(config.seed)
    done = np.zeros(len(prompts), bool)
    for count in range(config.max_new_tokens):
        chosen = np.asarray(sample(last, jax.random.fold_in(key, count)))
        if stop is not None:
            done |= chosen == stop
        yield [None if done[row] else int(chosen[row]) for row in range(len(prompts))]
        if done.all() or count + 1 == config.max_new_tokens:
            return
        place = (lengths + count)[:, None].astype(np.int32)
        logits, cache = decode(params, cache, chosen[:, None].astype(np.int32), place)
        last = logits[:, 0]


def sample_tokens(
    logits: Array, key: Array, *, temperature: float, top_k: int, top_p: float
) -> Array:
    """Draw one token per row.

    Args:
        logits: float32 [batch, vocab].
        key: consumed.
        temperature: divides the logits; 0 takes the likeliest.
        top_k: keeps this many likeliest; 0 = all.
        top_p: keeps the likeliest tokens up to the one at which their probability reaches top_p
            (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1).

    Returns:
        int32 [batch].
    """
    import jax
    import jax.numpy as jnp

    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / temperature
    if top_k and top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p < 1:
        order = jnp.argsort(-logits, axis=-1)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, -1))
        before = jnp.cumsum(probs, -1) - probs
        keep = jnp.zeros(logits.shape, bool)
        keep = keep.at[jnp.arange(len(logits))[:, None], order].set(before < top_p)
        logits = jnp.where(keep, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _compiled(model: Model, layout: Any, config: GenerateConfig, dtype: Any) -> tuple[Any, Any]:
    import jax

    from jaxdist.core.attention import make_attend
    from jaxdist.core.collective_order import in_order
    from jaxdist.core.types import Context

    decoding = model.decoding
    assert decoding is not None
    platform = layout.mesh.devices.flat[0].platform
    platform = "gpu" if platform in ("gpu", "cuda") else platform
    context = Context(dtype=dtype, platform=platform, attend=make_attend(platform=platform))

    # Products take their weights in the compute dtype; the masters stay float32.
    decode = lambda *arrays: decoding.step(*arrays, context)
    if layout.mesh.size > 1 and platform == "cpu":
        decode = in_order(decode, hidden=True)

    def sample(logits: Array, key: Array) -> Array:
        return sample_tokens(
            logits, key, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
        )

    return jax.jit(decode, donate_argnums=1), jax.jit(sample)


def _new_cache(model: Model, layout: Any, batch: int, max_len: int, dtype: Any) -> Any:
    import jax

    decoding = model.decoding
    assert decoding is not None
    make = lambda: decoding.init_cache(batch, _round_up(max_len), dtype)
    shardings = layout.shardings(layout.param_specs(decoding.cache_dims))
    return jax.jit(make, out_shardings=shardings)()


def _check_prompts(tokens: Sequence[np.ndarray], max_len: int, max_new_tokens: int) -> None:
    problems = []
    for number, prompt in enumerate(tokens, 1):
        if not len(prompt):
            problems.append(f"prompt {number} is empty. Give it at least one character.")
        if len(prompt) + max_new_tokens > max_len:
            problems.append(
                f"prompt {number} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} "
                f"it outgrows the model's {max_len} positions. Shorten one of them."
            )
    if not tokens:
        problems.append("there is no prompt. Give --prompt TEXT, or a prompt_file with lines.")
    if problems:
        raise ConfigError(problems)


def _round_up(length: int) -> int:
    return -(-length // _BUCKET) * _BUCKET


def _write(texts: Iterator[list[int | None]], prompts: list[str], tokenizer: Any) -> None:
    """One prompt streams as it grows; several are printed one after another at the end."""
    made: list[list[int]] = [[] for _ in prompts]
    alone, shown = len(prompts) == 1, 0
    if alone:
        print(prompts[0], end="", flush=True)
    for tokens in texts:
        for row, token in zip(made, tokens, strict=True):
            if token is not None:
                row.append(token)
        if alone:
            # The last character may be half of one that the next token completes.
            whole = tokenizer.decode(made[0]).rstrip("\ufffd")
            print(whole[shown:], end="", flush=True)
            shown = max(shown, len(whole))
    if alone:
        print(tokenizer.decode(made[0])[shown:])
        return
    for number, (prompt, row) in enumerate(zip(prompts, made, strict=True), 1):
        print(f"--- {number} ---\n{prompt}{tokenizer.decode(row)}\n")


if __name__ == "__main__":
    run_command(main)
