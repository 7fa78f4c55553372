"""Panics of libraries written in Rust end as a `ConfigError`: they are no `Exception`."""

import json

import pytest
from refusals import refused

from jaxdist.data.tokenizer import load_tokenizer
from jaxdist.runtime.storage import url_problem
from jaxdist.runtime.storage.location import panics_as

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
MISSING = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}


def write_tokenizer(path, **parts) -> str:
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": BPE, **parts}))
    return str(path / "tokenizer.json")


@pytest.mark.parametrize(
    "parts",
    {
        "character_map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "merges": {"model": {**BPE, "merges": ["a b"], "continuing_subword_prefix": "##"}},
        "missing_special_token": {
            "post_processor": {**MISSING, "single": [{"SpecialToken": {"id": "X", "type_id": 0}}]}
        },
        "missing_unknown_token": {
            "model": {
                "type": "WordPiece", "unk_token": "U", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 9, "vocab": {"b": 0},
            }
        },
    }.values(),
)  # fmt: skip
def test_a_tokenizer_that_fails_while_it_is_loaded_is_rejected(tmp_path, parts):
    name = write_tokenizer(tmp_path, **parts)
    with refused(repr(name), "tokenizer.json"):
        load_tokenizer(name)


def test_a_pattern_that_fails_on_a_text_is_rejected(tmp_path):
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    name = write_tokenizer(tmp_path, pre_tokenizer={**pattern, "invert": False})
    tokenizer = load_tokenizer(name)
    text = "a" * 40 + "b"
    for encode in (tokenizer.encode, tokenizer.encode_spans, lambda t: tokenizer.encode_batch([t])):
        with refused(repr(name), "retry-limit"):
            encode(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL", "not a url"),
        ("AWS_ENDPOINT_URL", "://x"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:99999"),
        ("AWS_REGION", "a b"),
        ("AWS_ACCESS_KEY_ID", "\n"),
    ],
)
def test_a_malformed_object_store_setting_is_rejected(monkeypatch, name, value):
    pytest.importorskip("obstore", reason="needs the object storage extra")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(key, "us-east-1")
    monkeypatch.setenv(name, value)
    bucket = f"s3://bucket-{abs(hash((name, value)))}/data"  # answers are cached by bucket
    with refused(bucket.removesuffix("/data"), "AWS_ENDPOINT_URL", "region", "AWS_ACCESS_KEY_ID"):
        url_problem(bucket)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_other_errors_pass(error):
    with pytest.raises(error), panics_as("a problem"):
        raise error
