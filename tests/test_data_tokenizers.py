"""Tokenizers: text round-trips, documents end, and mismatched tokenizers are refused."""

import json
from pathlib import Path

import pytest
from data_cases import TEXTS, cache, write_source  # noqa: F401
from refusals import refused

from jaxdist.config import read_run
from jaxdist.data import DataConfig, load_tokenizer, open_datasets
from jaxdist.data.__main__ import main
from jaxdist.data.tokenizer import CODE_VOCAB_SIZE, train_bpe


def test_byte_tokenizer_round_trips_text():
    tokenizer = load_tokenizer("bytes")
    text = "plain, äöü, €, 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([72, 105, 0]) == "Hi"
    assert tokenizer.decode([0xE2, 0x82]) == "�"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe([f"a small text {i} about texts of words {i * i}" for i in range(99)], 280, path)
    return path


def test_trained_bpe_encodes_any_text(bpe):
    tokenizer = load_tokenizer(str(bpe))
    for text in ["small texts about text", " leading", "äöü € 🙂\n\n\ttab", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("small text")) < len("small text")
    assert tokenizer.vocab_size == 280
    assert tokenizer.end_id == 0
    assert tokenizer.decode([0]) == ""


def test_source_code_has_a_separate_tokenizer(tmp_path):
    tokenizer = load_tokenizer("code")
    assert (tokenizer.vocab_size, tokenizer.end_id) == (CODE_VOCAB_SIZE, 0)
    source = Path(__file__).read_text()
    for text in (*TEXTS, source, "".join(map(chr, range(300)))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(source)) < len(source.encode()) / 1.7
    assert DataConfig().tokenizer_name == "code"
    assert DataConfig(sources=["stdlib", "a.txt"]).tokenizer_name == "code"
    assert DataConfig(sources=["a.txt"]).tokenizer_name == "bytes"
    assert DataConfig(tokenizer="bytes").tokenizer_name == "bytes"
    with refused("model.vocab_size=256", "1024 tokens", "'code'"):
        read_run(["--model.vocab_size=256"], command="jaxdist.train")
    assert read_run(["--model.vocab_size=256", "--data.tokenizer=bytes"], command="x")


def test_documents_end_with_the_end_token(tmp_path, bpe):
    source = write_source(tmp_path, "jsonl")
    train, _ = open_datasets(
        DataConfig(sources=[str(source)], tokenizer=str(bpe), eval_fraction=0.0), seq_len=4
    )
    corpus = train.parts[0].corpus
    expected = [t for text in TEXTS for t in (*load_tokenizer(str(bpe)).encode(text), 0)]
    assert corpus.tokens(0, corpus.num_tokens).tolist() == expected
    assert train.vocab_size == 280


def test_truncation_stored_in_a_tokenizer_does_not_drop_text(tmp_path, bpe):
    stored = json.loads(bpe.read_text())
    stored["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(stored))
    tokenizer = load_tokenizer(str(path))
    text = "a text about small texts"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_mismatched_tokenizers_are_refused(tmp_path, bpe):
    source = write_source(tmp_path, "txt", ["a small text\n"] * 400)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")

    def check(*facts, sources=(source,), **settings):
        with refused(*facts):
            open_datasets(DataConfig(sources=list(map(str, sources)), **settings), seq_len=8)

    check(broken, "not a tokenizer.json", tokenizer=str(broken))
    check("'<s>'", "endoftext", tokenizer=str(bpe), eos_token="<s>")
    check("eos_token='<s>'", "byte 0", eos_token="<s>")
    main([str(source), "--out", str(tmp_path / "tokens")])
    both = tmp_path / "tokens", source
    check(both[0], "'bytes'", "data.tokenizer", sources=both, tokenizer=str(bpe))
    other = tmp_path / "tokens-bpe"
    main([str(source), "--out", str(other), "--tokenizer", str(bpe)])
    (other / "tokenizer.json").write_text(bpe.read_text() + " ")
    check(other, "not those", sources=(other,))
    check(both[0], "leave both out", sources=both[:1], tokenizer=str(bpe))


@pytest.mark.parametrize("kind", ["bytes", "code", "pieces"])
def test_bytes_of_tokens_sum_to_those_of_the_text(kind, tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers

    if kind == "pieces":  # in the form of sentencepiece, with bytes for unknown characters
        vocab = {"\u2581": 0, "a": 1, "b": 2, "é": 3, "\u2581a": 4, "</s>": 5}
        vocab |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
        inner = Tokenizer(models.BPE(vocab, [("\u2581", "a")], byte_fallback=True))
        inner.normalizer = normalizers.Replace(" ", "\u2581")
        inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        inner.add_special_tokens(["</s>"])
        inner.save(str(tmp_path / "tokenizer.json"))
        kind = str(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(kind)
    for text in ("a ab  é", "def f(x):\n\treturn 'ß€\U0001f600'", "\u0120 \u00ad <0x41"):
        tokens = tokenizer.encode(text)
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert tokenizer.token_bytes[tokenizer.end_id] == 0
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size
