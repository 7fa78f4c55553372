"""Log lines during long waits, and the compile time of the last start."""

import dataclasses
import logging
import time

import jax
import pytest

from jaxdist.config import RunConfig
from jaxdist.run.session import CompileTimes
from jaxdist.run.setup import assemble
from jaxdist.runtime import progress


@pytest.fixture
def lines(monkeypatch, caplog, propagating):
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    monkeypatch.setattr(progress, "SHORT_S", 0.05)
    monkeypatch.setattr(logging.getLogger("jaxdist"), "handlers", [logging.NullHandler()])
    caplog.set_level(logging.INFO, logger="jaxdist")
    return lambda: caplog.messages


def test_progress_logs_share_rate_and_time_left_periodically(lines):
    with progress.Progress("reading", 4000, "B") as work:
        for _ in range(4):
            work.advance(1000)
            time.sleep(0.03)
    assert 1 <= len(lines()) <= 3
    assert all(line.startswith("reading: ") and "of 4k B" in line for line in lines())
    assert "B/s" in lines()[0] and "left" in lines()[0]


def test_wait_is_logged_at_start_and_while_it_lasts(lines):
    with progress.waiting("short"):
        pass
    with progress.waiting("compiling"):
        time.sleep(0.3)
    seen = len(lines())
    assert seen >= 3 and lines()[0] == "compiling ..." and "so far" in lines()[1]
    time.sleep(0.1)
    assert len(lines()) == seen


def test_compile_times_are_stored_for_each_program(tmp_path, monkeypatch):
    parts = assemble(RunConfig(), jax.devices()[:1])
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert CompileTimes(parts).last() == 0
        CompileTimes(parts).store(7.9)
        longer = dataclasses.replace(parts.config.train, steps=7)
        wider = dataclasses.replace(parts.config.train, global_batch_size=8)
        with_train = lambda train: dataclasses.replace(
            parts, config=dataclasses.replace(parts.config, train=train)
        )
        assert CompileTimes(with_train(longer)).last() == 7.9
        assert CompileTimes(with_train(wider)).last() == 0
        zero = dataclasses.replace(parts.config.mesh, zero=1)
        other = dataclasses.replace(parts, config=dataclasses.replace(parts.config, mesh=zero))
        assert CompileTimes(other).last() == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
