"""A job without progress exits with 86 and names the process that is behind; others continue."""

import json
import re
import threading
import time

import pytest
from refusals import missing

from jaxdist.config.resilience import ResilienceConfig
from jaxdist.run.resilience import watchdog
from jaxdist.run.resilience.watchdog import Heartbeat, Watchdog, diagnose

BEAT_S = 0.05


pytestmark = pytest.mark.usefixtures("propagating")


def heartbeat(process: int, **changes) -> Heartbeat:
    values = {"host": f"host{process}", "pid": 7, "phase": "step", "step": 5, "beat": 1}
    return Heartbeat(process=process, **{**values, **changes})


def advance_beats(*heartbeats: Heartbeat) -> list[Heartbeat]:
    return [Heartbeat(**{**vars(s), "beat": s.beat + 4}) for s in heartbeats]


def test_a_silent_process_is_named_before_one_with_fewer_steps():
    before = [heartbeat(0, step=4), heartbeat(1)]
    after = [*advance_beats(before[0]), before[1]]
    assert "process 1 on host1 (pid 7), last step 5, phase step: no sign" in diagnose(before, after)
    assert "process 0" not in diagnose(before, after)


@pytest.mark.parametrize(
    ("heartbeats", "named", "why"),
    [
        ([heartbeat(0), heartbeat(1, step=4), heartbeat(2)], "process 1", "finished step 5"),
        ([heartbeat(0), heartbeat(1), heartbeat(2, phase="data")], "process 2", "wait for it"),
        ([heartbeat(0, phase="save"), heartbeat(1)], "process 0", "phase step"),
        ([heartbeat(0), heartbeat(1)], "no process is behind", "network"),
        ([heartbeat(0)], "process 0 on host0", "no progress"),
    ],
)
def test_diagnosis_names_the_process_that_is_behind(heartbeats, named, why):
    line = diagnose(heartbeats, advance_beats(*heartbeats))
    assert line.startswith(named) and why in line


def test_a_process_that_never_reported_is_named():
    line = diagnose([heartbeat(0), None], [*advance_beats(heartbeat(0)), None])
    assert missing(line, "process 1", "never reported") == []


class Watchdogs:
    """Watchdogs of several processes, in threads; `left` maps exited ones to their codes."""

    def __init__(self, folder, count, **settings):
        self.left: dict[int, int] = {}
        config = ResilienceConfig(**{"step_timeout_s": 0.4, **settings})
        self.dogs = [self.make(config, folder, i, count) for i in range(count)]

    def make(self, config, folder, index, count):
        def leave(code):
            self.left[index] = code
            self.dogs[index]._closed.set()

        return Watchdog(
            config, folder, process=index, num_processes=count, beat_s=BEAT_S, leave=leave
        )

    def wait(self, seconds=20.0):
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(self.left) < len(self.dogs):
            time.sleep(BEAT_S)
        return self.left

    def close(self):
        for dog in self.dogs:
            dog.close()


@pytest.fixture
def many_threads():
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, name=f"idle-{i}") for i in range(110)]
    for thread in threads:
        thread.start()
    yield [thread.name for thread in threads]
    done.set()
    for thread in threads:
        thread.join()


def test_a_stuck_step_ends_all_processes_with_one_line_and_all_stacks(
    tmp_path, caplog, many_threads
):
    dogs = Watchdogs(tmp_path, 3)
    begin = time.monotonic()
    for index, dog in enumerate(dogs.dogs):
        dog.enter("compile")
        dog.finished(8 if index == 1 else 9, 0.01)
    assert dogs.wait() == {0: 86, 1: 86, 2: 86}
    assert time.monotonic() - begin > 0.4
    (line,) = [r.getMessage() for r in caplog.records if "watchdog" in r.getMessage()]
    assert re.search(r"process 1 on \S+ \(pid \d+\), last step 8, phase step: behind", line)
    for index in range(3):
        stacks = (tmp_path / f"process-{index}.stacks.txt").read_text()
        first, *_ = stacks.partition("\n\n")[2].split("\n\n")
        assert "test_a_stuck_step_ends_all" in first  # the main thread
        assert missing(stacks, *many_threads) == []
    abort = json.loads((tmp_path / "abort.json").read_text())
    assert abort["process"] == 0  # the first stuck process reports; the others wait for it
    assert "process 1" in abort["line"]


