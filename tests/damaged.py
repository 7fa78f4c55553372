"""Fixture of a directory with two checkpoints, fresh for every test, and helpers to damage it."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist.checkpoint import CheckpointConfig, Checkpointer

STEPS = (2, 4)


def state_at(step: int, size: int = 1024) -> dict:
    values = np.random.default_rng(step).standard_normal(size).astype(np.float32)
    device = jax.devices()[0]
    return jax.tree.map(
        lambda x: jax.device_put(x, device),
        {
            "params": {"w": values},
            "opt_state": ({"mu": values * 2},),
            "rest": {"step": np.int32(step), "key": jax.random.key(step)},
        },
    )


def like(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_is_step(restored, step: int) -> None:
    expected = state_at(step)
    assert int(restored["rest"]["step"]) == step
    np.testing.assert_array_equal(restored["params"]["w"], expected["params"]["w"])
    np.testing.assert_array_equal(restored["opt_state"][0]["mu"], expected["opt_state"][0]["mu"])
    np.testing.assert_array_equal(
        *(jax.random.key_data(s["rest"]["key"]) for s in (restored, expected))
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pristine")
    writer = Checkpointer(path, CheckpointConfig(), log=lambda line: None)
    for step in STEPS:
        writer.save(step, state_at(step), {"next": step})
    writer.close()
    return path


@pytest.fixture
def run(pristine, tmp_path):
    class Run:
        path = tmp_path / "checkpoints"

        def open(self, **settings) -> Checkpointer:
            read_only = settings.pop("read_only", False)
            self.opened = Checkpointer(
                self.path, CheckpointConfig(**settings), log=self.lines.append, read_only=read_only
            )
            return self.opened

    run = Run()
    run.lines = []
    shutil.copytree(pristine, run.path)
    yield run
    if hasattr(run, "opened"):
        run.opened.close()


def flip_bit(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    file.write_bytes(data)


DAMAGE = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "bit_flipped": flip_bit,
    "emptied": lambda file: os.truncate(file, 0),
    "deleted": lambda file: file.unlink(),
}


def all_files(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.rglob("*") if p.is_file())


def resume_then(run, **settings) -> Checkpointer:
    """Open and restore checkpoint 4, as a run does before its first save."""
    opened = run.open(max_to_keep=5, **settings)
    opened.restore(like(state_at(4)))
    return opened
