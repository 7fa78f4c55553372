"""Text generation: the tokens of each row of a batch, sampling, and printed output."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import FAMILIES, logits_of, random_params, random_tokens
from tiny import plan_of

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import Layout
from jaxdist.generate import GenerateConfig, _print
from jaxdist.models import build
from jaxdist.run.text_generation import Decoder, Writer, prompt_problems, sample_tokens
from jaxdist.run.text_settings import TextSettings

ROWS = 20_000
"""Draws of one call: a frequency p has a standard error of sqrt(p (1 - p) / ROWS) ≤ 0.0035."""


@pytest.fixture(scope="module")
def case():
    """Return a decoder, its parameters, three prompts of unequal lengths, and expected tokens.

    The reference recomputes the complete text for each token, one prompt at a time, without a
    cache.
    """
    config = FAMILIES["llama3.1"]
    model = build(config, seq_len=16)
    params = random_params(model)
    # Weights of 0.1 give the same tokens after every text; larger ones depend on the context.
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 2 else x, params)
    prompts = [random_tokens(1, length, seed=length)[0] for length in (9, 2, 5)]
    expected = []
    for prompt in prompts:
        text = np.zeros((1, 16), np.int32)
        text[0, : len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + 6):
            logits = np.asarray(logits_of(model, params, {"tokens": text}))
            text[0, end] = logits[0, end - 1].argmax()
        expected.append(text[0, len(prompt) : len(prompt) + 6].tolist())
    return model, params, prompts, expected


def generate_tokens(case, stop=(), seed=0, mesh="dp=1", **sampling):
    model, params, prompts, _ = case
    spec = MeshSpec.parse(mesh)
    layout = Layout(mesh=spec.build(jax.devices()[: spec.num_devices]))
    params = jax.device_put(params, layout.shardings(layout.param_specs(model.axes)))
    sampling = TextSettings(**sampling)
    decoder = Decoder(model, params, layout, plan_of(model, layout), sampling)
    steps = decoder.tokens(prompts, max_new_tokens=6, stop=stop, seed=seed)
    return [list(row) for row in zip(*steps, strict=True)]


def test_every_row_continues_from_the_end_of_its_own_prompt(case):
    expected = case[-1]
    assert len(set(map(tuple, expected))) == 3  # equal rows would hide a wrong position
    assert generate_tokens(case, temperature=0.0) == expected


def test_context_parallel_generation_matches_one_device(case):
    assert generate_tokens(case, temperature=0.0, mesh="cp=4,tp=2") == case[-1]


def test_devices_hold_the_keys_of_their_own_positions_and_heads(case):
    model, params, *_ = case
    layout = Layout(mesh=MeshSpec.parse("cp=4,tp=2").build(jax.devices()))
    sampling = TextSettings(temperature=0.0)
    decoder = Decoder(model, params, layout, plan_of(model, layout), sampling)
    for leaf in jax.tree.leaves(decoder._new_cache(3, 16)):
        layers, rows, positions, heads, width = leaf.shape
        held = (layers, rows, positions // 4, heads // 2, width)
        assert leaf.sharding.shard_shape(leaf.shape) == held


def test_row_that_has_ended_stops_and_changes_no_other(case):
    expected = case[-1]
    stop = next(token for token in expected[1] if token not in expected[0] + expected[2])
    end = expected[1].index(stop)
    ended = expected[1][: end + 1] + [None] * (5 - end)
    assert generate_tokens(case, temperature=0.0, stop={stop}) == [expected[0], ended, expected[2]]


def test_each_token_is_drawn_anew_and_depends_on_the_seed(case):
    flat = dict(temperature=1e6)  # every token equally likely: equal tokens mean equal draws
    first = generate_tokens(case, seed=1, **flat)
    assert first == generate_tokens(case, seed=1, **flat) != generate_tokens(case, seed=2, **flat)
    assert all(len(set(row)) > 2 for row in first)
    assert len(set(map(tuple, first))) == 3


def sampled_frequencies(probs, temperature=1.0, top_k=0, top_p=1.0):
    """Return how often each token is drawn from these probabilities."""
    logits = jnp.log(jnp.tile(jnp.array(probs), (ROWS, 1)))
    drawn = sample_tokens(
        logits, jax.random.key(0), temperature=temperature, top_k=top_k, top_p=top_p
    )
    assert drawn.shape == (ROWS,) and drawn.dtype == jnp.int32
    return np.bincount(np.asarray(drawn), minlength=len(probs)) / ROWS


PROBS = (0.05, 0.5, 0.15, 0.3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    {
        "all": ({}, PROBS),
        "temperature": (dict(temperature=0.5), np.square(PROBS) / np.square(PROBS).sum()),
        "the likeliest": (dict(temperature=0.0), (0, 1, 0, 0)),
        "top 1": (dict(top_k=1), (0, 1, 0, 0)),
        "top 2": (dict(top_k=2), (0, 0.5 / 0.8, 0, 0.3 / 0.8)),
        "top 3": (dict(top_k=3), (0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95)),
        "top 4 of 4": (dict(top_k=4), PROBS),
        "more than there are": (dict(top_k=9), PROBS),
        # 0.5 alone does not reach 0.6: the token that crosses it is part of the nucleus.
        "p crossed by the second": (dict(top_p=0.6), (0, 0.5 / 0.8, 0, 0.3 / 0.8)),
        "p reached by the first": (dict(top_p=0.45), (0, 1, 0, 0)),
        "p crossed by the third": (dict(top_p=0.9), (0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95)),
        # Of the two tokens that top_k keeps, the first has 0.625 of the probability.
        "p after k": (dict(top_k=2, top_p=0.6), (0, 1, 0, 0)),
        "p after temperature": (dict(temperature=0.5, top_p=0.6), (0, 1, 0, 0)),
    }.values(),
)
def test_tokens_are_drawn_with_the_expected_probabilities(settings, expected):
    actual = sampled_frequencies(PROBS, **settings)
    assert set(np.flatnonzero(actual)) == set(np.flatnonzero(expected))
    np.testing.assert_allclose(actual, expected, atol=0.015)  # four standard errors


def test_each_row_is_truncated_by_its_own_probabilities():
    logits = jnp.log(jnp.array([PROBS, PROBS[::-1]] * (ROWS // 2)))
    for settings in (dict(top_k=1, top_p=1.0), dict(top_k=0, top_p=0.4)):
        drawn = sample_tokens(logits, jax.random.key(0), temperature=1.0, **settings)
        np.testing.assert_array_equal(drawn, [1, 2] * (ROWS // 2))


def test_prompts_longer_than_the_model_are_reported():
    num_problems = [len(prompt_problems(np.arange(length), 16, 4)) for length in (12, 3, 13, 0)]
    assert num_problems == [0, 0, 1, 1]


def test_prompt_file_has_one_prompt_per_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\n second \nthird")
    config = GenerateConfig(run="none", prompt_file=str(file))
    texts = lambda config: [request["prompt"] for request in config.requests()]
    assert texts(config) == ["first", " second ", "third"]
    assert texts(dataclasses.replace(config, prompt_file="")) == ["\n"]
    assert config.problems() == []
    (problem,) = dataclasses.replace(config, prompt=("fourth",)).problems()
    assert f"prompt_file={str(file)!r}" in problem


class Utf8:
    """A byte tokenizer, in which a character may need several tokens."""

    stop_ids, marks_start = frozenset(), False

    def decode(self, tokens, *, show_special):
        return bytes(tokens).decode(errors="replace")


class Scripted:
    """A model that returns predefined tokens for each prompt."""

    def __init__(self, steps):
        self.tokens = lambda prompts, **settings: iter(steps)


def print_texts(steps, prompts, capsys) -> str:
    writer = Writer(GenerateConfig(run="none"), Utf8(), max_len=16)
    writer.decoder = Scripted(steps)
    _print(writer, [{"prompt": prompt} for prompt in prompts], prompts, batch_size=8)
    return capsys.readouterr().out


def test_output_is_prompt_and_text_if_tokens_split_characters(capsys):
    text = "naïve 漢字 ok"
    one = ([token] for token in [*text.encode(), None])
    assert print_texts(one, ["say: "], capsys) == f"say: {text}\n"
    cut = ([token] for token in "漢".encode()[:2])
    assert print_texts(cut, ["say: "], capsys) == "say: \ufffd\n"
    two = zip(b"abc", [*b"x", None, None], strict=True)
    assert (
        print_texts(map(list, two), ["1:", "2:"], capsys)
        == "--- 1 ---\n1:abc\n\n--- 2 ---\n2:x\n\n"
    )
