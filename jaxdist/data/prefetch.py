"""Batches prepared ahead of the step: grain's thread and grain's worker processes.

Worker processes read rows and run transforms; placing batches on devices stays in a thread of the
training process. Workers start with the signals below blocked: a terminal and a scheduler send
them to every process of a job, and a worker that died of one would fail the step at which the
run wants to save. They end when the iterator is closed, and when the training process dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import grain
import jax
import numpy as np
from absl import flags

T = TypeVar("T")
U = TypeVar("U")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def read_ahead(
    batches: grain.MapDataset[T] | grain.IterDataset[T],
    place: Callable[[T], U],
    *,
    prefetch: int,
    num_workers: int = 0,
    state: dict | None = None,
) -> grain.DatasetIterator[U]:
    """Iterate over batches that `place` moves to the devices, in order, `prefetch` of them ahead.

    `num_workers` processes prepare batches of a `MapDataset`, each every `num_workers`-th; with 0
    the thread that places them does. An `IterDataset` goes on where `state` says, which is from
    `get_state()` of an earlier iterator.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads its absl flags; this package parses its own
    if isinstance(batches, grain.MapDataset):
        # The prefetching thread below reads: more threads would share one interpreter lock.
        batches = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if num_workers:
            options = grain.MultiprocessingOptions(num_workers=num_workers)
            batches = batches.mp_prefetch(options, _start_worker).map(_copied)
    ahead = grain.experimental.ThreadPrefetchIterDataset(
        batches.map(place), prefetch_buffer_size=prefetch
    )
    with _signals_blocked():  # threads and processes inherit it
        iterator = iter(ahead)
        if state is not None:
            iterator.set_state(state)
        iterator.start_prefetch()
    return iterator


def _copied(batch: Any) -> Any:
    """A batch out of shared memory.

    jax may hold on to the memory of an array that it placed until a later call; shared memory
    that is still held when the process ends is reported as leaked.
    """
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    # Starting the tracker of shared memory unblocks signals, so it has to run before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(index: int, count: int) -> None:
    """Run by grain in a new worker process, before it reads."""
    # A transform that calls jax computes on the CPU: the devices belong to the training process.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, name="jaxdist-parent", daemon=True).start()


def _end_with_parent() -> None:
    # Only a parent that is killed gets here: one that ends stops its workers first.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
