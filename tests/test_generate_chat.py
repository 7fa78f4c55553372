"""Generation: end of a text, prompts of a conversation, output to a file."""

import dataclasses
import io
import json

import numpy as np
import pytest
from decoders import FAMILIES
from hf_models import CHATML, write_model, write_tokenizer
from refusals import refused

from jaxdist import generate
from jaxdist.data import load_tokenizer
from jaxdist.data.chat import load_template
from jaxdist.run.text_generation import Decoder
from jaxdist.settings import ConfigError
from jaxdist.tools.convert.__main__ import main as convert

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
    """Copy only the tokenizer, with these JSON files next to it."""
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
