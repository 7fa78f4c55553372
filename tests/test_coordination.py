"""Coordination package: groups, barriers, and the one file that uses JAX's service."""

import threading
import time
import types
from pathlib import Path

import pytest
from key_value_store import KeyValueStore
from refusals import missing

import jaxdist
from jaxdist.runtime import coordination
from jaxdist.runtime.coordination import Group, group, service
from jaxdist.runtime.coordination.group import Barrier, GivenUp, LateProcess
from jaxdist.settings import ConfigError


@pytest.fixture
def processes(monkeypatch):
    store = KeyValueStore()
    state = types.SimpleNamespace(client=store, process_id=0, num_processes=3)
    monkeypatch.setattr(service, "_state", lambda: state)

    def make(build):
        results = []
        for process_id in range(3):
            state.process_id = process_id
            group._made.clear()
            results.append(build())
        return results

    return make, store


@pytest.fixture
def barriers(processes, monkeypatch):
    monkeypatch.setattr(group, "_POLL_S", 0.02)
    make, _ = processes
    made = make(lambda: Barrier("test"))
    for one in made:
        one.begin()
    return made


def wait_at_barrier(barriers, key="written", timeout_ms=20_000) -> dict[int, str]:
    ended: dict[int, str] = {}

    def wait(barrier):
        try:
            barrier.wait(key=key, timeout_ms=timeout_ms)
            ended[barrier._group.process_id] = "met"
        except (GivenUp, TimeoutError) as error:
            ended[barrier._group.process_id] = type(error).__name__

    threads = [threading.Thread(target=wait, args=(barrier,)) for barrier in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ended


def test_barrier_can_be_reused_under_the_same_name(barriers, processes):
    _, store = processes
    for _ in range(3):
        assert wait_at_barrier(barriers) == dict.fromkeys(range(3), "met")
        for one in barriers:
            one.begin()
    assert store.values == {}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_process_that_gives_up_releases_the_others_in_this_barrier_only(barriers, lost):
    others = [barrier for barrier in barriers if barrier._group.process_id != lost]
    threading.Timer(0.1, barriers[lost].give_up).start()
    begin = time.monotonic()
    assert set(wait_at_barrier(others).values()) == {"GivenUp"}
    assert time.monotonic() - begin < 15
    for one in barriers:
        one.begin()
    assert wait_at_barrier(barriers) == dict.fromkeys(range(3), "met")


def test_barrier_times_out_if_a_process_is_missing(barriers):
    assert wait_at_barrier(barriers[1:], timeout_ms=80) == {1: "TimeoutError", 2: "TimeoutError"}


def call_in_parallel(groups, call) -> list:
    results: list = [None] * len(groups)

    def run(process_id):
        try:
            results[process_id] = call(groups[process_id])
        except Exception as error:
            results[process_id] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_collect_returns_all_values_to_process_0_and_the_store_keeps_only_the_last(processes):
    make, store = processes
    groups = make(lambda: Group("test"))
    for call in range(5):
        collect = lambda one, call=call: one.collect([one.process_id, call])
        values = call_in_parallel(groups, collect)
        assert values == [[[0, call], [1, call], [2, call]], [], []]
    assert len(store.values) == 1


def test_each_process_receives_its_own_value(processes):
    make, store = processes
    groups = make(lambda: Group("test"))
    for call in range(5):
        part = lambda one, call=call: one.scatter(lambda: [[i, call] for i in range(3)])
        assert call_in_parallel(groups, part) == [[0, call], [1, call], [2, call]]
    call_in_parallel(groups, lambda one: one.synchronize())
    assert len(store.values) == 1

    def fail():
        raise KeyError("k")

    errors = call_in_parallel(groups, lambda one: one.scatter(fail))
    assert [type(error) for error in errors] == [KeyError, RuntimeError, RuntimeError]


def test_process_0_decides_for_all(processes):
    make, _ = processes
    groups = make(lambda: Group("test"))
    called = []
    decide = lambda one: one.decide(lambda: called.append(one.process_id) or "yes")
    assert call_in_parallel(groups, decide) == ["yes"] * 3
    assert called == [0]
    add = lambda one: one.decide_from(one.process_id + 1, sum)
    assert call_in_parallel(groups, add) == [6, 6, 6]


@pytest.mark.parametrize("call", ["decide", "decide_from", "mixed"])
def test_old_decisions_are_deleted_from_the_store(processes, monkeypatch, call):
    """A job decides every ten steps and at every save, for months."""
    monkeypatch.setattr(group, "_MOST_KEPT", 4)
    make, store = processes
    groups = make(lambda: Group("test"))

    def exchange(one, number):
        if call == "decide" or (call == "mixed" and number % 3):
            return one.decide(lambda: number)
        return one.decide_from(one.process_id, lambda values: number)

    for number in range(30):
        assert (
            call_in_parallel(groups, lambda one, number=number: exchange(one, number))
            == [number] * 3
        )
        assert len(store.values) <= 3 + 5


def test_topic_has_one_group_which_deletes_its_old_values(processes, monkeypatch):
    monkeypatch.setattr(group, "_topics", {})
    group._made.clear()
    service._state().num_processes = 1
    for value in range(3):
        assert coordination.collect("test", value) == [value]
    assert group._made["test"] == 1


class Refused(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "raised"),
    [(Refused("no"), Refused), (ConfigError(["a", "b"]), ConfigError), (KeyError("k"), OSError)],
)
def test_error_of_process_0_is_raised_in_all(processes, error, raised):
    def fail():
        raise error

    make, _ = processes
    groups = make(lambda: Group("test", errors=[Refused], otherwise=OSError))
    first, *others = call_in_parallel(groups, lambda one: one.decide(fail))
    assert first is error
    assert [type(other) for other in others] == [raised] * 2
    if isinstance(error, ConfigError):
        assert others[0].problems == ["a", "b"]


def test_missing_process_is_named_by_its_key(processes):
    make, _ = processes
    groups = make(lambda: Group("test", timeout_s=0.1))
    late = call_in_parallel(groups[:2], lambda one: one.collect("here"))
    facts = "process 2 of 3", "test/1/0/2", "0.1 s"
    assert [(type(error), missing(str(error), *facts)) for error in late] == [(LateProcess, [])] * 2


def test_single_process_returns_immediately():
    assert coordination.collect("test", "here") == ["here"]
    assert Group("test").decide(lambda: 3) == 3
    assert Group("test").decide_from(2, sum) == 2
    coordination.publish("test", 1)
    assert coordination.published("test") == {}


def test_one_file_uses_the_coordination_service_of_jax():
    package = Path(jaxdist.__file__).parent
    marks = (
        "jax._src.distributed",
        "global_state",
        "multihost_utils",
        ".key_value_set",
        "key_value_get",
    )
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(mark in path.read_text() for mark in marks)
    }
    # The compile cache needs the process index; backend.py returns it in place of the service.
    assert users == {"runtime/coordination/service.py", "runtime/backend.py"}
