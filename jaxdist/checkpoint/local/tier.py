"""Save to and restore from local disks, all processes together.

A save, after the device-to-host copy for which training waits:

    1. each process writes its shards to its host's disk; one of several there with equal ones does
    2. after a barrier, each receiver fetches the shards whose backup it keeps
    3. after a barrier, the save is valid and all but `KEPT` are deleted; a failed save is deleted

A restore:

    1. each process reports the shards it needs and the saves on its disk; process 0 chooses a save
    2. each process verifies its shards, after fetching them if necessary
    3. if a verification fails, that source is excluded and step 1 repeats
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.blocks import Bounds, HostCopies, bounds_of
from jaxdist.checkpoint.checksum import start_checksums
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.events import (
    CheckpointError,
    CorruptCheckpoint,
    EventLog,
    Outcome,
    first_error,
    make_group,
    one_line,
)
from jaxdist.checkpoint.local import copies
from jaxdist.checkpoint.local.copies import FailureDomain
from jaxdist.checkpoint.local.store import (
    Lineage,
    LocalStore,
    Save,
    newest,
    read_lineage,
    write_lineage,
)
from jaxdist.checkpoint.restore import check_arrays
from jaxdist.core.types import Array
from jaxdist.runtime.coordination import own_address
from jaxdist.runtime.coordination.transfer import FileClient, FileServer
from jaxdist.runtime.storage import Location, flush_appended, locate
from jaxdist.settings import ConfigError


class Peer(NamedTuple):
    """A process, its host, and the address of the file server from which others read its saves."""

    process: int
    host: str
    address: str
    port: int


class Assignment(NamedTuple):
    """This process's part in each save: its shards, whether it writes them, and what it copies."""

    shards: str
    writes: bool
    copied: list[tuple[str, Peer]]  # shards of a peer that are copied to this host


