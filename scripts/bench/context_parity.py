"""Rows shared by devices against one device: every exchange, mask and mesh, 20 steps in float32.

    python scripts/bench/context_parity.py [--exchange ring ...] [--out TABLE.md] [--list]

Each row trains a decoder of 4 layers, rows of 16 positions on `cp=4`, and is compared with the
step written by hand on one device (`tests/tiny.py`): first loss within 1e-6, gradients within 1e-5
of the largest, 20 losses within 2e-5, as `tests/test_parity.py` bounds them. Eight query and four
key/value heads, or three and one ("odd"). Documents of packed rows cross every cut between devices;

Rows are written as they come; one that the table has is not run again. About 10 s of processor time
for a row. The exit code is 1 where a row left its bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import conftest  # noqa: E402, F401, eight devices, compiled and scanned as in the tests
import jax  # noqa: E402
import numpy as np  # noqa: E402
import tiny  # noqa: E402
from test_parity import FIRST_LOSS, GRADIENTS, LOSSES  # noqa: E402

from jaxdist.core.parallel.pipeline.config import PipelineConfig  # noqa: E402

EXCHANGES = ("ring", "all_gather", "all_to_all", "hybrid")
WINDOW = 5
DECODER = dataclasses.replace(tiny.CONFIGS["rotary"], num_layers=4)
HEADS = {"grouped": (8, 4), "odd": (3, 1)}
MASKS = {
    "causal": {},
    "packed": {"starts": [(3, 9), (1, 5, 15), (7,), (11, 13)]},
    "window": {"sliding_window": WINDOW},
}
"""Mask -> its settings. Device parts start at even positions; documents start at odd ones."""
STAGES = [
    PipelineConfig(num_virtual_stages=virtual, gather=gather)
    for virtual, gather in [(1, "action"), (2, "action"), (1, "step"), (2, "step")]
]
TITLES = ("exchange", "mask", "heads", "mesh", "first loss", "gradients", "20 losses", "commit")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table."""

    exchange: str
    mask: str
    heads: str
    mesh: str
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)

    @property
    def name(self) -> tuple[str, ...]:
        """Return the first cells of the row."""
        mesh, stages = self.mesh, self.pipeline
        if "pp=" in mesh:
            mesh += f", gather={stages.gather}"
            mesh += " × 2 virtual stages" if stages.num_virtual_stages > 1 else ""
        return self.exchange, self.mask, self.heads, mesh


def rows() -> Iterator[Row]:
    """Yield every combination."""
    for exchange, mask in itertools.product(EXCHANGES, MASKS):
        for mesh in ("cp=4", "dp=2,cp=4", "fsdp=2,cp=4", "cp=4,tp=2"):
            yield Row(exchange, mask, "grouped", mesh)
        for stages in STAGES:
            yield Row(exchange, mask, "grouped", "pp=2,cp=4", stages)
        if exchange in ("ring", "all_gather"):  # others need divisible heads
            for mesh in ("cp=4", "fsdp=2,cp=4"):
                yield Row(exchange, mask, "odd", mesh)


def batch_of(mask: str) -> dict[str, np.ndarray]:
    """Return random tokens in documents that begin as the mask requires."""
    batch = tiny.text_batch(packed=False)
    if starts := MASKS[mask].get("starts"):
        first = np.zeros((tiny.ROWS, tiny.SEQ), np.int32)
        for number, row in enumerate(first):
            row[list(starts[number % len(starts)])] = 1
        batch["segments"] = 1 + np.cumsum(first, axis=1, dtype=np.int32)
        index = np.arange(tiny.SEQ, dtype=np.int32)
        batch["positions"] = index - np.maximum.accumulate(index * first, axis=1)
    return batch


def model_name(mask: str, heads: str) -> str:
    """Register the decoder of a row in `tiny`, and return its name."""
    name = f"context_parity {heads} {mask}"
    num_heads, num_kv_heads = HEADS[heads]
    tiny.CONFIGS[name] = dataclasses.replace(
        DECODER,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        sliding_window=MASKS[mask].get("sliding_window", 0),
    )
    return name


@functools.cache
def reference(mask: str, heads: str) -> tiny.Trace:
    """Return the trace of the hand-written step on one device."""
    return tiny.train_by_hand(model_name(mask, heads), batch_of(mask))


def measure(row: Row) -> tuple[float, float, float]:
    """Return differences: first loss, gradients relative to the largest, maximum of 20 losses."""
    case = tiny.Case(
        model_name(row.mask, row.heads),
        row.mesh,
        exchange=row.exchange,
        pipeline=row.pipeline,
        microbatches=4 if "pp=" in row.mesh else 1,
    )
    result, expected = tiny.run(case, batch=batch_of(row.mask)), reference(row.mask, row.heads)
    apart = np.abs(np.array(result.losses) / np.array(expected.losses) - 1)
    gradients = tiny.distance(result.grads, expected.grads) / tiny.largest(expected.grads)
    return float(apart[0]), gradients, float(apart.max())


def read(table: Path) -> dict[tuple[str, ...], list[str]]:
    """Return first cells -> all cells of each row of an existing table."""
    lines = table.read_text().splitlines() if table.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tuple(row[:4]): row for row in cells if len(row) == len(TITLES) and row[0] in EXCHANGES}


def write(table: Path, done: dict[tuple[str, ...], list[str]], num_rows: int) -> None:
    """Write the table with its header."""
    bounds = FIRST_LOSS, GRADIENTS, LOSSES
    worst = [max(float(row[column]) for row in done.values()) for column in (4, 5, 6)]
    inside = sum(all(map(float.__le__, map(float, row[4:7]), bounds)) for row in done.values())
    cells = lambda row: f"| {' | '.join(row)} |"
    table.write_text(
        "# Rows shared by devices against one device, every case\n\n"
        f"{__doc__.partition('[--list]')[2].partition('Rows are written')[0].strip()}\n\n"
        f"`python scripts/bench/context_parity.py --out TABLE.md`, jax {jax.__version__}, Python "
        f"{sys.version_info.major}.{sys.version_info.minor}, 8 simulated CPU devices. {len(done)} "
        f"of {num_rows} rows were run; {inside} are within the bounds.\n\n"
        + "\n".join(
            [
                cells(TITLES),
                "|---" * 4 + "|---:" * 3 + "|---|",
                cells(["worst", "", "", "", *(f"{value:.1e}" for value in worst), ""]),
                cells(["bound", "", "", "", *(f"{value:.1e}" for value in bounds), ""]),
                *(cells(row) for row in done.values()),
            ]
        )
        + "\n"
    )


def main() -> int:
    """Run the missing rows; return 1 if a row exceeds its bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exchange", nargs="*", choices=EXCHANGES, default=EXCHANGES)
    parser.add_argument("--out", type=Path, help="Markdown file to go on with")
    parser.add_argument("--list", action="store_true", help="name the rows and run none")
    options = parser.parse_args()
    selected = list(rows())
    done = read(options.out) if options.out else {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    red = 0
    for row in selected:
        if row.name in done or row.exchange not in options.exchange:
            continue
        if options.list:
            print(*row.name, sep=" | ")
            continue
        differences: tuple[Any, ...] = measure(row)
        red += any(x > y for x, y in zip(differences, (FIRST_LOSS, GRADIENTS, LOSSES), strict=True))
        done[row.name] = [*row.name, *(f"{value:.1e}" for value in differences), commit]
        print(*done[row.name], flush=True)
        if options.out:
            write(options.out, done, len(selected))
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
