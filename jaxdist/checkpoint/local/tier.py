"""Local saves and restores, made by all processes together.

A save, after the copy to the host that training waits for:

    1. each process writes its shards to its own disk
    2. when all have, each receiver fetches the shards that it keeps for a neighbour
    3. when all have, the save counts, and older ones go; else all delete it

A restore:

    1. each process says which shards it needs and what is on its disk; process 0 chooses
    2. each checks the bytes of its shards, or fetches and checks them
    3. where one could not, its source no longer counts, and they choose again
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.checksum import checksums, start_checksums
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.errors import CheckpointError, CorruptCheckpoint
from jaxdist.checkpoint.events import EventLog, Outcome, one_line
from jaxdist.checkpoint.group import make_group
from jaxdist.checkpoint.host_copies import HostCopies
from jaxdist.checkpoint.local import copies, lineage, shards
from jaxdist.checkpoint.local.copies import Place
from jaxdist.checkpoint.local.inventory import newest
from jaxdist.checkpoint.local.lineage import Lineage
from jaxdist.checkpoint.local.store import LocalStore, Save
from jaxdist.runtime.coordination import own_address
from jaxdist.runtime.coordination.transfer import FileServer, connected
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, flush_appended, locate
from jaxdist.settings import ConfigError


class Peer(NamedTuple):
    """What a process tells the others when it starts."""

    place: Place
    address: str
    port: int


class LocalTier:
    """The local saves of one run; every process makes one and the same calls in the same order.

    `directory` is that of the run's checkpoints.

    Raises:
        ConfigError: the local directory of a process cannot be used; on all alike.
    """

    def __init__(self, directory: Location, config: CheckpointConfig, events: EventLog) -> None:
        self._directory, self._config, self._events = directory, config, events
        self._group = make_group()
        self._background = make_group()  # the writing thread's exchanges keep their own order
        run, resumed_from, self._secret = self._group.decide(self._read_lineage)
        self._lineage = Lineage(run, resumed_from)
        self._resumed_from = -1
        self._has_begun = False  # whether the lineage tells where this start went on from
        self._chosen: Save | None = None
        self._rejected: set[tuple[int, int]] = set()  # generation, step: other bits than were saved
        self._thread: threading.Thread | None = None
        self._shards: list[str] = []  # by process
        self._copies = HostCopies()
        self._server: FileServer | None = None
        self._peers = self._open()

    @property
    def _me(self) -> int:
        return self._group.process_id

    # -- saving ------------------------------------------------------------------------------------

    def resumed(self, step: int) -> None:
        """The run goes on from that step: saves of later ones do not count any more."""
        self._resumed_from, self._has_begun = step, False
        self.begin()
        if self._chosen is None or self._chosen.step != step:
            return
        held = self._store.held()
        copied = [
            (self._chosen._replace(shards=self._shards[sender]), sender)
            for sender in self._senders()
        ]
        if lost := [each for each in copied if each[0] not in held]:
            self._start(self._copy_again, lost)

    def clean(self) -> None:
        """Delete what killed saves left, and saves that do not count any more."""
        self._store.clean(self._lineage)

    def begin(self) -> None:
        """Before the first save of a start, here or in the run directory: write where it began.

        Nothing is saved locally until the run directory holds that.
        """
        if self._has_begun:
            return
        self.wait()
        resumed_from = [*self._lineage.resumed_from, self._resumed_from]
        known = Lineage(self._lineage.run, resumed_from)
        try:
            self._group.decide(lambda: lineage.write(self._directory, known))
        except Exception as error:  # a save there fails for the same reason, and is counted
            self._events.log(f"no local saves yet: {one_line(error)}")
            return
        self._lineage, self._has_begun = known, True
        self._store.forget(known)

    def survivable(self, state: Any) -> copies.Survivable:
        """Which losses of hosts leave a save of such a state."""
        self._share_layout(pytree.leaves_of(state))
        places, neighbours = [peer.place for peer in self._peers], self._config.neighbours
        return copies.survivable(copies.holders(places, self._shards, neighbours), places)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Save the state of `step`; blocks only while this process's shards are copied."""
        begin = time.perf_counter()
        self.begin()
        if not self._has_begun:
            return
        if self._group.decide_from(self._is_busy(), any):
            self._events.event("local_save_skipped", step=step)
            self._events.log(f"local save of step {step} skipped: the one before is being written")
            return
        self.wait()
        outcome, pieces = Outcome(step), []
        leaves = pytree.leaves_of(state)
        self._share_layout(leaves)
        arrays = [pytree.plain(leaf) for leaf in leaves]
        described = pytree.describe(leaves, arrays)
        try:
            pieces = shards.to_host(leaves, arrays, self._copies) if self._writes() else []
        except Exception as error:  # too little memory on this host
            self._copies.clear()
            outcome.error = one_line(error)
        found = start_checksums(arrays)  # on CPU devices they would delay the copy
        complete = lambda: pytree.with_checksums(described, found())
        document = lambda: json.dumps({"step": step, "meta": meta, "arrays": complete()})
        outcome.blocked_s = time.perf_counter() - begin
        self._start(self._finish, outcome, begin, pieces, document)

    def wait(self) -> None:
        """Wait for the save being written, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Finish what is being written, and serve the others no more."""
        self.wait()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._store.close()

    def discard(self) -> None:
        """Delete the run's local saves: the run directory holds its last state."""
        self.wait()
        self._store.discard()

    def _finish(
        self,
        outcome: Outcome,
        begin: float,
        pieces: list[tuple[str, Any]],
        document: Callable[[], str],
    ) -> None:
        """In the background, on every process: the answer is the same for all."""
        generation, step = self._lineage.generation, outcome.step
        own = Save(generation, step, self._shards[self._me])
        senders = self._senders()
        taken = [Save(generation, step, self._shards[sender]) for sender in senders]
        try:
            with self._told(outcome):
                if self._writes() and not outcome.error:
                    outcome.num_bytes = self._store.write(own, pieces, document())
            self._meet(outcome)
            with self._told(outcome):
                for sender, save in zip(senders, taken, strict=True):
                    self._fetch(save, sender)
                if self._group.is_leader:
                    flush_appended()  # no step before this one may be missing in metrics.jsonl
            self._meet(outcome)
        except CheckpointError as failure:
            self._store.delete([own, *taken])
            self._events.failed_locally(step, str(failure))
            return
        except Exception as failure:  # process 0 is gone: the next start sees what is whole
            self._events.failed_locally(step, one_line(failure))
            return
        outcome.written_s = time.perf_counter() - begin
        self._store.retain()
        self._events.saved_locally(outcome)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        # A daemon: where a process fails, the others do not come to the end of this save.
        self._thread = threading.Thread(
            target=work, args=args, name="checkpoint-local", daemon=True
        )
        self._thread.start()

    def _copy_again(self, lost: list[tuple[Save, int]]) -> None:
        for save, sender in lost:
            try:
                self._fetch(save, sender)
            except (OSError, CheckpointError) as error:  # until the next save
                self._events.log(f"a copy of local save {save.step} is missing: {one_line(error)}")

    @contextlib.contextmanager
    def _told(self, outcome: Outcome) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            who = f"process {self._me} on {self._peers[self._me].place.host}"
            outcome.error = f"{one_line(error)} ({who})"

    def _meet(self, outcome: Outcome) -> None:
        if errors := self._background.decide_from(
            outcome.error, lambda said: [text for text in said if text]
        ):
            raise CheckpointError(errors[0])

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _share_layout(self, leaves: Sequence[pytree.Leaf]) -> None:
        if not self._shards:
            self._shards = self._group.decide_from(shards.digest_of(leaves), lambda said: said)

    def _writes(self) -> bool:
        return self._me in copies.writers([peer.place for peer in self._peers], self._shards)

    def _senders(self) -> list[int]:
        places = [peer.place for peer in self._peers]
        takers = copies.receivers(places, self._shards, self._config.neighbours)
        return [sender for sender, taking in takers.items() if self._me in taking]

    # -- restoring ---------------------------------------------------------------------------------

    def choose(self, target: Any, at_least: int) -> int | None:
        """Return the newest step, of `at_least` or later, that can be put together; None without one.

        Every byte of it is then checked and on this process's disk. `target` is a tree of
        `jax.ShapeDtypeStruct`s with sharding.
        """
        self.wait()
        self._chosen = None
        needs = shards.digest_of(pytree.leaves_of(target))
        broken: set[tuple[int, Save]] = set()  # process, and what is no good on its disk
        while True:
            has = [
                save
                for save in self._store.held()
                if self._lineage.counts(save.generation, save.step)
                and (self._me, save) not in broken
                and save[:2] not in self._rejected
            ]
            (generation, step, sources, reason), first = self._group.decide_from(
                [needs, has], lambda said: self._found(said, at_least)
            )
            if not sources:
                if reason:
                    self._events.log(f"{reason}: resuming from the run directory")
                return None
            save = Save(generation, step, needs)
            # Processes that need the same shards may share a disk: then one of them fetches.
            problem = self._obtain(save, sources[self._me]) if self._me in first else ""
            self._group.decide_from(None, lambda said: None)
            if self._me not in first:
                here = save in self._store.held()
                problem = self._obtain(save, self._me if here else sources[self._me])
            problems = self._group.decide_from([problem, needs], lambda said: said)
            failed = [each for each in enumerate(problems) if each[1][0]]
            for process, (problem, of) in failed:
                broken.add((sources[process], Save(generation, step, of)))
                self._skip(step, sources[process], problem)
            if not failed:
                self._chosen = save
                return int(step)

    def load(self, target: Any) -> tuple[Any, dict[str, Any]]:
        """Return the state and the meta of the save that `choose` has found, on this target.

        Raises:
            CorruptCheckpoint: other bits than were saved; on every process alike.
        """
        start, save = time.perf_counter(), self._chosen
        assert save is not None
        leaves, arrays, problem = pytree.leaves_of(target), [], ""
        self._rejected.add(save[:2])  # until it has turned out to be good
        try:
            document = self._store.document(save)
            arrays = shards.from_host(leaves, lambda name: self._store.read(save, name))
        except Exception as error:  # the others wait for an answer all the same
            problem = one_line(error)
        if problems := self._group.decide_from(problem, lambda said: [x for x in said if x]):
            raise CorruptCheckpoint(f"local save of step {save.step}: {problems[0]}")
        entries = [document["arrays"][leaf.name] for leaf in leaves]
        wrong = [
            leaf.name
            for leaf, found, entry in zip(leaves, checksums(arrays), entries, strict=True)
            if found != entry["checksum"]
        ]
        if wrong:
            raise CorruptCheckpoint(
                f"local save of step {save.step}: other bits than were saved in {few(wrong, 3)}"
            )
        self._rejected.discard(save[:2])
        self._share_layout(leaves)
        values = [pytree.restored(*each) for each in zip(leaves, arrays, entries, strict=True)]
        spent = {"seconds": time.perf_counter() - start, "bytes": sum(x.num_bytes for x in leaves)}
        self._events.event("restore", step=save.step, tier="local", **spent)
        return jax.tree.unflatten(jax.tree.structure(target), values), document["meta"]

    def arrays(self) -> dict[str, Any]:
        """Name -> description of each array of the save that `choose` has found."""
        assert self._chosen is not None
        return dict(self._store.document(self._chosen)["arrays"])

    def _skip(self, step: int, source: int, reason: str) -> None:
        where = f"process {source} on {self._peers[source].place.host}"
        self._events.event("local_save_damaged", step=step, process=source, reason=reason)
        self._events.log(f"local save of step {step}, copy of {where}, skipped: {reason}")

    def _found(self, said: list[Any], at_least: int) -> list[Any]:
        places, needs = [peer.place for peer in self._peers], [needed for needed, _ in said]
        return [newest(said, at_least), sorted(copies.writers(places, needs))]

    def _obtain(self, save: Save, source: int) -> str:
        """Have this process's shards on its own disk, checked; why not, or ""."""
        problem = ""
        if source == self._me:
            problem = self._store.problem(save)
        else:
            try:
                self._fetch(save, source)
            except (OSError, CheckpointError) as error:
                problem = one_line(error)
        if problem:
            self._store.delete([save])
        return problem

    def _fetch(self, save: Save, source: int) -> None:
        peer = self._peers[source]
        with connected(peer.address, peer.port, self._secret) as client:
            self._store.take(save, client.read)

    # -- starting ----------------------------------------------------------------------------------

    def _read_lineage(self) -> tuple[str, list[int], str]:
        known = lineage.read(self._directory)
        return known.run, known.resumed_from, secrets.token_hex(32)

    def _open(self) -> list[Peer]:
        """Make the local directory, and tell the others where this process is."""
        place = copies.place_of(os.environ, socket.gethostname())
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
                f"checkpoint.local_dir={path} cannot be used on {place.host} "
                f"({error.strerror or error}). Name a directory on a disk that each host has."
            )
        said = self._group.decide_from([place.rack, place.host, address, port, problem], _accepted)
        return [Peer(Place(rack, host), address, port) for rack, host, address, port, _ in said]


def _accepted(said: list[list[Any]]) -> list[list[Any]]:
    if problems := list(dict.fromkeys(text for *_, text in said if text)):
        raise ConfigError(problems)
    return said
