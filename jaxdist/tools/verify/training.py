"""Checks of a run: first weights, moments, checkpoint, and the weights that `generate` loads."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint import CheckpointError, pytree
from jaxdist.checkpoint.checksum import checksums
from jaxdist.checkpoint.events import one_line
from jaxdist.checkpoint.pytree import Weights
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.core.types import Array, Params
from jaxdist.core.weights import GROUPS
from jaxdist.optim.groups import rate_factor
from jaxdist.run.command_settings import TextSettings
from jaxdist.run.gradient_checks import (
    FIRST_STEPS,
    INPUT_ROWS,
    has_parts,
    moments_of,
    named,
    names_of,
    part_names,
    unused_inputs,
    zero_moments,
)
from jaxdist.run.setup import Parts
from jaxdist.run.text_generation import Decoder
from jaxdist.run.trained_run import TrainedRun
from jaxdist.runtime.storage import Location
from jaxdist.settings import ConfigError

SAMPLE_SHAPE = (2, 16)
"""Rows and maximum positions of the random tokens whose logits are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: `summary`, which is "" if there are `problems`.

    `is_done` is False if the check could not be made, and `summary` is the reason.
    """

    name: str
    summary: str
    problems: list[str] = dataclasses.field(default_factory=list)
    is_done: bool = True

    def __post_init__(self) -> None:
        if self.problems:
            object.__setattr__(self, "summary", "")


class Trained:
    """A run, one of its checkpoints, and the weights in it that `generate` loads.

    `loaded` is None if they cannot be loaded, with the reason in `load_error`.
    """

    def __init__(self, run: TrainedRun, checkpoint: Location, weights: Weights) -> None:
        self.run, self.parts, self.step = run, run.parts, int(checkpoint.name)
        self.stored = StoredArrays(checkpoint)
        self.entries = self.stored.entries
        self.item = pytree.weights_item(weights, self.entries)
        self.loaded: Params | None = None
        self.load_error = ""
        try:
            self.loaded = run.weights(self.step, weights).params
        except (ConfigError, CheckpointError) as error:
            self.load_error = one_line(error)

    @functools.cached_property
    def updates(self) -> dict[str, str]:
        """Parameter -> what changes it in training, its `Parameter.update`, e.g. "gradient"."""
        return {name: dims.update for name, dims in named(self.parts.model.axes).items()}

    @property
    def tokens(self) -> list[int]:
        """The tokens whose rows are trained next to adapters."""
        return self.parts.config.lora.token_ids

    @functools.cached_property
    def moments(self) -> dict[str, list[str]]:
        """Trained parameter -> the names of its optimizer moments in the checkpoint."""
        stored = [name for name in self.entries if pytree.under(name, ["opt_state"])]
        moved = [name for name, update in self.updates.items() if update == "gradient"]
        return {name: moments_of(name, stored) for name in moved}

    @functools.cached_property
    def zeros(self) -> dict[str, np.ndarray]:
        """Trained parameter -> whether a moment is all zeros, bool [] or [layers or tokens]."""
        zeros = {}
        for name, own in self.moments.items():
            arrays = {moment: self.stored.read(moment) for moment in own}
            shape = tuple(self.entries[self.stored_as(name)]["shape"])
            zeros[name] = zero_moments(arrays, name, shape, len(self.tokens))
        return zeros

    def stored_as(self, parameter: str) -> str:
        """Return a parameter's name in the checkpoint; "" if the checkpoint lacks it."""
        names = (f"{self.item}/{parameter}", f"{GROUPS['model'].item}/{parameter}")
        return next((name for name in names if name in self.entries), "")


def check_run(trained: Trained) -> list[Check]:
    """Return the checks of a run without its exports: arrays, moments, changes, loading."""
    checks = [_check_arrays(trained)]
    if trained.step < FIRST_STEPS:
        few_steps = f"after {trained.step} steps; {FIRST_STEPS} are needed"
        checks.append(Check(name="training", summary=few_steps, is_done=False))
    else:
        checks += [_check_moments(trained), *_check_changes(trained)]
    return [*checks, _check_loading(trained)]


def _check_arrays(trained: Trained) -> Check:
    """Check that all arrays on disk are finite and have the checksums computed at the save."""
    problems = []
    for name in trained.entries:
        try:
            is_finite = True
            for _, part in trained.stored.blocks(name):
                if jnp.issubdtype(part.dtype, jnp.floating):
                    is_finite &= bool(np.isfinite(part.astype(np.float32)).all())
            if not is_finite:
                problems.append(f"{name} contains NaN or infinity.")
        except (CheckpointError, ValueError, OSError) as error:
            problems.append(f"{one_line(error)}.")
    count = len(trained.entries)
    text = f"{count} arrays are finite and have the checksums computed at the save"
    return Check(name="checkpoint", summary=text, problems=problems)


