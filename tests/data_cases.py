"""Small data sources of every kind for data tests, and helpers to read them."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import context
from jaxdist.core.parallel.axes import row_axes
from jaxdist.data import DataConfig, open_datasets

MESHES = ["dp=1", "dp=8", "dp=2,tp=4", "fsdp=4,dp=2", "pp=2,dp=2,tp=2", "fsdp=8", "dp=2,cp=4"]

CASES: dict[str, dict] = {
    "stream": {"sources": ["text.txt"]},
    "documents": {"sources": ["documents.jsonl"], "packing": "documents"},
    "best_fit": {"sources": ["documents.jsonl"], "packing": "best_fit"},
    "chat": {"sources": ["chats.jsonl"], "records": "chat"},
    "joined": {"sources": ["text.txt", "other.txt"]},
    "mixture": {
        "sources": ["text.txt", "other.txt", "documents.jsonl"],
        "mixture_weights": [5.0, 3.0, 2.0],
    },
    "images": {"sources": ["cifar"]},
    "grain": {"sources": ["case_rows:rows"]},
}
"""Settings of each, to be opened with the folder of `write_sources` as current directory."""

ROWS = """
import grain
import numpy as np

def row(i):
    tokens = np.arange(i, i + 17)
    return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": np.ones(16)}

def rows(*, seq_len, seed):
    return grain.MapDataset.range(150).map(row)
"""


def write_sources(folder: Path) -> None:
    (folder / "text.txt").write_bytes(bytes(1 + i * 37 % 100 for i in range(5000)))
    (folder / "other.txt").write_bytes(bytes(33 + i * i % 89 for i in range(1700)))
    lines = [json.dumps({"text": chr(65 + i % 57) * (1 + i * 7 % 40)}) for i in range(300)]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    chats = [
        {
            "messages": [
                {"role": "user", "content": "ask " * (1 + i % 3)},
                {"role": "assistant", "content": chr(97 + i % 26) * (1 + i * 5 % 23)},
            ]
        }
        for i in range(200)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "cifar").mkdir()
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        records = np.arange(20 * 3073, dtype=np.int64) * (number + 3) * 97 % 251
        records = records.astype(np.uint8).reshape(20, 3073)
        records[:, 0] %= 10
        records.tofile(folder / "cifar" / f"{name}.bin")
    (folder / "case_rows.py").write_text(ROWS)


def open_case(name: str, **changes):
    return open_datasets(DataConfig(**CASES[name] | changes), seq_len=16, seed=3)[0]


def sharding_on(mesh: str) -> NamedSharding:
    spec = MeshSpec.parse(mesh)
    positions = [("context",)] if spec["context"] > 1 else []
    mesh = spec.build(jax.devices()[: spec.num_devices])
    return NamedSharding(mesh, PartitionSpec(row_axes(), *positions))


def laid_out(rows: dict, sharding: NamedSharding) -> dict:
    """Return full rows, name -> [n, seq], with positions in context-parallel device order."""
    if len(sharding.spec) == 1:
        return rows
    size, length = sharding.mesh.shape["context"], rows["tokens"].shape[1]
    order = np.concatenate([context.position_ids_of(i, length // size, size) for i in range(size)])
    return {name: x[:, order] for name, x in rows.items()}


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_bytes(bytes(1 + i * 37 % 100 for i in range(1000)))
    return path


def open_text(*sources: Path, seq_len: int = 16, **settings):
    names = [str(source) for source in sources]
    return open_datasets(DataConfig(sources=names, **settings), seq_len=seq_len)


TEXTS = ["The first text.\n", "Zweiter Text: äöü €\n", "third\n\n  with blank lines\n", "4th"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("JAXDIST_CACHE", str(folder))
    return folder


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def write_tar(path: Path, members, **options) -> Path:
    """Write (name, content) pairs with Python's tarfile."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w", **options) as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            data = content.encode() if isinstance(content, str) else content
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return path


def tar_members(texts, field="text"):
    """Yield samples: a text and metadata, a record, and several records."""
    for i, text in enumerate(texts[:-2]):
        record = {field: text, "other": 1} if i % 2 else {"url": "x"}
        yield f"./a.b/{i:04d}.json", json.dumps(record, indent=1)
        if not i % 2:
            yield f"./a.b/{i:04d}.en.TXT", text
    yield "README", b"\xff"
    yield "z/.0.txt", b"\xff"
    yield "z/0.jsonl", "".join(json.dumps({field: text}) + "\n" for text in texts[-2:])


def write_source(folder: Path, form: str, texts=TEXTS, field="text") -> Path:
    lines = "".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts).encode()
    path = folder / f"source.{form}"
    if form == "jsonl":
        path.write_bytes(lines)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif form == "jsonl.zst":
        # Two frames, as parallel compressors write them.
        half = len(lines) // 2
        path.write_bytes(zstd(lines[:half]) + zstd(lines[half:]))
    elif form == "parquet":
        pa.parquet.write_table(pa.table({field: texts, "other": [1] * len(texts)}), path)
    elif form in ("tar", "tar.gz"):
        write_tar(path, tar_members(texts, field))
    elif form == "tar.zst":
        path.write_bytes(zstd(write_tar(folder / "a.tar", tar_members(texts, field)).read_bytes()))
    elif form == "folder":
        path.mkdir()
        for i, text in enumerate(texts):
            (path / f"sub{i % 2}").mkdir(exist_ok=True)
            (path / f"sub{i % 2}" / f"{i}.txt").write_text(text)
        (path / ".hidden").write_bytes(b"\xff")
    elif form == "txt.gz":
        path.write_bytes(gzip.compress("".join(texts).encode()))
    elif form == "txt":
        path.write_text("".join(texts))
    return path
