"""Tests of the save schedule, of retention, and of the steps that a crash can cost."""

import json
import math
import zlib

import pytest

from jaxdist.checkpoint import CheckpointConfig, manifest
from jaxdist.checkpoint.events import make_group
from jaxdist.checkpoint.save import Saved, best_steps, steps_to_delete
from jaxdist.checkpoint.save_schedule import SaveSchedule
from jaxdist.runtime.storage import locate

NEVER = 1e9


def schedule(**settings) -> SaveSchedule:
    return SaveSchedule(CheckpointConfig(**settings), make_group())


def saves_of(schedule: SaveSchedule, times) -> list[tuple[int, str]]:
    saves = []
    for step, now in enumerate(times, 1):
        if due := schedule.due(step, now):
            schedule.saved(step, due, now)
            saves.append((step, due))
    return saves


def test_saves_are_due_at_the_multiples_of_the_interval_and_halfway():
    times = [0.0] * 20
    actual = saves_of(schedule(save_interval_steps=10, save_interval_minutes=0), times)
    assert actual == [(5, "halfway"), (10, "interval"), (15, "halfway"), (20, "interval")]
    odd = saves_of(schedule(save_interval_steps=3, save_interval_minutes=0), times)
    assert [step for step, why in odd if why == "interval"] == [3, 6, 9, 12, 15, 18]
    assert [step for step, why in odd if why == "halfway"] == [1, 4, 7, 10, 13, 16, 19]


def test_nothing_is_saved_halfway_if_training_waits_for_saves():
    plan = schedule(save_interval_steps=10, save_interval_minutes=0, async_save=False)
    assert saves_of(plan, [0.0] * 20) == [(10, "interval"), (20, "interval")]


def test_saves_are_due_by_minutes_too():
    plan = schedule(save_interval_steps=0, save_interval_minutes=2)
    plan.saved(0, "", 1000.0)
    times = [1000.0 + 20 * step for step in range(1, 13)]
    actual = saves_of(plan, times)
    assert actual == [(3, "halfway"), (6, "interval"), (9, "halfway"), (12, "interval")]
    assert plan.due(13, now=0.0) == ""  # a clock that went backwards makes nothing due


def test_both_policies_count_from_the_newest_save():
    plan = schedule(save_interval_steps=10, save_interval_minutes=5, async_save=False)
    plan.saved(0, "", 1000.0)
    assert [s for s in range(1, 41) if plan.due(s, 1000.0)] == [10, 20, 30, 40]
    assert not plan.due(3, 1299.0) and plan.due(3, 1300.0) == "interval"
    plan.saved(3, "interval", 1300.0)
    assert not plan.due(4, 1599.0) and plan.due(4, 1600.0)


def test_no_step_is_due_twice_and_none_if_saving_is_disabled():
    off = schedule(save_interval_steps=0, save_interval_minutes=0)
    assert not any(off.due(step, NEVER) for step in range(50))
    plan = schedule(save_interval_steps=2)
    assert plan.due(2)
    plan.saved(2, "interval")
    assert not plan.due(2)


def test_local_saves_are_due_between_the_others():
    local = {"local_dir": "/nvme", "local_interval_steps": 2}
    plan = schedule(save_interval_steps=8, save_interval_minutes=0, **local)
    actual = saves_of(plan, [0.0] * 10)
    whys = {2: "local", 4: "halfway", 6: "local", 8: "interval", 10: "local"}
    assert actual == list(whys.items())
    off = schedule(save_interval_steps=8, save_interval_minutes=0, local_interval_steps=2)
    assert [step for step, _ in saves_of(off, [0.0] * 10)] == [4, 8]


def test_local_saves_are_due_by_minutes_between_durable_ones():
    plan = schedule(
        save_interval_steps=0, save_interval_minutes=20, async_save=False,
        local_dir="/nvme",
    )  # fmt: skip
    plan.saved(0, "", 1000.0)
    plan.saved(0, "local", 1000.0)
    times = [1000.0 + 100 * step for step in range(1, 16)]
    actual = saves_of(plan, times)
    assert actual == [(3, "local"), (6, "local"), (9, "local"), (12, "interval"), (13, "local")]
    off = schedule(save_interval_steps=0, save_interval_minutes=20, async_save=False)
    off.saved(0, "", 1000.0)
    off.saved(0, "local", 1000.0)
    assert saves_of(off, times) == [(12, "interval")]


