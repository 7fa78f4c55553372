"""The sample text at the end of a run: its prompt, when it is generated, and failures."""

import jax
import numpy as np
import pytest
from data_cases import open_text, write_text
from test_api import train

from jaxdist.config import RunConfig
from jaxdist.core.step import TrainConfig
from jaxdist.data import DataConfig
from jaxdist.models import DecoderConfig
from jaxdist.run import session, text_generation
from jaxdist.run.setup import assemble

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
    rows = [{"tokens": tokens, "weights": weights}]
    np.testing.assert_array_equal(text_generation.first_question(rows), [0, 1, 2, 3])
    assert not len(text_generation.first_question([{"tokens": tokens, "weights": 0 * weights}]))


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
