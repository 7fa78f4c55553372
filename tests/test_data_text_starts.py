"""Texts begin with the tokens that the tokenizer's files specify, once, everywhere."""

import dataclasses
import json
import logging

import numpy as np
import pytest
import tokenizers
from data_cases import cache as cache

from jaxdist.config import read_run, stored_run
from jaxdist.data import DataConfig, load_tokenizer, open_datasets
from jaxdist.data.__main__ import main
from jaxdist.data.chat import PlainTemplate, encode_completion, load_template
from jaxdist.data.corpus import Corpus
from jaxdist.run.command_settings import TextSettings
from jaxdist.run.text_generation import Writer

BOS, EOS = 1, 2
TEXTS = ["return x", "ab\ncd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", *"defoo()returnxyab", "re", "\u2581re", "oo"]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    merges = [("r", "e"), ("\u2581", "re"), ("o", "o")]
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    inner.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    path = tmp_path_factory.mktemp("llama")
    inner.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def documents(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def with_settings(folder, target, **settings):
    target.mkdir()
    old = json.loads((folder / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(old | settings))
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return target


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", ["<s> $A </s>", "<s> $A", "$A </s>", ""])
def test_a_text_begins_as_it_does_in_transformers(folder, tmp_path, settings, processor):
    path = with_settings(folder, tmp_path / "tokenizer", **settings)
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    special = [("<s>", BOS), ("</s>", EOS)]
    template = tokenizers.processors.TemplateProcessing(
        single=processor or "$A", special_tokens=special
    )
    inner.post_processor = template if processor else None
    inner.save(str(path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(path / "tokenizer.json"))
    assert tokenizer.begin_ids == (BOS,) * processor.startswith("<s>")
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(path)("return x")["input_ids"]
    expected = [*tokenizer.begin_ids, *tokenizer.encode("return x").tolist()]
    assert ids[: len(ids) - (ids[-1] == EOS)] == expected


def test_documents_token_folders_and_prompts_begin_with_equal_tokens_once(
    folder, documents, tmp_path
):
    name = str(folder / "tokenizer.json")
    tokenizer, out = load_tokenizer(name), tmp_path / "tokens"
    expected = np.concatenate([[BOS, *tokenizer.encode(text), EOS] for text in TEXTS])
    assert main([str(documents), "--out", str(out), "--tokenizer", name]) == 0
    np.testing.assert_array_equal(Corpus(out).tokens(0, Corpus(out).num_tokens), expected)
    settings = {"tokenizer": name, "eval_fraction": 0.0}
    rows = [
        open_datasets(DataConfig(sources=[str(source)], **settings), seq_len=8)[0]
        for source in (documents, out)
    ]
    assert rows[0].fingerprint == rows[1].fingerprint
    np.testing.assert_array_equal(rows[0][0]["tokens"], expected[:8])
    prompts = Writer(TextSettings(), tokenizer, max_len=2048).encode(
        [{"prompt": TEXTS[0]}, {"prompt": f"<s>{TEXTS[0]}"}]
    )
    assert prompts[0].tolist() == [BOS, *tokenizer.encode(TEXTS[0])]
    assert prompts[1].tolist().count(BOS) == 1
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert load_template("auto", tokenizer).encode(talk).tokens.tolist().count(BOS) == 1


def test_an_old_token_folder_keeps_its_rule_with_a_warning(folder, documents, tmp_path, caplog):
    name, out = str(folder / "tokenizer.json"), tmp_path / "tokens"
    old = DataConfig(sources=[str(documents)], tokenizer=name, eval_fraction=0.0, text_format=1)
    with caplog.at_level(logging.WARNING, "jaxdist"):
        rows, _ = open_datasets(old, seq_len=8)
    assert BOS not in rows[0]["tokens"] and len(caplog.records) == 1
    assert main([str(documents), "--out", str(out), "--tokenizer", name]) == 0
    about = json.loads((out / "corpus.json").read_text())
    assert about.pop("text_format") == 2
    (out / "corpus.json").write_text(json.dumps(about))
    assert Corpus(out).tokenizer.begin_ids == ()
    run = read_run([f"--data.sources={out}"], command="test")
    assert run.data.text_format == 1
    assert read_run([f"--data.sources={documents}"], command="test").data.text_format == 3


def test_a_run_without_a_text_format_keeps_the_old_rule(documents, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'[data]\nsources = ["{documents}"]\ntokenizer = "bytes"\n')
    assert stored_run(run / "config.toml").data.text_format == 1
    arguments = [f"--data.sources={documents}", "--run-dir", str(run)]
    assert read_run(arguments, command="test").data.text_format == 1
    for number in (1, 2, 3):
        (run / "config.toml").write_text(f"[data]\ntext_format = {number}\n")
        assert read_run(arguments, command="test").data.text_format == number


def test_tokenizers_without_such_tokens_keep_their_fingerprints(documents):
    data = DataConfig(sources=[str(documents)], tokenizer="bytes", eval_fraction=0.0)
    prints = {
        open_datasets(dataclasses.replace(data, text_format=number), seq_len=8)[0].fingerprint
        for number in (1, 2)
    }
    assert len(prints) == 1


PAIRS = [("def f", "oo()"), ("return (", "x)"), ("return x", " y"), ("a\n", "b"), ("", "x")]


def spaced_tokenizer(folder, target, kind):
    """Create a tokenizer that puts a space before each text, in one of the published ways."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    path = with_settings(folder, target)
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    if kind == "metaspace":
        inner.normalizer = normalizers.Replace(" ", "\u2581")
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "byte_level":
        words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "oo", "fo"]
        vocab = {word: number for number, word in enumerate(words)}
        inner.model = models.BPE(vocab, [("o", "o"), ("f", "o")])
        inner.normalizer, inner.decoder = None, decoders.ByteLevel()
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.save(str(path / "tokenizer.json"))
    return str(path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["prepend", "metaspace", "byte_level"])
def test_pieces_of_a_text_decode_to_the_text(folder, tmp_path, monkeypatch, kind):
    name = spaced_tokenizer(folder, tmp_path / "tokenizer", kind)
    tokenizer = load_tokenizer(name)
    space = " " * (kind == "byte_level")  # which is part of the first token of any text
    for prompt, completion in PAIRS:
        record = {"prompt": prompt, "completion": completion}
        tokens, weights = encode_completion(record, tokenizer)
        assert tokenizer.decode(tokens) == space + prompt + completion
        start = [BOS, *tokenizer.encode(prompt)]
        writer = Writer(TextSettings(), tokenizer, max_len=2048)
        assert not prompt or writer._text(tokens[len(start) :].tolist()) == completion
        assert tokens[: len(start)].tolist() == start and weights.tolist().index(1) == len(start)
    talk = [("user", "x"), ("assistant", "foo"), ("user", "y"), ("assistant", " foo")]
    messages = [{"role": role, "content": content} for role, content in talk]
    plain = PlainTemplate(tokenizer)
    text = "<|user|>\nx\n<|assistant|>\nfoo\n<|user|>\ny\n<|assistant|>\n foo"
    tokens = plain.encode(messages).tokens
    assert tokenizer.decode(tokens) == space + text
    assert plain.prompt(messages[:1]).tolist() == tokens[: len(plain.prompt(messages[:1]))].tolist()
    monkeypatch.setattr("jaxdist.data.documents.PIECE_BYTES", 16)
    long = "return x\n" * 5 + "def foo()"
    (tmp_path / "long.txt").write_text(long)
    data = DataConfig(sources=[str(tmp_path / "long.txt")], tokenizer=name, eval_fraction=0.0)
    rows, _ = open_datasets(data, seq_len=4)
    corpus = rows.parts[0].corpus
    assert tokenizer.decode(corpus.tokens(0, corpus.num_tokens)) == space + long


def test_completions_of_an_old_run_keep_their_pieces_with_a_warning(folder, tmp_path, caplog):
    name = spaced_tokenizer(folder, tmp_path / "tokenizer", "metaspace")
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "def f", "completion": "oo()"}) + "\n")
    settings = {"sources": [str(path)], "records": "completion", "tokenizer": name}
    texts = []
    for text_format in (1, 2):
        data = DataConfig(**settings, eval_fraction=0.0, text_format=text_format)
        rows, _ = open_datasets(data, seq_len=16)
        tokens = rows.parts[0].corpus.tokens(0, rows.parts[0].corpus.num_tokens)
        texts.append(rows.tokenizer.decode(tokens))
        assert rows.parts[0].corpus.tokenizer.text_format == text_format
    assert texts == ["def f oo()", "def foo()"]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is none and documents is none %}no tools{% endif %}",
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ unk_token }}",
        "{{ {'b': 1, 'a': '<'} | tojson(true, 2, none, true) }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    ],
)
def test_a_template_renders_as_in_transformers(folder, tmp_path, source):
    """Special tokens are those of the older special_tokens_map.json."""
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    source += "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    path = with_settings(folder, tmp_path / "tokenizer", bos_token=None, chat_template=source)
    old = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "<unk>"}
    (path / "special_tokens_map.json").write_text(json.dumps(old))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    expected = reference.apply_chat_template(messages, tokenize=False)
    tokenizer = load_tokenizer(str(path / "tokenizer.json"))
    assert load_template("auto", tokenizer)._rendered(messages) == expected
    assert tokenizer.end_id == 0
