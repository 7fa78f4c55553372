"""Text generation: tokens of each row, sampling, chats, printed output, and the sample of a run."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from data_cases import open_text, write_text
from decoders import FAMILIES, logits_of, random_params, random_tokens
from hf_models import CHATML, write_model, write_tokenizer
from refusals import refused
from test_api import train
from tiny import plan_of

from jaxdist import generate
from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import Layout
from jaxdist.core.step import TrainConfig
from jaxdist.data import DataConfig, load_tokenizer
from jaxdist.data.chat import load_template
from jaxdist.generate import GenerateConfig, _print
from jaxdist.models import DecoderConfig, build
from jaxdist.run import session, text_generation
from jaxdist.run.command_settings import TextSettings
from jaxdist.run.setup import assemble
from jaxdist.run.text_generation import Decoder, Writer, prompt_problems, sample_tokens
from jaxdist.settings import ConfigError
from jaxdist.tools.convert.__main__ import main as convert

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


def test_equal_batches_have_other_samples(case):
    model, params, prompts, _ = case
    layout = Layout(mesh=MeshSpec().build(jax.devices()[:1]))
    sampling = TextSettings(temperature=1.0)
    decoder = Decoder(model, params, layout, plan_of(model, layout), sampling)
    first, second = (list(decoder.tokens(prompts, max_new_tokens=6)) for _ in range(2))
    assert first != second and [*zip(*first, strict=True)] == [
        tuple(row) for row in generate_tokens(case, temperature=1.0)
    ]


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


def test_logits_are_those_of_the_tokens_without_padding(case):
    model, params, *_ = case
    layout = Layout(mesh=MeshSpec().build(jax.devices()[:1]))
    decoder = Decoder(model, params, layout, plan_of(model, layout), TextSettings())
    text = np.arange(10, dtype=np.int32).reshape(2, 5)
    expected = np.asarray(logits_of(model, params, {"tokens": text}))
    np.testing.assert_allclose(decoder.logits(text), expected, rtol=1e-4, atol=1e-5)


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


def test_parquet_has_prompts_or_conversations(tmp_path):
    file, messages = tmp_path / "asks.parquet", [{"role": "user", "content": "hi"}]
    config = GenerateConfig(run="none", prompt_file=str(file), chat=True)
    both = {"prompt": ["hi", None], "messages": [None, messages]}
    for columns in ({"prompt": ["hi"]}, {"messages": [messages]}, both):
        parquet.write_table(pa.table(columns), file)
        assert {str(one["messages"]) for one in config.requests()} == {str(messages)}


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


TINY = DecoderConfig(d_model=32, num_layers=2, num_heads=4, mlp_dim=64)


@pytest.fixture
def parts(tmp_path):
    config = RunConfig(
        model=TINY,
        train=TrainConfig(seq_len=48, global_batch_size=8),
        data=DataConfig(sources=[str(write_text(tmp_path))]),
    )
    return assemble(config, jax.devices()[:1])


@pytest.fixture
def rows(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    return open_text(*parts.config.data.sources, seq_len=48)[0]


def test_the_training_text_is_continued_within_the_trained_length(parts, rows, capsys):
    params = parts.init_state().params
    prompt, text = text_generation.write_sample(parts, params, rows)
    assert prompt and prompt == text_generation.first_prompt(parts.config.data, rows)
    full_text = rows.tokenizer.decode(rows[0]["tokens"])
    assert " ".join(full_text.split()).startswith(prompt)
    assert text and len(prompt.encode()) + len(text) <= 48
    assert text_generation.write_sample(parts, params, rows) == (prompt, text)
    assert text_generation.write_sample(parts, params, iter([])) == ("", "")
    assert capsys.readouterr().out == ""  # the run logs it once it is complete


def test_the_prompt_of_a_conversation_is_its_first_question():
    """Weight 1 at position i marks that the next token is the assistant's."""
    tokens, weights = np.arange(8), np.array([0, 0, 0, 1, 1, 0, 0, 1], np.float32)
    row = {"tokens": tokens, "weights": weights}
    np.testing.assert_array_equal(text_generation.first_question(row), [0, 1, 2, 3])
    assert not len(text_generation.first_question({"tokens": tokens, "weights": 0 * weights}))


