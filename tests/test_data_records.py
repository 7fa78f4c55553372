"""Records of ShareGPT and Alpaca are read as conversations."""

import dataclasses

import numpy as np
import pytest
from data_cases import cache  # noqa: F401
from hf_models import CHATML, write_tokenizer
from refusals import refused
from test_data_chat import conversation, write_lines

from jaxdist.data import DataConfig, open_datasets
from jaxdist.data.__main__ import main

SHARE_GPT = {
    "id": "7",
    "system": "Be brief.",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
}
ALPACA = {"instruction": "Add them.", "input": "1 and 2", "output": "3", "text": "### Add them. 3"}
TRANSLATED = [
    ("Be brief.", "Hi", "Hello"),
    (None, "Add them.\n\n1 and 2", "3"),
    (None, "Say yes.", "yes"),
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_of_sharegpt_and_alpaca_are_conversations(tmp_path, kind):
    import pyarrow as pa
    import pyarrow.parquet

    records = [SHARE_GPT, ALPACA, {"instruction": "Say yes.", "output": "yes"}]
    prints = []
    for record, (system, user, answer) in zip(records, TRANSLATED, strict=True):
        talk = [("system", system)] * (system is not None) + [("user", user), ("assistant", answer)]
        messages = [{"role": role, "content": text} for role, text in talk]
        for name, row in (("a", record), ("b", {"messages": messages})):
            path = tmp_path / f"{name}.{kind}"
            if kind == "jsonl":
                write_lines(path, [row, row])
            else:
                pa.parquet.write_table(pa.Table.from_pylist([row, row]), path)
            config = DataConfig(sources=[str(path)], records="chat", eval_fraction=0.0)
            prints.append(open_datasets(config, seq_len=24)[0].fingerprint)
    assert prints[::2] == prints[1::2] and len(set(prints)) == 3


TALK = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
PARTS = {"chat": ["Hello", "See you"], "chat_last": ["See you"]}


@pytest.mark.parametrize("records", ["chat", "chat_last", "chat_all"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_kind_selects_the_learned_part_of_a_conversation(tmp_path, records, is_plain):
    write_tokenizer(tmp_path, [text for _, text in TALK], template="" if is_plain else CHATML)
    path = write_lines(tmp_path / "talks.jsonl", [conversation(TALK), conversation(TALK)])
    config = DataConfig(
        sources=[str(path)],
        tokenizer=str(tmp_path / "tokenizer.json"),
        records=records,
        eval_fraction=0.0,
    )
    data = open_datasets(config, seq_len=64)[0]
    row, decode = data[0], lambda tokens: data.tokenizer.decode(tokens, show_special=True)
    length = np.flatnonzero(row["weights"])[-1] + 1
    used, targets = row["weights"][:length] > 0, row["targets"][:length]
    runs = np.split(targets, np.flatnonzero(np.diff(used)) + 1)[not used[0] :: 2]
    end = decode([data.tokenizer.end_id])
    expected = [f"{answer}{end}" for answer in PARTS.get(records, ())] or [decode(targets)]
    assert [decode(run) for run in runs] == expected
    assert records != "chat_all" or decode(targets).count("Hi") == 1


def test_token_folders_keep_the_learned_part(tmp_path):
    path = write_lines(tmp_path / "talks.jsonl", [conversation(TALK)])
    assert main([str(path), "--out", str(tmp_path / "last"), "--records", "chat_last"]) == 0
    config = DataConfig(sources=[str(tmp_path / "last")], tokenizer="bytes", eval_fraction=0.0)
    with refused("last", "data.records=chat_last"):
        open_datasets(dataclasses.replace(config, records="chat"), seq_len=24)
    open_datasets(dataclasses.replace(config, records="chat_last"), seq_len=24)


BAD = {
    "sharegpt_tool": ({"conversations": [{"from": "observation", "value": "a"}]}, "observation"),
    "sharegpt_turn": ({"conversations": [{"from": "human", "text": "a"}]}, "message 1"),
    "sharegpt_weight": (
        {"conversations": [{"from": "gpt", "value": "a", "weight": 0}]}, "message 1", "weight"),
    "alpaca_history": ({**ALPACA, "history": [["a", "b"]]}, "history"),
    "alpaca_number": ({"instruction": 3, "output": "a"}, "no list 'messages'"),
    "alpaca_empty": ({**ALPACA, "output": ""}, "message 2", "empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_record_is_reported_with_file_and_line(tmp_path, case):
    bad, *facts = BAD[case]
    path = write_lines(tmp_path / "a.jsonl", [SHARE_GPT, ALPACA, bad])
    with refused("a.jsonl:3 ", *facts):
        open_datasets(DataConfig(sources=[str(path)], records="chat"), seq_len=4)
