"""Generated images in the form of CIFAR-10, for a run without data: stripes of ten directions."""

from __future__ import annotations

import numpy as np

_SIZE, _NUM_CLASSES = 32, 10
_NOISE = 0.3


class PatternImages:
    """Generated images of noisy stripes, by index; the class is the direction of the stripes."""

    def __init__(self, num_rows: int, seed: int):
        self._num_rows, self._seed = num_rows, seed

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return images float32 [32, 32, 3], labels int32 [] and weights float32 []."""
        random = np.random.default_rng((self._seed, index))
        label = index % _NUM_CLASSES
        angle = np.pi * label / _NUM_CLASSES
        y, x = np.mgrid[:_SIZE, :_SIZE] / 4
        stripes = np.sin(np.cos(angle) * x + np.sin(angle) * y)[..., None]
        images = stripes + _NOISE * random.standard_normal((_SIZE, _SIZE, 3))
        return {
            "images": images.astype(np.float32),
            "labels": np.asarray(label, np.int32),
            "weights": np.asarray(1, np.float32),
        }


def make_rows(*, seq_len: int, seed: int) -> tuple[PatternImages, PatternImages]:
    """Return 2,000 training and 200 evaluation rows."""
    del seq_len
    return PatternImages(2000, seed), PatternImages(200, seed + 1)
