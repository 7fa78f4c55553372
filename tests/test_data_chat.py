"""Conversations and completions: tokens that count in the loss match transformers and numpy."""

import dataclasses
import json
import os
import re

import numpy as np
import pytest
from data_cases import cache  # noqa: F401
from hf_models import CHATML, write_tokenizer
from refusals import missing, refused

from jaxdist.data import DataConfig, load_tokenizer, open_datasets
from jaxdist.data.__main__ import main
from jaxdist.data.chat import JinjaTemplate, PlainTemplate, load_template
from jaxdist.data.corpus import Corpus

# Trims, and shows only the thinking of the last answer, as templates of reasoning models do.
THINKING = """\
{{- bos_token }}
{%- for message in messages %}
{%- set said = message['content'] | trim %}
{%- if message['role'] == 'assistant' %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1] if '</think>' in said else '' %}
{%- set said = said.split('</think>')[-1] | trim %}
{%- if loop.last %}{% set said = '<think>' + thought + '</think>\\n\\n' + said %}{% endif %}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TALKS = [
    [("user", "What is a mesh?"), ("assistant", "Devices with names.")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hi\n"), ("user", "Bye"),
     ("assistant", "  Tschüß € 👋")],
    [("user", "x" * 70), ("assistant", "y"), ("user", "And then?")],
]  # fmt: skip


def conversation(talk) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in talk], "id": 7}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def chats(tmp_path):
    return write_lines(tmp_path / "chats.jsonl", [conversation(talk) for talk in TALKS])


def opened(path, seq_len=24, records="chat", **settings):
    config = DataConfig(sources=[str(path)], records=records, eval_fraction=0.0, **settings)
    return open_datasets(config, seq_len=seq_len)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, [text for talk in TALKS for _, text in talk])
    return path


def with_template(folder, tmp_path, source: str, form: str):
    target = tmp_path / f"with-{form}"
    target.mkdir()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if form == "file":
        (target / "chat_template.jinja").write_text(source)
    elif form == "setting":
        settings["chat_template"] = source
    else:
        settings["chat_template"] = [
            {"name": "other", "template": "no"},
            {"name": "default", "template": source},
        ]
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return target


@pytest.mark.parametrize("talk", range(len(TALKS)))
@pytest.mark.parametrize("form", ["file", "setting", "named"])
def test_tokenizer_template_matches_tokens_and_mask_of_transformers(folder, tmp_path, talk, form):
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    path = with_template(folder, tmp_path, CHATML, form)
    messages = conversation(TALKS[talk])["messages"]
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    expected = reference.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        chat_template=CHATML,
    )
    template = load_template("auto", load_template_tokenizer(path))
    assert isinstance(template, JinjaTemplate)
    tokens, weights = template.encode(messages)
    assert tokens.tolist() == expected["input_ids"]
    assert weights.tolist() == expected["assistant_masks"]


def load_template_tokenizer(path):
    return load_tokenizer(str(path / "tokenizer.json"))


def learned(tokenizer, tokens, weights) -> list[str]:
    runs = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(weights)) + 1)
    inner = tokenizer._inner
    return [
        inner.decode(tokens[run].tolist(), skip_special_tokens=False)
        for run in runs
        if weights[run[0]]
    ]


def test_answers_are_located_if_a_template_trims_and_rearranges_them(folder, tmp_path):
    path = with_template(folder, tmp_path, THINKING, "file")
    tokenizer = load_template_tokenizer(path)
    talk = [("user", "Hi "), ("assistant", "<think>hm</think> Hi"), ("user", "Hi"),
            ("assistant", " Hi Hi  ")]  # fmt: skip
    messages = conversation(talk)["messages"]
    template = load_template("auto", tokenizer)
    tokens, weights = template.encode(messages)
    thinking = "<think></think>\n\n"
    assert learned(tokenizer, tokens, weights) == ["Hi<|im_end|>", f"{thinking}Hi Hi<|im_end|>"]
    assert tokens[0] == tokenizer._inner.token_to_id("<|endoftext|>")
    assert tokens[: len(prompt := template.prompt(messages[:3]))].tolist() == prompt.tolist()
    assert weights[len(prompt)] and not weights[len(prompt) - 1]
    old = load_tokenizer(tokenizer.name, text_format=1)
    assert learned(old, *load_template("auto", old).encode(messages))[1] == "Hi Hi<|im_end|>"


@pytest.mark.parametrize(
    ("header", "written", "expected"),
    [  # the end of a generation prompt, and what the template writes before an answer
        ("[a]", "[a]<think></think>", ["<think></think>No.<|im_end|>"] * 2),
        ("[a]<think>", "[a]<think>", ["No.<|im_end|>"] * 2),
        ("[a]<think>", "[a]", ["No.<|im_end|>"] * 2),  # the answer has no thinking
        ("", "[a]", ["[a]No.<|im_end|>"] * 2),  # the generation prompt is ignored
        ("[a]", "[a]<think></think>{{ loop.last }} ", [
            "<think></think>False No.<|im_end|>", "<think></think>True No.<|im_end|>"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("moved", [False, True])
def test_prompt_and_answer_concatenate_to_the_text(
    folder, tmp_path, header, written, expected, moved
):
    """If `moved`, the last question is written differently, as templates with tools do."""
    mark = "{% if loop.index0 == messages | length - 2 or loop.last %}!{% endif %}" if moved else ""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}" + mark + "[u]{{ m.content }}{% else %}"
        + written + "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + header + "{% endif %}"
    )  # fmt: skip
    tokenizer = load_template_tokenizer(with_template(folder, tmp_path, source, "file"))
    talk = [("user", "Hi"), ("assistant", "No."), ("user", "Hm"), ("assistant", "No.")]
    tokens, weights = load_template("auto", tokenizer).encode(conversation(talk)["messages"])
    if moved and not header:
        expected = ["No.<|im_end|>", *expected[1:]]
    assert learned(tokenizer, tokens, weights) == expected


def test_end_token_closes_the_last_answer_if_the_template_has_no_ending(folder, tmp_path):
    source = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    path = with_template(folder, tmp_path, source, "file")
    tokenizer = load_template_tokenizer(path)
    messages = conversation(TALKS[0])["messages"]
    tokens, weights = load_template("auto", tokenizer).encode(messages)
    assert tokens[-1] == tokenizer.end_id and weights[-1] == 1
    assert learned(tokenizer, tokens, weights) == ["[assistant] " + TALKS[0][-1][1], "<|im_end|>"]


def test_plain_template_matches_its_description():
    """Checked manually, byte by byte: byte 0 ends an answer."""
    tokens, weights = PlainTemplate(load_tokenizer("bytes")).encode(
        conversation(TALKS[1])["messages"]
    )
    spans = [
        ("<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n", 0),
        ("Hi\n\0", 1),
        ("\n<|user|>\nBye\n<|assistant|>\n", 0),
        ("  Tschüß € 👋\0", 1),
    ]
    assert bytes(tokens.astype(np.uint8)).decode() == "".join(text for text, _ in spans)
    expected = np.concatenate([np.full(len(text.encode()), w) for text, w in spans])
    np.testing.assert_array_equal(weights, expected)


def test_plain_template_is_used_if_a_tokenizer_has_none(folder):
    tokenizer = load_template_tokenizer(folder)
    assert isinstance(load_template("auto", tokenizer), PlainTemplate)
    assert isinstance(load_template("plain", tokenizer), PlainTemplate)
    tokens, weights = load_template("auto", tokenizer).encode(conversation(TALKS[0])["messages"])
    assert learned(tokenizer, tokens, weights) == [TALKS[0][-1][1] + "<|im_end|>"]


def expected_stream(records) -> tuple[bytes, np.ndarray, list[int]]:
    """Return completions as all bytes, which of them are learned, and the ends of records."""
    text, weights, ends = b"", [], []
    for record in records:
        prompt, completion = record["prompt"].encode(), record["completion"].encode() + b"\0"
        text += prompt + completion
        weights += [0] * len(prompt) + [1] * len(completion)
        ends.append(len(text))
    return text, np.array(weights), ends


def completions(count=60, seed=0) -> list[dict]:
    rng = np.random.default_rng(seed)
    word = lambda n: bytes(rng.integers(97, 123, n, np.uint8)).decode()
    return [
        {"prompt": word(rng.integers(0, 12)), "completion": word(rng.integers(1, 40))}
        for _ in range(count)
    ]


@pytest.mark.parametrize("packing", ["auto", "documents"])
def test_rows_weight_only_answers_and_separate_records(tmp_path, packing):
    records = completions()
    path = write_lines(tmp_path / "pairs.jsonl", records)
    train = opened(path, 16, "completion", packing=packing)
    text, weights, ends = expected_stream(records)
    record_of = np.searchsorted(ends, np.arange(len(text)), side="right")
    rows = train.rows(np.arange(train.num_rows))
    taught = []
    for row in range(train.num_rows):
        fields = {name: rows[name][row] for name in rows}
        pieces = np.unique(fields["segments"][fields["segments"] > 0])
        for piece in pieces:
            inside = np.flatnonzero(fields["segments"] == piece)
            tokens = bytes(fields["tokens"][inside].astype(np.uint8))
            last = bytes([fields["targets"][inside[-1]]])
            # The position of this piece in the complete text: the only one whose weights agree too.
            starts = [m.start() for m in re.finditer(re.escape(tokens + last), text)]
            assert any(
                np.array_equal(
                    fields["weights"][inside],
                    np.where(
                        record_of[start + 1 : start + 1 + len(inside)] == record_of[start],
                        weights[start + 1 : start + 1 + len(inside)],
                        0,
                    ),
                )
                for start in starts
            ), (row, piece)
            learned_here = fields["weights"][inside] == 1
            taught.append(fields["targets"][inside][learned_here])
    got = np.sort(np.concatenate(taught))
    # A record's first token is never a target; all other learned tokens are, each once.
    firsts = np.concatenate([[0], ends[:-1]])
    targets = np.setdiff1d(np.flatnonzero(weights), firsts)
    if packing == "documents":  # windows: the last, partial row is dropped
        targets = targets[targets <= train.num_rows * 16]
    np.testing.assert_array_equal(got, np.sort(np.frombuffer(text, np.uint8)[targets]))
    assert train.identity["packing"] == ("best_fit" if packing == "auto" else packing)


def test_pieces_without_an_answer_are_dropped(tmp_path, caplog):
    caplog.set_level("INFO", logger="jaxdist")
    records = [{"prompt": "p" * 80, "completion": "c"}, {"prompt": "", "completion": "d" * 7}]
    path = write_lines(tmp_path / "pairs.jsonl", records)
    train = opened(path, 16, "completion")
    rows = train.rows(np.arange(train.num_rows))
    assert (rows["weights"].sum(1) > 0).all()
    assert rows["weights"].sum() == 2 + 7
    assert rows["segments"].astype(bool).sum() < 2 * 16 + 8
    assert missing(caplog.text, "1 of 2 records", "train.seq_len=16") == []


def test_corpus_folder_of_the_command_has_the_same_rows(chats, folder, tmp_path):
    path = with_template(folder, tmp_path, CHATML, "file")
    tokenizer = str(path / "tokenizer.json")
    out = tmp_path / "tokens"
    assert main([str(chats), "--out", str(out), "--records", "chat", "--tokenizer", tokenizer]) == 0
    read = opened(chats, tokenizer=tokenizer)
    stored = opened(out, records=DataConfig().records, tokenizer=tokenizer)
    assert stored.fingerprint == read.fingerprint
    everything = np.arange(read.num_rows)
    for name, values in read.rows(everything).items():
        np.testing.assert_array_equal(stored.rows(everything)[name], values)
    assert Corpus(out).weights(0, Corpus(out).num_tokens).sum() > 0
    assert DataConfig(sources=[str(out)]).packs_documents
    assert DataConfig(sources=[str(chats)], records="chat").packs_documents
    assert not DataConfig().packs_documents
    # Another template is another corpus, also in the cache.
    plain = opened(chats, tokenizer=tokenizer, chat_template="plain")
    assert plain.fingerprint != read.fingerprint


def test_tokens_and_weights_do_not_depend_on_the_shard_size(tmp_path):
    from jaxdist.data.corpus import write_corpus
    from jaxdist.data.encoding import make_encoder

    records = completions()
    path = write_lines(tmp_path / "pairs.jsonl", records)
    encoder = make_encoder(load_tokenizer("bytes"), records="completion")
    write_corpus([path], tmp_path / "one", encoder)
    write_corpus([path], tmp_path / "many", encoder, shard_tokens=100)
    one, many = Corpus(tmp_path / "one"), Corpus(tmp_path / "many")
    assert one.fingerprint == many.fingerprint
    text, weights, ends = expected_stream(records)
    for corpus in (one, many):
        np.testing.assert_array_equal(corpus.weights(0, len(text)), weights)
        for start in range(0, len(text) - 20, 3):
            assert bytes(corpus.tokens(start, start + 20)) == text[start : start + 20]
        np.testing.assert_array_equal(corpus.document_ends, ends)
    # The same bytes with another boundary are different data.
    for prompt, completion in (("a", "bc"), ("ab", "c")):
        pair = {"prompt": prompt, "completion": completion}
        write_corpus([write_lines(tmp_path / "p.jsonl", [pair])], tmp_path / prompt, encoder)
    assert Corpus(tmp_path / "a").fingerprint != Corpus(tmp_path / "ab").fingerprint
    os.truncate(tmp_path / "many" / "weights-00003.bin", 50)
    with refused("weights-00003.bin", "50 bytes"):
        Corpus(tmp_path / "many")


def test_parquet_rows_are_read_as_records(chats, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = [conversation(talk)["messages"] for talk in TALKS]
    pa.parquet.write_table(pa.table({"messages": rows}), tmp_path / "chats.parquet")
    assert opened(chats).fingerprint == opened(tmp_path / "chats.parquet").fingerprint


def test_unknown_columns_are_rejected_and_metadata_is_ignored(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    path = tmp_path / "pairs.parquet"
    table = {"prompt": ["a", "b"], "completion": ["c", "d"], "id": [1, 2], "weight": [1.0, None]}
    pa.parquet.write_table(pa.table(table), path)
    rows = opened(path, 4, "completion")
    assert rows.parts[0].corpus.num_documents == 2
    pa.parquet.write_table(pa.table({**table, "context": ["", "c"]}), path)
    with refused("pairs.parquet:2 ", "context"):
        opened(path, 4, "completion")


ASK = {"role": "user", "content": "a"}
SAY = {"role": "assistant", "content": "b"}
BAD_CHATS = {
    "text": ({"text": "a"}, "no list 'messages'", "keys: text"),
    "no_messages": ({"messages": []}, "no list 'messages'"),
    "not_objects": ({"messages": ["a"]}, "message 1", "not an object"),
    "no_content": ({"messages": [ASK, {"role": "assistant"}]}, "message 2", "not an object"),
    "role": ({"messages": [{"role": "human", "content": "a"}, SAY]}, "'human'", "assistant"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}, SAY]}, "type list"),
    "tools": ({"messages": [ASK, {**SAY, "tool_calls": [1]}]}, "message 2", "tool_calls"),
    **{
        f"mask_{name}": ({"messages": [ASK, {**SAY, name: value}]}, "message 2", name)
        for name, value in [("weight", 0), ("train", False), ("loss_mask", 0), ("trainable", False)]
    },
    "record_tools": ({"messages": [ASK, SAY], "tools": [{"type": "function"}]}, "tools"),
    "record_system": ({"messages": [ASK, SAY], "system": "Be brief."}, "system"),
    "record_unknown": ({"messages": [ASK, SAY], "rejected": [SAY]}, "rejected"),
    "record_mask": ({"messages": [ASK, SAY], "weight": 0}, "weight"),
    "record_false": ({"messages": [ASK, SAY], "learn": False}, "learn"),
    "message_name": ({"messages": [{**ASK, "name": "Ann"}, SAY]}, "message 1", "name"),
    "silent": ({"messages": [ASK]}, "no assistant message"),
    "empty_answer": ({"messages": [ASK, {**SAY, "content": " "}]}, "message 2", "empty"),
    "a_list": (["a"], "not an object", "list"),
}  # fmt: skip
BAD_PAIRS = {
    "no_completion": ({"prompt": "a"}, "no text 'completion'", "has: prompt"),
    "number": ({"prompt": 3, "completion": "a"}, "no text 'prompt'"),
    "empty": ({"prompt": "a", "completion": ""}, "empty completion"),
    "system": ({"prompt": "a", "completion": "b", "system": "c"}, "system"),
    "mask": ({"prompt": "a", "completion": "b", "loss_mask": [0]}, "loss_mask"),
}


@pytest.mark.parametrize(
    ("records", "case"),
    [("chat", case) for case in BAD_CHATS] + [("completion", case) for case in BAD_PAIRS],
)
def test_bad_record_is_reported_with_file_and_line(tmp_path, records, case):
    bad, *facts = (BAD_CHATS if records == "chat" else BAD_PAIRS)[case]
    good = {"messages": [ASK, SAY]} if records == "chat" else {"prompt": "a", "completion": "b"}
    good |= {"source": "web", "_id": 7, "Cached": False, "weight": 1, "tools": None, "system": ""}
    path = write_lines(tmp_path / "a.jsonl", [good, good, bad])
    with refused("a.jsonl:3 ", *facts):
        opened(path, 4, records)


def test_template_that_rejects_or_drops_an_answer_is_reported(folder, tmp_path):
    strict = "{{ raise_exception('roles must alternate') }}"
    for source, *facts in (
        (strict, "chats.jsonl:1 ", "roles must alternate"),
        ("{{ messages[0].content }}", "chats.jsonl:1 ", "message 2"),
        ("{% for %}", "chat_template.jinja", "(line 1"),
        ("{{ ''.__class__.__mro__ }}", "chats.jsonl:1 ", "unsafe"),
    ):
        template = tmp_path / "chat_template.jinja"
        template.write_text(source)
        chats = write_lines(tmp_path / "chats.jsonl", [conversation(TALKS[0])])
        with refused(*facts):
            opened(chats, tokenizer=str(folder / "tokenizer.json"), chat_template=str(template))


def test_settings_incompatible_with_records_are_rejected(tmp_path, chats):
    problems = DataConfig(records="chat", packing="stream", chat_template="none").problems()
    for problem, fact in zip(
        problems, ('"stdlib"', "packing=stream", "chat_template='none'"), strict=True
    ):
        assert fact in problem
    chat = DataConfig(sources=[str(chats)], records="chat", packing="best_fit")
    for template in ("auto", "plain"):
        assert dataclasses.replace(chat, chat_template=template).problems() == []
    text = tmp_path / "a.txt"
    text.write_text("text")
    share_gpt = write_lines(tmp_path / "share.jsonl", [{"conversations": []}])
    for source, settings, *facts in (
        (text, {"records": "chat"}, text, ".jsonl or .parquet"),
        (chats, {}, "data.records=chat"),
        (share_gpt, {}, "data.records=chat"),
        (chats, {"records": "completion"}, "no text 'prompt'"),
        (chats, {"records": "chat", "chat_template": str(text)}, "tokenizer.json"),
    ):
        with refused(*facts):
            open_datasets(DataConfig(sources=[str(source)], **settings), seq_len=8)
    out = tmp_path / "tokens"
    assert main([str(chats), "--out", str(out), "--records", "chat"]) == 0
    with refused("packing=stream", "conversations"):
        open_datasets(DataConfig(sources=[str(out)], packing="stream"), seq_len=8)
    with refused("--train-bpe", "--records chat"):
        main([str(chats), "--out", str(out) + "2", "--records", "chat", "--train-bpe=300"])


@pytest.mark.parametrize("kind", ["txt", "jsonl", "tokens"])
def test_text_is_learned_completely_next_to_conversations(tmp_path, kind):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": turns}] * 64)
    texts = [f"text {i} of many words" for i in range(16)]
    source = tmp_path / f"texts.{kind}"
    if kind == "jsonl":
        write_lines(source, [{"text": text} for text in texts])
    else:
        (tmp_path / "texts.txt").write_text("\n".join(texts))
    if kind == "tokens":
        main([str(tmp_path / "texts.txt"), "--out", str(source)])
    config = DataConfig(
        sources=[str(chats), str(source)], tokenizer="bytes", records="chat",
        mixture_weights=[3.0, 1.0], eval_fraction=0.0,
    )  # fmt: skip
    data, _ = open_datasets(config, seq_len=48)
    chat, text = data.parts
    rows = chat.rows(np.arange(chat.num_rows))
    learned = bytes(rows["targets"][rows["weights"] > 0].astype(np.uint8))
    assert learned == b"yes\0" * 64
    rows = text.rows(np.arange(text.num_rows))
    is_real = rows["segments"] > 0
    assert np.array_equal(rows["weights"] > 0, is_real) and is_real.mean() > 0.5
    drawn = data.order(seed=0).rows(np.arange(400))
    assert 0.2 < np.mean(drawn >= chat.num_rows) < 0.3