def _check_moments(trained: Trained) -> Check:
    """Check that optimizer moments exist and are nonzero, and that updates were counted."""
    state = trained.parts.without_base(trained.parts.abstract_state())
    problems = [
        f"{leaf.name} is missing."
        for leaf in pytree.leaves_of(state)
        if leaf.item == "opt_state" and leaf.name not in trained.entries
    ]
    tokens = trained.tokens
    problems += [f"{text} received no gradient." for text in names_of(trained.zeros, tokens)]
    for name in trained.entries:
        if pytree.under(name, ["opt_state"]) and name.endswith("/count"):
            value = int(trained.stored.read(name))
            if not 0 < value <= trained.step:
                problems.append(f"{name} is {value} after {trained.step} steps.")
    count = sum(map(len, trained.moments.values()))
    text = f"{count} moments of {len(trained.moments)} trained parameters, none zero in any layer"
    if unused := [tokens[i] for i in np.flatnonzero(unused_inputs(trained.zeros))]:
        text += (
            f"; the input rows of tokens {', '.join(map(str, unused))} had no gradient, which is "
            "correct if they are never an input before a learned token"
        )
    if not count and not problems:
        return Check(name="gradients", summary="the optimizer has no moments", is_done=False)
    return Check(name="gradients", summary=text, problems=problems)


def _check_changes(trained: Trained) -> list[Check]:
    """Check that logits and all trained weights, but no frozen ones, differ from the start's."""
    if trained.loaded is None:
        return []
    try:
        start = trained.parts.start_params()
    except (ConfigError, OSError) as error:
        text = f"the weights before training cannot be loaded: {one_line(error)}"
        return [Check(name="changes", summary=text, is_done=False)]
    before = named(start)
    problems, counts = [], {"changed": 0, "frozen": 0}
    unchanged: dict[str, np.ndarray] = {}
    optim = trained.parts.config.optim
    for name, array in before.items():
        update = trained.updates[name]
        stands_still = update == "none" or not optim.peak_lr * rate_factor(optim, name)
        stored = f"{GROUPS['model'].item}/{name}"
        if stored not in trained.entries:  # the base of adapters, compared by its digest
            counts["frozen"] += 1
            continue
        now = jnp.asarray(trained.stored.read(stored))
        split = has_parts(name, now.shape, len(trained.tokens))
        changed = np.asarray(_changed(array, now, split))
        counts["frozen" if stands_still else "changed"] += 1
        if stands_still:
            texts = part_names(name, changed, trained.tokens)
            problems += [f"{text} is not trained, but differs from its start." for text in texts]
        else:
            unchanged[name] = ~changed
    if INPUT_ROWS in unchanged:  # without moments, zeros are False
        idle = trained.zeros[INPUT_ROWS] | (not trained.moments[INPUT_ROWS])
        unchanged[INPUT_ROWS] &= ~(unused_inputs(unchanged) & idle)
    problems += [
        f"{text} did not change."
        for name, flags in unchanged.items()
        for text in part_names(name, flags, trained.tokens)
    ]
    text = f"{counts['changed']} trained parameters changed in every layer"
    text += f", {counts['frozen']} frozen ones kept every bit" if counts["frozen"] else ""
    checks = [Check(name="changes", summary=text, problems=problems)]
    first, last = (sample_logits(trained.parts, params) for params in (start, trained.loaded))
    if first is not None and last is not None:
        largest = float(np.max(np.abs(last - first)))
        problem = "logits equal those before training: the training has no effect on them."
        text = f"logits differ from those before training by up to {largest:.2g}"
        checks.append(Check(name="effect", summary=text, problems=[problem] * (not largest)))
    return checks


@functools.partial(jax.jit, static_argnums=2)
def _changed(before: Array, now: Array, is_stacked: bool) -> Array:
    """Return bool [num_layers] or []: any value of the two arrays [...] differs."""
    return jnp.any(before != now.astype(before.dtype), axis=tuple(range(is_stacked, now.ndim)))


def _check_loading(trained: Trained) -> Check:
    """Check by checksums that the weights that `generate` loads are the checkpoint's."""
    if trained.loaded is None:
        return Check(name="loading", summary="", problems=[trained.load_error])
    problems = []
    loaded = named(trained.loaded)
    compared = {
        name: stored
        for name, x in loaded.items()
        if (stored := trained.stored_as(name)) and trained.entries[stored]["dtype"] == x.dtype.name
    }
    sums = checksums([loaded[name] for name in compared])
    for (name, stored), value in zip(compared.items(), sums, strict=True):
        entry = trained.entries[stored]
        if entry["shape"] != list(loaded[name].shape) or entry["checksum"] != value:
            problems.append(f"{name} is loaded with other values than {stored} has.")
    for stored in trained.entries:
        item, _, name = stored.partition("/")
        if item == trained.item and name not in loaded:
            problems.append(f"{stored} is stored, but not loaded.")
    text = f"{len(compared)} arrays are loaded with the checksums of the save"
    if rest := len(loaded) - len(compared):
        text += f"; {rest} others are frozen ones with the digest of the run, or cast"
    return Check(name="loading", summary=text, problems=problems)


def sample_logits(parts: Parts, params: Params) -> np.ndarray | None:
    """Return logits, float32 [rows, positions, vocab], of random tokens; None without decoding.

    The model decodes as in `generate`, but in float32.
    """
    if parts.model.decoding is None or parts.model.vocab_size is None:
        return None
    tokens = np.random.default_rng(0).integers(0, parts.model.vocab_size, SAMPLE_SHAPE, np.int32)
    plan = dataclasses.replace(parts.plan, compute_dtype=jnp.float32)
    decoder = Decoder(parts.model, params, parts.layout, plan, TextSettings())
    return decoder.logits(tokens[:, : parts.model.decoding.max_len])
