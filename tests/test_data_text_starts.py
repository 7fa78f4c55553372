"""How texts begin: with the tokens that the tokenizer's files specify, once, everywhere."""

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
from jaxdist.data.chat import load_template
from jaxdist.data.corpus import Corpus
from jaxdist.run.text_generation import Writer
from jaxdist.run.text_settings import TextSettings

BOS, EOS = 1, 2
TEXTS = ["return x", "ab\ncd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of the Llama 2 kind: sentencepiece's spaces, bytes, and <s> before each text."""
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


def test_documents_token_folders_and_prompts_begin_alike_once(folder, documents, tmp_path):
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
    assert read_run([f"--data.sources={documents}"], command="test").data.text_format == 2


def test_a_run_without_a_text_format_keeps_the_old_rule(documents, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'[data]\nsources = ["{documents}"]\ntokenizer = "bytes"\n')
    assert stored_run(run / "config.toml").data.text_format == 1
    arguments = [f"--data.sources={documents}", "--run-dir", str(run)]
    assert read_run(arguments, command="test").data.text_format == 1
    (run / "config.toml").write_text("[data]\ntext_format = 1\n")
    assert read_run(arguments, command="test").data.text_format == 1


def test_tokenizers_without_such_tokens_keep_their_fingerprints(documents):
    data = DataConfig(sources=[str(documents)], tokenizer="bytes", eval_fraction=0.0)
    prints = {
        open_datasets(dataclasses.replace(data, text_format=number), seq_len=8)[0].fingerprint
        for number in (1, 2)
    }
    assert len(prints) == 1