@pytest.mark.slow
def test_a_run_samples_if_enabled_and_survives_a_failure(tmp_path, monkeypatch):
    events = lambda run: [e for e in run.events if e["event"] == "sample"]
    evaluation = {"interval_steps": 1, "max_batches": 1, "final_max_batches": 1}
    samples = events(train(tmp_path / "always", steps=2, eval={**evaluation, "sample": "always"}))
    assert [e["step"] for e in samples] == [1, 2]
    assert all(e["prompt"] == "def __init__(self" and e["text"] for e in samples)
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise RuntimeError("no memory")

    monkeypatch.setattr(session, "write_sample", fail)
    monkeypatch.setattr(session, "MIN_STEPS", 2)
    run = train(tmp_path / "end", steps=2, eval=evaluation)
    assert run.exit_reason == "finished" and len(calls) == 1 and not events(run)


VOCAB = 320


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "model"
    config = dataclasses.replace(FAMILIES["qwen3"], vocab_size=VOCAB, max_seq_len=256)
    write_model(folder, config, scale=0.1)
    write_tokenizer(folder, ["Hello, who are you? I am a model."], VOCAB, CHATML)
    return folder


@pytest.fixture(scope="module")
def run_dir(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("generate") / "run"
    assert convert(["from-hf", str(model_folder), str(out)]) == 0
    return out


def ids(folder, *names: str) -> list[int]:
    vocab = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in vocab["added_tokens"]}
    return [added[name] for name in names]


def copy_with(model_folder, tmp_path, **files: dict):
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_text_ends_as_the_model_files_define(model_folder, tmp_path):
    end, asks, done = ids(model_folder, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    cases = [
        ({}, end, {end}),  # the usual name, if no file defines more
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, done, {done}),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, done, {done}),
        ({"generation_config": {"eos_token_id": [done, asks]}}, done, {done, asks}),
        ({"config": {"eos_token_id": done}}, done, {done}),
        (
            {
                "tokenizer_config": {"eos_token": "<|im_end|>"},
                "generation_config": {"eos_token_id": [end, done], "bos_token_id": asks},
                "config": {"eos_token_id": asks},
            },
            done,
            {end, done},
        ),
    ]
    for number, (files, end_id, stop_ids) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer = copy_with(model_folder, folder, **files)
        assert (tokenizer.end_id, tokenizer.stop_ids) == (end_id, stop_ids), files
    assert tokenizer.bos_id == asks


def test_chat_stops_at_the_answer_end_of_its_template(model_folder, tmp_path):
    end, done = ids(model_folder, "<|endoftext|>", "<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = copy_with(model_folder, tmp_path)  # reads the files next to it
    assert tokenizer.stop_ids == {end}
    assert load_template("auto", tokenizer).stop_ids == {end, done}
    assert load_template("plain", tokenizer).stop_ids == {end}


def test_prompt_is_the_trained_conversation_up_to_the_answer(model_folder):
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "I am"},
        {"role": "user", "content": "who?"},
    ]
    answer = {"role": "assistant", "content": "a model"}
    for tokenizer in (
        load_tokenizer(str(model_folder / "tokenizer.json")),
        load_tokenizer("bytes"),
    ):
        template = load_template("auto", tokenizer)
        prompt, complete = template.prompt(talk), template.encode([*talk, answer])
        np.testing.assert_array_equal(complete.tokens[: len(prompt)], prompt)
        assert complete.weights[: len(prompt)].sum() == len(tokenizer.encode("I am")) + 1
        assert complete.weights[len(prompt)] == 1


