"""The barrier of a save: all meet, and one that gives up keeps nobody waiting."""

import threading
import time

import pytest
from jax._src.distributed import global_state

from jaxdist.checkpoint import save_barrier as room
from jaxdist.checkpoint.save_barrier import GivenUp, SaveBarrier


class KeyValueStore:
    """What jax's coordinator does for us, in one process."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def key_value_delete(self, key):
        del self.values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED: no such key")
            return self.values[key]


@pytest.fixture
def processes(monkeypatch):
    """The barriers of three processes, and what they meet over."""
    monkeypatch.setattr(room, "_LOOK_MS", 20)
    store, made = KeyValueStore(), []
    for process in range(3):
        monkeypatch.setattr(global_state, "client", store)
        monkeypatch.setattr(global_state, "process_id", process)
        monkeypatch.setattr(global_state, "num_processes", 3)
        made.append(SaveBarrier())
        made[-1]._prefix = "test/barrier"
        made[-1].begin()
    return made, store


def meet(barriers, key="written", timeout_ms=20_000) -> dict[int, str]:
    """What each of them gets out of one meeting."""
    ended: dict[int, str] = {}

    def wait(barrier):
        try:
            barrier.wait(key=key, timeout_ms=timeout_ms)
            ended[barrier._process] = "met"
        except (GivenUp, TimeoutError) as error:
            ended[barrier._process] = type(error).__name__

    threads = [threading.Thread(target=wait, args=(barrier,)) for barrier in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ended


def test_all_meet_again_and_again_under_the_same_name(processes):
    barriers, store = processes
    for _ in range(3):
        assert meet(barriers) == dict.fromkeys(range(3), "met")
        for barrier in barriers:
            barrier.begin()
    assert store.values == {}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_who_gives_up_frees_all_others_of_this_save_only(processes, lost):
    barriers, _ = processes
    others = [barrier for barrier in barriers if barrier._process != lost]
    threading.Timer(0.1, barriers[lost].give_up).start()
    begin = time.monotonic()
    assert set(meet(others).values()) == {"GivenUp"}
    assert time.monotonic() - begin < 15
    for barrier in barriers:
        barrier.begin()
    assert meet(barriers) == dict.fromkeys(range(3), "met")


def test_who_does_not_come_is_waited_for_until_the_time_is_up(processes):
    barriers, _ = processes
    assert meet(barriers[1:], timeout_ms=80) == {1: "TimeoutError", 2: "TimeoutError"}