def test_only_one_of_two_concurrent_aborts_is_reported(tmp_path, caplog):
    """Each considers the other dead: neither waits for the other."""
    config = ResilienceConfig(step_timeout_s=0.0)
    left: list[int] = []
    first, second = (
        Watchdog(config, tmp_path, process=i, num_processes=2, leave=left.append) for i in (0, 1)
    )
    assert first._request_abort("one") and not second._request_abort("two")
    assert [r.getMessage() for r in caplog.records] == ["one"]
    second._abort()
    assert left == [86]
    assert "one" in json.loads((tmp_path / "abort.json").read_text())["line"]
    later = Watchdog(config, tmp_path, leave=left.append)  # the next start
    assert later._request_abort("three")


def test_slow_compilation_evaluation_and_save_end_no_run(tmp_path):
    dogs = Watchdogs(tmp_path, 2)
    for dog in dogs.dogs:
        dog.enter("compile")
    time.sleep(0.6)
    for dog in dogs.dogs:
        dog.finished(1, 0.5)
    with dogs.dogs[0].phase("save"):  # the other one waits for it inside a step
        time.sleep(2.0)
    for dog in dogs.dogs:
        dog.finished(2, 0.01)
    with dogs.dogs[0].phase("evaluation"), dogs.dogs[1].phase("evaluation"):
        for _ in range(4):
            time.sleep(0.5)
            for dog in dogs.dogs:
                dog.alive()
    assert dogs.left == {}
    dogs.close()


def test_timeout_adapts_to_the_step_time(tmp_path):
    dogs = Watchdogs(tmp_path, 1, step_timeout_s=0.1)
    (dog,) = dogs.dogs
    dog.enter("compile")
    for step in range(5):
        dog.finished(step, 0.4)  # the limit is then three times 0.4 s
    assert dog.limit_s() == pytest.approx(1.2)
    time.sleep(0.6)
    assert dogs.left == {}
    assert dogs.wait() == {0: 86}


def test_stuck_save_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "PHASE_TIMEOUT_S", 0.2)
    dogs = Watchdogs(tmp_path, 1)
    with dogs.dogs[0].phase("save"):
        assert dogs.wait() == {0: 86}


def test_temporarily_missing_folder_ends_no_run(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "abort.json").write_text('{"process": 0, "line": "of an earlier start"}')
    dogs = Watchdogs(folder, 1, step_timeout_s=60.0)
    time.sleep(4 * BEAT_S)
    folder.rename(tmp_path / "away")
    time.sleep(6 * BEAT_S)
    (tmp_path / "away").rename(folder)
    time.sleep(6 * BEAT_S)
    assert dogs.left == {}
    dogs.close()


def test_hang_is_detected_while_heartbeats_are_slow(tmp_path, monkeypatch):
    beat = Watchdog._beat_once

    def slow_beat(dog):
        time.sleep(6 * BEAT_S)  # as with an unreachable object store
        beat(dog)

    monkeypatch.setattr(Watchdog, "_beat_once", slow_beat)
    dogs = Watchdogs(tmp_path, 1)
    dogs.dogs[0].enter("compile")
    dogs.dogs[0].finished(1, 0.01)
    assert dogs.wait() == {0: 86}
    dogs.close()


def test_watchdog_off_starts_no_thread(tmp_path):
    before = threading.active_count()
    dog = Watchdog(ResilienceConfig(step_timeout_s=0.0), tmp_path)
    assert threading.active_count() == before
    dog.close()
