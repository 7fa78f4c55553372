"""Token files of other projects: equal tokens and documents, and errors for wrong ones."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from data_cases import cache  # noqa: F401
from refusals import refused

from jaxdist.data import DataConfig, load_tokenizer, open_datasets
from jaxdist.data.corpus import Corpus

END = load_tokenizer("code").end_id
DOCUMENTS = [[5 + i, *range(300, 301 + i * 7 % 40), END] for i in range(60)]
TOKENS = [token for document in DOCUMENTS for token in document]
ENDS = np.cumsum([len(document) for document in DOCUMENTS])


def save_nanogpt(path: Path) -> Path:
    np.array(TOKENS, "<u2").tofile(path / "train.bin")
    return path / "train.bin"


def save_llmc(path: Path, magic=20240520, version=1, dtype="<u2", count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(TOKENS) if count is None else count
    (path / "t_train_0.bin").write_bytes(header.tobytes() + np.array(TOKENS, dtype).tobytes())
    return path / "t_train_0.bin"


def save_llama3(path: Path) -> Path:
    return save_llmc(path, 20240801, 7, "<u4")


def save_two_shards(path: Path) -> Path:
    half = ENDS[29]
    np.array(TOKENS[:half], "<u2").tofile(path / "train_0.bin")
    np.array(TOKENS[half:], "<u2").tofile(path / "train_1.bin")
    return path


def save_olmo(path: Path) -> Path:
    np.array(TOKENS, "<u2").tofile(path / "part-0.npy")
    (path / "part-0.csv.gz").write_bytes(b"start, end, id, src, loc")
    return path


def save_npy(path: Path) -> Path:
    np.save(path / "a.npy", np.array(TOKENS, "<i4"))
    return path / "a.npy"


def save_megatron(path: Path, code=8, dtype="<u2", ends=ENDS) -> Path:
    starts = np.append(0, ends)
    index = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([code])
    index += np.array([len(ends), len(ends) + 1], "<u8").tobytes()
    index += np.diff(starts).astype("<i4").tobytes()
    index += (starts[:-1] * np.dtype(dtype).itemsize).astype("<i8").tobytes()
    (path / "m.idx").write_bytes(index + np.arange(len(ends) + 1, dtype="<i8").tobytes())
    np.array(TOKENS, dtype).tofile(path / "m.bin")
    return path / "m.bin"


def save_megatron_i4(path: Path) -> Path:
    return save_megatron(path, 4, "<i4")


def save_arrow(path: Path, rows=DOCUMENTS, kind=None, **others) -> Path:
    kind = kind or pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(rows, kind), **others})
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table[:37], table[37:]), strict=True):
        with pa.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(part, max_chunksize=10)
    state = {"_data_files": [{"filename": name} for name in names]}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")
    return path


def save_arrow_i8(path: Path) -> Path:
    masks = pa.array([[1] * len(row) for row in DOCUMENTS])
    return save_arrow(path, kind=pa.large_list(pa.int64()), attention_mask=masks)


def save_arrow_blocks(path: Path) -> Path:
    rows = [TOKENS[at : at + 17] for at in range(0, len(TOKENS), 17)]
    return save_arrow(path, rows, labels=pa.array(rows))


WRITERS = [
    save_nanogpt, save_llmc, save_llama3, save_two_shards, save_olmo, save_npy, save_megatron,
    save_megatron_i4, save_arrow, save_arrow_i8, save_arrow_blocks,
]  # fmt: skip


def open_rows(source: Path, **settings):
    settings = {"tokenizer": "code", "eval_fraction": 0.0, **settings}
    return open_datasets(DataConfig(sources=[str(source)], **settings), seq_len=16)[0]


@pytest.mark.parametrize("save", WRITERS, ids=lambda save: save.__name__)
def test_tokens_and_documents_of_every_format_are_those_in_the_file(tmp_path, caplog, save):
    source = save(tmp_path)
    dataset = open_rows(source, packing="documents")
    corpus = dataset.parts[0].corpus
    np.testing.assert_array_equal(corpus.tokens(0, corpus.num_tokens), TOKENS)
    np.testing.assert_array_equal(corpus.document_ends, ENDS)
    rows = dataset.rows(np.arange(dataset.num_rows))
    count = dataset.num_rows * 16
    np.testing.assert_array_equal(rows["tokens"].ravel(), TOKENS[:count])
    np.testing.assert_array_equal(rows["targets"].ravel(), TOKENS[1 : count + 1])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    again = open_rows(source, packing="documents")  # by the cached index
    assert again.fingerprint == dataset.fingerprint
    assert [file.name for file in Path(corpus.folder).glob("*.bin")] == ["documents.bin"]


def test_fingerprint_is_that_of_the_content(tmp_path):
    prints = []
    for index, save in enumerate((save_nanogpt, save_llmc, save_two_shards, save_megatron)):
        (tmp_path / str(index)).mkdir()
        prints.append(open_rows(save(tmp_path / str(index))).fingerprint)
    assert len(set(prints)) == 1
    changed = np.fromfile(tmp_path / "0" / "train.bin", "<u2")
    changed[7] += 1
    changed.tofile(tmp_path / "0" / "train.bin")
    assert open_rows(tmp_path / "0" / "train.bin").fingerprint != prints[0]


def save_with_validation(path: Path) -> Path:
    np.array(TOKENS, "<u2").tofile(path / "val.bin")
    return save_nanogpt(path).parent


def save_wide(path: Path) -> Path:
    np.array(TOKENS, "<u4").tofile(path / "train.bin")
    return path / "train.bin"


def save_odd(path: Path) -> Path:
    (path / "train.bin").write_bytes(np.array(TOKENS, "<u2").tobytes()[:-1])
    return path / "train.bin"


def save_dict(path: Path) -> Path:
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return path


def save_cut_index(path: Path) -> Path:
    source = save_megatron(path)
    (path / "m.idx").write_bytes((path / "m.idx").read_bytes()[:-8])
    return source


def save_cut_tokens(path: Path) -> Path:
    source = save_megatron(path)
    source.write_bytes(source.read_bytes()[:-2])
    return source


def save_cut_arrow(path: Path) -> Path:
    file = save_arrow(path) / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:400])
    return path


def save_negative(path: Path) -> Path:
    np.save(path / "a.npy", np.array([*TOKENS, -100], "<i4"))
    return path / "a.npy"


def save_matrix(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros((4, 4), "<i4"))
    return path / "a.npy"


def padded(path: Path) -> Path:
    return save_arrow(path, attention_mask=pa.array([[0] * len(row) for row in DOCUMENTS]))


def labeled(path: Path) -> Path:
    return save_arrow(path, labels=pa.array([[-100] * len(row) for row in DOCUMENTS]))


def untokenized(path: Path) -> Path:
    save_arrow(path)
    table = pa.table({"text": ["a"]})
    with pa.ipc.new_stream(path / "data-00000-of-00002.arrow", table.schema) as writer:
        writer.write_table(table)
    return path


BAD_FILES = {
    "train_and_validation": (save_with_validation, {}, "train.bin", "val.bin", "*train*.bin"),
    "other_tokenizer": (save_nanogpt, {"tokenizer": "bytes"}, "train.bin", "256 tokens"),
    "no_tokenizer": (save_nanogpt, {"tokenizer": "auto"}, "data.tokenizer"),
    "32_bits": (save_wide, {}, "uint16", "32 bits"),
    "odd_size": (save_odd, {}, f"{2 * len(TOKENS) - 1} bytes"),
    "cut_llmc": (lambda p: save_llmc(p, count=9), {}, "header says 1042"),
    "llmc_evaluation": (lambda p: save_llmc(p, 20240522), {}, "evaluation file"),
    "cut_index": (save_cut_index, {}, "m.idx", "bytes instead of"),
    "cut_megatron": (save_cut_tokens, {}, "m.bin", f".idx says {2 * len(TOKENS)}"),
    "float_megatron": (lambda p: save_megatron(p, 7, "<f4"), {}, "m.idx", "dtype 7"),
    "dict": (save_dict, {}, "train, test", "/train'"),
    "cut_arrow": (save_cut_arrow, {}, "data-00001-of-00002.arrow", "damaged"),
    "negative": (save_negative, {}, "int32 -100", f"token {len(TOKENS):,}"),
    "matrix": (save_matrix, {}, "[4, 4]"),
    "padded": (padded, {}, "attention_mask"),
    "labeled": (labeled, {}, "labels"),
    "untokenized": (untokenized, {}, "input_ids", "it has: text", "to_parquet"),
    "records": (save_nanogpt, {"records": "chat"}, "data.records=chat"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_wrong_token_files_are_rejected(tmp_path, name):
    save, settings, *facts = BAD_FILES[name]
    source = save(tmp_path)
    with refused(*facts):
        open_rows(source, **settings)


def test_a_file_without_end_tokens_is_one_document_with_a_warning(tmp_path, caplog):
    np.arange(100, 300, dtype="<u2").tofile(tmp_path / "train.bin")
    corpus = open_rows(tmp_path / "train.bin").parts[0].corpus
    assert corpus.document_ends.tolist() == [200]
    assert [record.levelname for record in caplog.records if "end token" in record.message]


def test_batches_of_a_file_share_its_descriptor(tmp_path):
    dataset = open_rows(save_arrow(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    corpus = Corpus(dataset.parts[0].corpus.folder)
    assert len(corpus._shards) > 6
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # documents.bin and two files


def test_a_file_that_disappears_is_named(tmp_path):
    corpus = open_rows(save_nanogpt(tmp_path)).parts[0].corpus
    (tmp_path / "train.bin").unlink()
    with refused("train.bin"):
        Corpus(corpus.folder)