class LocalTier:
    """Local saves of one run; all processes make the same calls in the same order."""

    def __init__(self, directory: Location, config: CheckpointConfig, events: EventLog) -> None:
        self._directory, self._config, self._events = directory, config, events
        self._group = make_group()
        self._me = self._group.process_id
        self._background = make_group()  # its own group, because each thread needs one
        run, resumed_from, self._secret = self._group.decide(self._read_lineage)
        self._lineage = Lineage(run, resumed_from)
        self._resumed_from = -1
        self._has_begun = False  # whether the lineage records the step this start resumed from
        self._chosen: Save | None = None
        self._rejected: set[tuple[int, int]] = set()  # generation, step of damaged saves
        self._thread: threading.Thread | None = None
        self._part: Assignment | None = None
        self._shards: list[str] = []  # process 0: shard digest of each process
        self._copies = HostCopies()
        self._server: FileServer | None = None
        self._domains: list[FailureDomain] = []  # process 0: of each process
        self._peers: list[Peer] = []  # process 0
        self._open()

    # -- saving ------------------------------------------------------------------------------------

    def resumed(self, step: int) -> None:
        """Invalidate saves after `step`, where the run continues; refetch lost copies of peers."""
        self._resumed_from, self._has_begun = step, False
        self.begin()
        if self._chosen is None or self._chosen.step != step:
            return
        held = self._store.held()
        assert self._part is not None
        copied = [(self._chosen._replace(shards=of), peer) for of, peer in self._part.copied]
        if lost := [each for each in copied if each[0] not in held]:
            self._start(self._copy_again, lost)

    def clean(self) -> None:
        """Delete unfinished saves and saves that are invalid by `Lineage.counts`."""
        self._store.clean(self._lineage)

    def begin(self) -> None:
        """Record, once, the step this start resumed from; if this fails, `save` tries it again."""
        if self._has_begun:
            return
        self.wait()
        resumed_from = [*self._lineage.resumed_from, self._resumed_from]
        current = Lineage(self._lineage.run, resumed_from)
        try:
            self._group.decide(lambda: write_lineage(self._directory, current))
        except Exception as error:  # the next save fails for the same reason and is counted
            self._events.log(
                "no local saves yet: the step from which this run resumed could not be recorded "
                f"in the checkpoint directory: {one_line(error)}"
            )
            return
        self._lineage, self._has_begun = current, True
        self._store.forget(current)

    def survivable(self, state: Any) -> str:
        """Return which host losses a save of a state of this structure survives, in one line."""
        self._share_layout(pytree.leaves_of(state))

        def line() -> str:
            held = copies.holders(self._domains, self._shards, self._config.neighbours)
            return copies.survivable(held, self._domains).line()

        return str(self._group.decide(line))

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Save the state of `step`, unless a save still runs; blocks only for the copy to host."""
        begin = time.perf_counter()
        self.begin()
        if not self._has_begun:
            return
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._group.decide_from(is_busy, any):
            self._events.event("local_save_skipped", step=step)
            self._events.log(
                f"local save of step {step} skipped: an earlier save or copy is still running"
            )
            return
        self.wait()
        outcome, pieces = Outcome(step), []
        leaves = pytree.leaves_of(state)
        part = self._share_layout(leaves)
        arrays = [pytree.plain(leaf) for leaf in leaves]
        described = pytree.describe(leaves, arrays)
        try:
            pieces = to_host(leaves, arrays, self._copies) if part.writes else []
        except Exception as error:  # out of memory on this host
            self._copies.clear()
            outcome.error = one_line(error)
        sums = start_checksums(arrays)  # after the copy, which checksums would delay on CPUs
        complete = lambda: pytree.with_checksums(described, sums())
        document = lambda: json.dumps({"step": step, "meta": meta, "arrays": complete()})
        outcome.blocked_s = time.perf_counter() - begin
        self._start(self._finish, outcome, begin, part, pieces, document)

    def wait(self) -> None:
        """Wait for the current save or copy, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Finish the current save and stop the file server."""
        self.wait()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._store.close()

    def discard(self) -> None:
        """Delete the run's local saves on this host."""
        self.wait()
        self._store.discard()

    def _finish(
        self,
        outcome: Outcome,
        begin: float,
        part: Assignment,
        pieces: list[tuple[str, Any]],
        document: Callable[[], str],
    ) -> None:
        """Write shards, copy those of peers, delete old saves; one outcome for all processes."""
        generation, step = self._lineage.generation, outcome.step
        own = Save(generation, step, part.shards)
        taken = [Save(generation, step, of) for of, _ in part.copied]
        try:
            with self._capture_error(outcome):
                if part.writes and not outcome.error:
                    outcome.num_bytes = self._store.write(own, pieces, document())
            self._barrier_or_raise(outcome)
            with self._capture_error(outcome):
                for save, (_, peer) in zip(taken, part.copied, strict=True):
                    self._fetch(save, peer)
                if self._group.is_leader:
                    flush_appended()  # metrics.jsonl must have all earlier steps even after a kill
            self._barrier_or_raise(outcome)
        except CheckpointError as failure:
            self._store.delete([own, *taken])
            self._events.failed_locally(step, str(failure))
            return
        except Exception as failure:  # of process 0; the next start checks what is complete
            self._events.failed_locally(step, one_line(failure))
            return
        outcome.written_s = time.perf_counter() - begin
        self._store.retain()
        self._events.saved_locally(outcome)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        # A daemon, because if another process fails, this save never ends here.
        self._thread = threading.Thread(
            target=work, args=args, name="checkpoint-local", daemon=True
        )
        self._thread.start()

    def _copy_again(self, lost: list[tuple[Save, Peer]]) -> None:
        for save, peer in lost:
            try:
                self._fetch(save, peer)
            except (OSError, CheckpointError) as error:  # the next save retries it
                self._events.log(
                    f"{self._host} lost its copy of {peer.host}'s local save of step {save.step} "
                    f"and could not copy it again: {one_line(error)}"
                )

    @contextlib.contextmanager
    def _capture_error(self, outcome: Outcome) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            who = f"process {self._me} on {self._host}"
            outcome.error = f"{one_line(error)} ({who})"

    def _barrier_or_raise(self, outcome: Outcome) -> None:
        if error := self._background.decide_from(outcome.error, first_error):
            raise CheckpointError(error)

    def _share_layout(self, leaves: Sequence[pytree.Leaf]) -> Assignment:
        """Return the assignment of this process, which process 0 decides at the first call."""
        if self._part is None:
            own = digest_of(leaves)
            self._shards = self._group.collect(own)
            writes, copied = self._group.scatter(self._parts)
            self._part = Assignment(own, writes, [(of, Peer(*peer)) for of, peer in copied])
        return self._part

    def _parts(self) -> list[tuple[bool, list[tuple[str, Peer]]]]:
        """Return whether each process writes its shards, and (shards, peer) of those it copies."""
        writers = copies.writers(self._domains, self._shards)
        parts: list[tuple[bool, list[Any]]] = [(p in writers, []) for p in range(len(self._peers))]
        takers = copies.receivers(self._domains, self._shards, self._config.neighbours)
        for sender, taking in takers.items():
            for process in taking:
                parts[process][1].append((self._shards[sender], self._peers[sender]))
        return parts

    # -- restoring ---------------------------------------------------------------------------------

    def choose(self, target: Any, at_least: int) -> int | None:
        """Return the step of the newest complete local save, at least `at_least`; None if none is.

        This process's shards of that save are then on its disk and verified. `target` is a tree of
        `jax.ShapeDtypeStruct`s with sharding.
        """
        self.wait()
        self._chosen = None
        needs = digest_of(pytree.leaves_of(target))
        broken: set[Save] = set()  # on this disk
        while True:
            has = [
                save
                for save in self._store.held()
                if self._lineage.counts(save.generation, save.step)
                and save not in broken
                and save[:2] not in self._rejected
            ]
            choose = functools.partial(
                self._choose_sources, self._group.collect([needs, has]), at_least
            )
            generation, step, reason, peer, is_first = self._group.scatter(choose)
            if peer is None:
                if reason:
                    self._events.log(f"no local save is restored: {reason}")
                return None
            save, source = Save(generation, step, needs), Peer(*peer)
            # If several processes share a disk and need the same shards, only one fetches.
            problem = self._fetch_verified(save, source) if is_first else ""
            self._group.synchronize()
            if not is_first:
                here = save in self._store.held()
                own = source._replace(process=self._me)
                problem = self._fetch_verified(save, own if here else source)
            with_problem = lambda replies: [reply for reply in replies if reply[0]]
            failed = self._group.decide_from([problem, source, needs], with_problem)
            for problem, (process, host, *_), of in failed:
                if process == self._me:
                    broken.add(Save(generation, step, of))
                self._events.event("local_save_damaged", step=step, process=process, reason=problem)
                where = f"process {process} on {host}"
                self._events.log(f"local save {step}: shards of {where} are unusable: {problem}")
            if not failed:
                self._chosen = save
                return int(step)

    def load(self, target: Any) -> tuple[Any, dict[str, Any]]:
        """Return state, sharded as `target`, and meta of the save that `choose` selected.

        Raises `CorruptCheckpoint`, after which `choose` rejects this save.
        """
        start, save = time.perf_counter(), self._chosen
        assert save is not None
        leaves, arrays, problem = pytree.leaves_of(target), [], ""
        self._rejected.add(save[:2])  # provisionally, until the checksums match
        try:
            document = self._store.document(save)
            arrays = from_host(leaves, lambda name: self._store.read(save, name))
        except Exception as error:  # do not raise yet: the others wait for an answer
            problem = one_line(error)
        if problem := self._group.decide_from(problem, first_error):
            raise CorruptCheckpoint(f"local save of step {save.step}: {problem}")
        entries = [document["arrays"][leaf.name] for leaf in leaves]
        try:
            check_arrays(leaves, arrays, entries)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"local save of step {save.step}: {error}") from None
        self._rejected.discard(save[:2])
        self._share_layout(leaves)
        values = [pytree.restored(*each) for each in zip(leaves, arrays, entries, strict=True)]
        spent = {"seconds": time.perf_counter() - start, "bytes": sum(x.num_bytes for x in leaves)}
        self._events.event("restore", step=save.step, tier="local", **spent)
        return jax.tree.unflatten(jax.tree.structure(target), values), document["meta"]

    def arrays(self) -> dict[str, Any]:
        """Return name -> description of each array of the chosen save."""
        assert self._chosen is not None
        return dict(self._store.document(self._chosen)["arrays"])

    def _choose_sources(self, replies: list[Any], at_least: int) -> list[list[Any]]:
        """Return for each process [generation, step, reason, source, whether it fetches first].

        Generation and step are those of the chosen save. The reason is why no save can be loaded,
        or "". The source is the `Peer` that has the shards, None without a save.
        """
        generation, step, sources, reason = newest(replies, at_least)
        if not sources:
            return [[generation, step, reason, None, False] for _ in replies]
        first = copies.writers(self._domains, [needed for needed, _ in replies])
        return [
            [generation, step, "", self._peers[source], process in first]
            for process, source in enumerate(sources)
        ]

    def _fetch_verified(self, save: Save, source: Peer) -> str:
        """Fetch or verify this process's shards; return "", or the error after deleting them."""
        problem = ""
        if source.process == self._me:
            problem = self._store.problem(save)
        else:
            try:
                self._fetch(save, source)
            except (OSError, CheckpointError) as error:
                problem = one_line(error)
        if problem:
            self._store.delete([save])
        return problem

    def _fetch(self, save: Save, peer: Peer) -> None:
        with FileClient(peer.address, peer.port, self._secret) as client:
            self._store.take(save, client.read)

    # -- starting ----------------------------------------------------------------------------------

    def _read_lineage(self) -> tuple[str, list[int], str]:
        stored = read_lineage(self._directory, self._events.log)
        return stored.run, stored.resumed_from, secrets.token_hex(32)

    def _open(self) -> None:
        domain = copies.failure_domain_of(os.environ, socket.gethostname())
        self._host = domain.host
        path = os.path.expandvars(self._config.local_dir)
        self._store = LocalStore(locate(path).absolute() / self._lineage.run)
        problem, address, port = "", "", 0
        try:
            if "$" in path:
                raise OSError(0, "a variable in it is not set")
            self._store.root.make_directory()
            if self._group.num_processes > 1:
                address = own_address()
                self._server = FileServer(self._store.root, self._secret, address)
                port = self._server.port
        except OSError as error:
            problem = (
                f"checkpoint.local_dir={path} cannot be used on {domain.host} "
                f"({error.strerror or error}). Name a directory on a disk that each host has."
            )

        def check(replies: list[list[Any]]) -> None:
            if problems := list(dict.fromkeys(text for *_, text in replies if text)):
                raise ConfigError(problems)
            for process, (rack, host, *at, _) in enumerate(replies):
                self._domains.append(FailureDomain(rack, host))
                self._peers.append(Peer(process, host, *at))

        self._group.decide_from([domain.rack, domain.host, address, port, problem], check)


