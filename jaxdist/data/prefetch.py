"""Prepare batches ahead of the step, with grain's thread and worker processes.

Workers read rows and run transforms; a thread of the training process moves batches to devices.
Workers start with the signals below blocked: terminals and schedulers send them to every process of
a job, and a worker that died of one would fail the step after which the run saves. Workers end when
the iterator is closed or the training process dies.
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
    to_devices: Callable[[T], U],
    *,
    prefetch: int,
    num_workers: int = 0,
    state: dict | None = None,
) -> grain.DatasetIterator[U]:
    """Iterate over batches that `to_devices` moves to the devices, in order, with prefetching.

    `num_workers` processes prepare batches of a `MapDataset`, each every `num_workers`-th; with 0
    the thread does. An `IterDataset` continues from `state`, a result of an iterator's
    `get_state()`.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads its absl flags; this package parses its own
    if isinstance(batches, grain.MapDataset):
        # Only the prefetching thread reads: more threads would share the GIL.
        batches = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if num_workers:
            options = grain.MultiprocessingOptions(num_workers=num_workers)
            batches = batches.mp_prefetch(options, _start_worker).map(_copied)
    ahead = grain.experimental.ThreadPrefetchIterDataset(
        batches.map(to_devices), prefetch_buffer_size=prefetch
    )
    with _signals_blocked():  # threads and processes inherit it
        iterator = iter(ahead)
        if state is not None:
            iterator.set_state(state)
        iterator.start_prefetch()
    return iterator


def _copied(batch: Any) -> Any:
    """Copy a batch out of shared memory.

    jax may keep the memory of an array until a later call, and shared memory still in use at exit
    is reported as leaked.
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
    # Transforms that call jax use the CPU: the devices belong to the training process.
    """Initialize a worker process, before it reads."""
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, name="jaxdist-parent", daemon=True).start()


def _end_with_parent() -> None:
    # Reached only if the parent is killed: otherwise it stops its workers first.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
