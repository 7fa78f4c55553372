"""A custom dataset, `faulty_dataset:rows`, that causes faults on request.

The folder in `FAULT_FOLDER` holds the requests, one file each; without requests all rows are valid.
The content of a row depends only on its index.

   pace           content: seconds that each row takes, so that a test can hit a certain moment
   raise-<i>      process i raises once
   stuck-<i>      process i hangs in its loader, once
   slow-<i>       content: additional seconds for each row of process i
   nan-<row>      that row has a weight that is not a number
"""

import contextlib
import os
import time
from pathlib import Path

import numpy as np

VOCAB, COUNT = 64, 4096
_OPENED = 20  # opening a dataset may read these rows: faults start after them


class Rows:
    def __init__(self, seq_len: int):
        self.seq_len, self.seen = seq_len, 0
        self.folder = Path(os.environ["FAULT_FOLDER"])
        self.process = os.environ.get("JAXDIST_PROCESS_ID", "0")

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.seen += 1
        if self.seen > _OPENED:
            self.obey()
        tokens = np.random.default_rng(int(index)).integers(0, VOCAB, self.seq_len + 1)
        weights = np.ones(self.seq_len)
        if (self.folder / f"nan-{index}").exists():
            weights[0] = np.nan
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights}

    def obey(self) -> None:
        if self.taken("raise"):
            raise ValueError(f"planted in process {self.process}")
        if self.taken("stuck"):
            time.sleep(3600)
        for name in ("pace", f"slow-{self.process}"):
            with contextlib.suppress(OSError, ValueError):
                time.sleep(float((self.folder / name).read_text()))

    def taken(self, name: str) -> bool:
        try:
            (self.folder / f"{name}-{self.process}").unlink()
        except FileNotFoundError:
            return False
        return True


def rows(*, seq_len: int, seed: int) -> tuple[Rows, None]:
    return Rows(seq_len), None
