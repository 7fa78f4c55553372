"""Records of ShareGPT and Alpaca are read as conversations."""

import pytest
from refusals import refused
from test_data_chat import write_lines

from jaxdist.data import DataConfig, open_datasets


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))


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