def scripted(monkeypatch, answers: list[str], tokenizer) -> list[str]:
    """Let the model generate `answers`, one per call, each terminated; return its prompts."""
    prompts_received, remaining = [], iter(answers)

    def tokens(self, prompts, *, max_new_tokens, stop, seed):
        prompts_received.extend(tokenizer.decode(prompt, show_special=True) for prompt in prompts)
        made = [*tokenizer.encode(next(remaining)), tokenizer.end_id]
        assert tokenizer.end_id in stop
        for token in made:
            yield [int(token)] * len(prompts)

    monkeypatch.setattr(Decoder, "tokens", tokens)
    return prompts_received


def test_chat_keeps_its_turns_until_reset(run_dir, monkeypatch, capsys):
    tokenizer = load_tokenizer(str(run_dir / "tokenizer" / "tokenizer.json"))
    prompts_received = scripted(monkeypatch, ["I am", "a model", "Hello"], tokenizer)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nwho?\n/new\nyou\n"))
    assert generate.main([str(run_dir), "--chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "I am\na model\nHello\n"
    turn = lambda role, text: f"<|im_start|>{role}\n{text}<|im_end|>\n"
    start, opened = turn("system", "Be brief."), "<|im_start|>assistant\n"
    assert prompts_received == [
        start + turn("user", "Hello") + opened,
        start + turn("user", "Hello") + turn("assistant", "I am") + turn("user", "who?") + opened,
        start + turn("user", "you") + opened,
    ]


def test_answers_in_a_file_are_training_data(run_dir, tmp_path, capsys):
    asks, out = tmp_path / "asks.jsonl", tmp_path / "answers.jsonl"
    messages = [{"role": "user", "content": "Hello"}]
    asks.write_text(
        json.dumps({"prompt": "who?"}) + "\n" + json.dumps({"messages": messages}) + "\n"
    )
    flags = [str(run_dir), "--chat", "--prompt_file", str(asks), "--max_new_tokens=3"]
    assert generate.main([*flags, "--out", str(out), "--batch_size=1"]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [[m["role"] for m in answer["messages"]] for answer in answers] == [
        ["user", "assistant"]
    ] * 2
    assert answers[1]["messages"][0] == messages[0]
    assert {answer["finish_reason"] for answer in answers} <= {"stop", "length"}
    with pytest.raises(ConfigError, match="is not overwritten"):
        generate.main([*flags, "--out", str(out)])


def test_special_tokens_are_printed_on_request(run_dir, monkeypatch, capsys):
    tokenizer = load_tokenizer(str(run_dir / "tokenizer" / "tokenizer.json"))
    scripted(monkeypatch, ["I am", "I am"], tokenizer)
    generate.main([str(run_dir), "--prompt", "Hello"])
    generate.main([str(run_dir), "--prompt", "Hello", "--show_special"])
    assert capsys.readouterr().out == "HelloI am\nHelloI am<|im_end|>\n"


@pytest.mark.parametrize(
    ("lines", "flags", "error"),
    [
        ('{"text": "a"}', [], "asks.jsonl:1 has no text 'prompt'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ["--chat"], "user"),
        ('{"messages": []}', [], "has no text 'prompt'"),
        ("{", [], "asks.jsonl:1"),
    ],
)
def test_bad_prompts_are_reported_before_weights_are_read(run_dir, tmp_path, lines, flags, error):
    (tmp_path / "asks.jsonl").write_text(lines + "\n")
    with pytest.raises(ConfigError, match=error):
        generate.main([str(run_dir), "--prompt_file", str(tmp_path / "asks.jsonl"), *flags])


def test_exported_model_has_begin_and_end_tokens(run_dir, model_folder, tmp_path):
    assert convert(["to-hf", str(run_dir), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    begin, end = ids(model_folder, "<|endoftext|>", "<|im_end|>")
    assert (written["bos_token_id"], written["eos_token_id"]) == (begin, end)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": begin, "eos_token_id": end}


def test_run_without_a_checkpoint_is_rejected(run_dir, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").write_text((run_dir / "config.toml").read_text())
    with refused(tmp_path, "no checkpoint", "--resume") as caught:
        generate.main([str(tmp_path)])
    assert "--step" not in str(caught.value)
