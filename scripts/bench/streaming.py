"""Measure streaming from a local hub: data wait of the default model, and the rate of tokenizing.

    python scripts/bench/streaming.py --steps 320 --rounds 5

The data set is Python's standard library in 24 Parquet files, served over HTTP on this machine.
The rate of tokenizing a file into a shard (read, encode, write) is compared with the `tokenizers`
library on the same texts in memory, in turn; each uses all cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402
from hub_server import local_hub  # noqa: E402

from jaxdist.data import load_tokenizer  # noqa: E402
from jaxdist.data.corpus import Corpus, write_shard  # noqa: E402
from jaxdist.data.encoding import BATCH_CHARACTERS, make_encoder  # noqa: E402
from jaxdist.data.files import library_files  # noqa: E402
from jaxdist.run.metrics_log import read_records  # noqa: E402

COMMIT = "0" * 39 + "1"
NUM_FILES = 24


def main() -> None:
    """Run both measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    texts = [path.read_text(errors="replace") for path in library_files()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "set").mkdir()
        for number in range(NUM_FILES):
            table = pa.table({"text": texts[number::NUM_FILES]})
            parquet.write_table(table, folder / "set" / f"train-{number:02d}.parquet")
        measure_waits(folder, options.steps)
        measure_rates(folder, texts, options.rounds)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def measure_waits(folder: Path, steps: int) -> None:
    """Train the default model on the stream, and print the share of time that it waits for data."""
    with local_hub() as hub:
        hub.store("datasets", "org/set", folder / "set", COMMIT)
        caches = {"JAXDIST_CACHE": str(folder / "cache"), "HF_HUB_CACHE": str(folder / "hub")}
        flags = ["--data.sources=hf://org/set", "--data.streaming=true", "--data.tokenizer=code"]
        flags += ["--data.streaming-buffer=2", f"--steps={steps}", f"--run-dir={folder / 'run'}"]
        subprocess.run(
            [sys.executable, "-m", "jaxdist.train", *flags, "--eval.interval_steps=0"],
            env={**os.environ, **hub.environment, **caches},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        files = {sent for sent in hub.sent if sent.endswith(".parquet")}
    records = [r for r in read_records(folder / "run" / "metrics.jsonl") if r["kind"] == "train"]
    for name, some in (("all steps", records), ("without the first two", records[2:])):
        wait = sum(r["data_wait_s"] for r in some)
        total = sum(r["step_time_s"] for r in some)
        print(
            f"data wait, {name}: {100 * wait / total:.2f} % of {total:.0f} s, {len(some)} steps, "
            f"largest {max(r['data_wait_s'] for r in some) * 1000:.1f} ms"
        )
    print(f"{len(files)} of {NUM_FILES} files were downloaded")


def measure_rates(folder: Path, texts: list[str], rounds: int) -> None:
    """Print the rates of `write_shard` and of the tokenizers library on the same texts."""
    tokenizer = load_tokenizer("code")
    encoder = make_encoder(tokenizer)
    batches: list[list[str]] = [[]]
    for text in texts:
        batches[-1].append(text)
        if sum(map(len, batches[-1])) >= BATCH_CHARACTERS:
            batches.append([])
    path = folder / "all.parquet"
    parquet.write_table(pa.table({"text": texts}), path)
    own, plain, ratios = [], [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        write_shard(path, folder / f"shard-{number}", encoder)
        middle = time.perf_counter()
        count = sum(
            len(encoding.ids)
            for batch in batches
            for encoding in tokenizer._inner.encode_batch_fast(batch, add_special_tokens=False)
        )
        end = time.perf_counter()
        written = Corpus(folder / f"shard-{number}")
        assert written.num_tokens - written.num_documents == count
        if number:  # the first one warms up
            own.append(written.num_tokens / (middle - began) / 1e6)
            plain.append(count / (end - middle) / 1e6)
            ratios.append(own[-1] / plain[-1])
    low, high = min(ratios), max(ratios)
    print(
        f"tokenizing: {statistics.median(own):.2f} M tokens/s, tokenizers alone "
        f"{statistics.median(plain):.2f} M; median ratio of {rounds} rounds "
        f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
    )


if __name__ == "__main__":
    main()