def most_lost(write_steps: int, steps: int, **settings) -> int:
    """Return the steps lost by a crash at the worst moment, if a write takes `write_steps`.

    As in `Checkpointer`, a save waits for the previous one; without `in_background` training
    waits for each save.
    """
    config = CheckpointConfig(save_interval_minutes=0, **settings)
    plan = SaveSchedule(config, make_group())
    committed, writing, worst = 0, None, 0
    for step in range(1, steps + 1):
        if writing is not None and step - writing > write_steps:
            committed, writing = writing, None
        worst = max(worst, step - committed)
        if due := plan.due(step):
            plan.saved(step, due)
            committed, writing = committed if writing is None else writing, step
            worst = max(worst, step - committed)
            if not config.in_background:
                committed, writing = step, None
    return worst


@pytest.mark.parametrize("interval", range(1, 14))
def test_a_crash_never_costs_more_than_one_interval(interval):
    """This holds for any duration of a write, also if each save waits for the previous one."""
    for write_steps in (0, 1, 2, 3, 5, 8, 1000):
        lost = most_lost(write_steps, 100, save_interval_steps=interval)
        assert lost <= interval, (write_steps, lost)
        waiting = most_lost(write_steps, 100, save_interval_steps=interval, async_save=False)
        assert waiting <= interval


def kept(steps, metrics=None, halfway=(), **settings) -> list[int]:
    config = CheckpointConfig(**settings)
    alive: dict[int, Saved] = {}
    for step in steps:
        alive[step] = Saved((metrics or {}).get(step, {}), step in halfway)
        for gone in steps_to_delete(alive, config):
            del alive[gone]
    return sorted(alive)


def test_retention_keeps_the_newest():
    assert kept(range(0, 100, 10), max_to_keep=3) == [70, 80, 90]


def test_a_halfway_save_is_kept_until_the_next_and_is_not_counted():
    halfway = range(5, 100, 10)
    assert kept(range(0, 91, 5), halfway=halfway, max_to_keep=3) == [70, 80, 90]
    assert kept(range(0, 96, 5), halfway=halfway, max_to_keep=3) == [70, 80, 90, 95]
    assert kept([5], halfway=halfway, max_to_keep=1) == [5]
    assert kept([5, 15], halfway=halfway, max_to_keep=1) == [15]  # the save of 10 failed


def test_a_halfway_save_may_be_the_best():
    metrics = {10: {"loss": 0.5}, 15: {"loss": 0.1}, 20: {"loss": 0.4}, 30: {"loss": 0.3}}
    settings = {"halfway": (15, 25), "max_to_keep": 1}
    assert kept([10, 15, 20, 25, 30], metrics, keep_best="loss:1", **settings) == [15, 30]
    assert kept([10, 15, 20, 25, 30], metrics, **settings) == [30]


def test_retention_keeps_every_nth_and_the_newest():
    assert kept(range(0, 100, 10), max_to_keep=1, keep_interval_steps=40) == [0, 40, 80, 90]


def test_retention_keeps_the_best_and_never_loses_the_newest():
    losses = {0: 1.0, 10: 0.2, 20: 0.9, 30: float("nan"), 40: 0.3, 50: 0.8}
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    steps = sorted(losses)
    assert kept(steps, metrics, max_to_keep=1, keep_best="loss:2") == [10, 40, 50]
    hits = {step: {"accuracy": loss} for step, loss in losses.items()}
    assert kept(steps, hits, max_to_keep=1, keep_best="accuracy:1") == [0, 50]
    assert kept(steps, hits, max_to_keep=1, keep_best="loss:1") == [50]  # none has a loss


def test_of_equally_good_checkpoints_the_later_is_best():
    saved = {1: Saved({"loss": 0.5}), 2: Saved({"loss": 0.5}), 3: Saved({})}
    assert best_steps(saved, "loss") == [2, 1]


@pytest.mark.parametrize(
    ("metric", "best"),
    [("task/a/acc", 2), ("task/a/bits_per_byte", 1), ("reward_margin", 2)],
)
def test_the_last_part_of_a_metric_decides_which_value_is_best(metric, best):
    assert best_steps({1: Saved({metric: 0.2}), 2: Saved({metric: 0.7})}, metric)[0] == best


def test_an_evaluation_that_was_not_a_number_is_never_best():
    # NaN at the position where a sort that compares with NaN puts it first, and last.
    saved = {step: Saved({"loss": math.nan}) for step in (1, 4)} | {2: Saved({"loss": 9.0})}
    assert best_steps(dict(sorted(saved.items())), "loss") == [2]


def test_the_manifest_records_halfway_saves_and_older_manifests_lack_the_field(tmp_path):
    checkpoint = locate(tmp_path / "7")
    checkpoint.make_directory()
    manifest.write(checkpoint, 7, {}, {"loss": 0.5}, halfway=True)
    assert manifest.read(checkpoint)["halfway"] is True
    body = {"format": 1, "step": 7, "metrics": {}, "files": {}}
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (checkpoint / manifest.FILE_NAME).write(json.dumps({**body, "crc32": crc32}))
    assert manifest.read(checkpoint) == {**body, "halfway": False}