def name_of(leaf: int, piece: int) -> str:
    """Return the file name of piece number `piece` of leaf number `leaf`."""
    return f"{leaf:05d}.{piece}"


def digest_of(leaves: Sequence[pytree.Leaf]) -> str:
    """Return a digest of this process's shards: of names, shapes, dtypes, indices, not values."""
    described = []
    for leaf in leaves:
        shape, dtype = _stored(leaf)
        described.append([leaf.name, dtype.name, shape, _pieces(leaf.value.sharding, shape)])
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def to_host(
    leaves: Sequence[pytree.Leaf], arrays: Sequence[Array], copies: HostCopies
) -> list[tuple[str, np.ndarray]]:
    """Return name and copy, uint8 [bytes], of each distinct local shard of `plain` arrays [...]."""
    for array in arrays:
        for shard in array.addressable_shards:
            shard.data.copy_to_host_async()
    pieces = []
    for number, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        shards = {bounds_of(s.index, array.shape): s for s in reversed(array.addressable_shards)}
        for piece, bounds in enumerate(_pieces(leaf.value.sharding, array.shape)):
            name = name_of(number, piece)
            host = copies.take(name, shards[bounds].data)  # a step overwrites the shard
            pieces.append((name, host.reshape(-1).view(np.uint8)))
    return pieces


def from_host(leaves: Sequence[pytree.Leaf], read: Callable[[str], bytes]) -> list[Array]:
    """Return the arrays [...] of `leaves`, PRNG keys as data; `read` returns a piece by name."""
    arrays = []
    for number, leaf in enumerate(leaves):
        shape, dtype = _stored(leaf)
        held = {
            bounds: np.frombuffer(read(name_of(number, piece)), dtype).reshape(
                [stop - start for start, stop in bounds]
            )
            for piece, bounds in enumerate(_pieces(leaf.value.sharding, shape))
        }
        of = lambda index, held=held, shape=shape: held[bounds_of(index, shape)]
        array: Array = jax.make_array_from_callback(shape, leaf.value.sharding, of)
        arrays.append(array)
    return arrays


def _stored(leaf: pytree.Leaf) -> tuple[tuple[int, ...], np.dtype]:
    value = jax.eval_shape(jax.random.key_data, leaf.value) if leaf.is_key else leaf.value
    return tuple(value.shape), np.dtype(value.dtype)


def _pieces(sharding: Any, shape: Sequence[int]) -> list[Bounds]:
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return sorted({bounds_of(index, shape) for index in indices})
