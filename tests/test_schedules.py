"""Pipeline schedules: tables are legal, costs equal closed forms, and faults are refused."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from refusals import refused

from jaxdist.core.parallel.pipeline.buffers import Lifetimes, assign_slots, peak, to_arrays
from jaxdist.core.parallel.pipeline.loop_plan import plan_loops
from jaxdist.core.parallel.pipeline.schedule import (
    Action,
    Schedule,
    ScheduleError,
    check,
    kinds_of,
)
from jaxdist.core.parallel.pipeline.schedules import (
    SCHEDULES,
    ScheduleName,
    forward_only,
    make_schedule,
)
from jaxdist.core.parallel.pipeline.simulation import Costs, branch_shares, draw, simulate
from jaxdist.plan.estimate.job import stages_of

STAGES = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 3, 5, 8, 16, 19)
CHUNKS = (1, 2, 3)
GRID = [
    pytest.param(name, p, m, v, id=f"{name}-pp{p}-m{m}-v{v}")
    for name in SCHEDULES
    for p in STAGES
    for m in MICROBATCHES
    for v in CHUNKS
]


@pytest.mark.parametrize(("name", "p", "m", "v"), GRID)
def test_every_schedule_is_legal_and_its_slots_never_collide(name, p, m, v):
    schedule = make_schedule(name, p, m, v)
    run_reference(schedule)
    lives = Lifetimes.of(schedule)
    report = simulate(schedule)
    for family, count in (
        (lives.activations, report.activation_slots),
        (lives.cotangents, report.cotangent_slots),
        (lives.residuals, report.residual_slots),
    ):
        peak = max(most_alive(stage.values()) for stage in family)
        # Idle stages write residuals, too, which may need another slot.
        spare = family is lives.residuals
        assert count in (peak, peak + spare), "intervals need exactly the most alive at once"
    assert report.messages == 2 * m * (p * v - 1)
    assert 0 <= report.bubble < 1


def test_peak_equals_counting_starts_and_ends():
    random = np.random.default_rng(0)
    for _ in range(200):
        firsts = random.integers(0, 12, size=random.integers(0, 10))
        spans = [(first, first + length) for first, length in zip(firsts, firsts % 5, strict=True)]
        assert peak(spans) == most_alive(spans)


@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (8, 2)])
def test_evaluation_runs_every_piece_once_with_few_slots(p, m, v):
    schedule = forward_only(p, m, v)
    check(schedule)
    assert sum(action is not None for tick in schedule.ticks for action in tick) == p * m * v
    report = simulate(schedule)
    assert report.messages == m * (p * v - 1)
    assert report.backward_permutes == 0
    assert report.activation_slots <= max(1, p if v > 1 else 1)


def run_reference(schedule: Schedule) -> None:
    """Run an independent interpreter: move values through the executor's tables, slot by slot.

    Idle stages act, too, as in the executor: they write garbage to the slots that the tables name.
    """
    tables, num_slots = to_arrays(schedule)
    p, v = schedule.num_stages, schedule.num_virtual_stages
    inputs, cotangents, residuals, outputs = (
        [[None] * (count + spare) for _ in range(p)]
        for count, spare in zip(num_slots, (1, 1, 0, 1), strict=True)
    )
    gradients = {(s, c): [] for s in range(p) for c in range(v)}
    kinds = {
        t: kind
        for loop in plan_loops(schedule)
        for r in loop.rounds
        for t, kind in zip(r, loop.kinds, strict=True)
    }
    for t in range(len(schedule.ticks)):
        up, down = [None] * p, [None] * p
        for s in range(p):
            at = lambda name, t=t, s=s: int(getattr(tables, name)[t, s])
            work = at("microbatch"), at("virtual") * p + s
            active = schedule.ticks[t][s] is not None
            assert bool(at("is_active")) == active
            if kinds[t] == "forward":
                if active and work[1] > 0:
                    assert inputs[s][at("activation")] == work, "the input of this virtual stage"
                residuals[s][at("residual")] = work if active else "garbage"
                outputs[s][at("output")] = work if active else "garbage"
                up[s] = (work[0], work[1] + 1) if active else "garbage"
            elif active:
                assert residuals[s][at("residual")] == work, "residuals of this work"
                last = work[1] == p * v - 1
                assert (outputs if last else cotangents)[s][
                    at("output" if last else "cotangent")
                ] == work
                down[s] = (work[0], work[1] - 1)
                gradients[s, at("virtual")].append(work[0])
        for s in range(p):
            if kinds[t] == "forward":
                inputs[s][tables.activation_arrival[t, s]] = up[(s - 1) % p]
            else:
                cotangents[s][tables.cotangent_arrival[t, s]] = down[(s + 1) % p]
    for done in gradients.values():
        assert sorted(done) == list(range(schedule.num_microbatches))


def most_alive(intervals) -> int:
    events = [(first, 1) for first, _ in intervals] + [(last + 1, -1) for _, last in intervals]
    alive = peak = 0
    for _, change in sorted(events):
        alive += change
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("ratio", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("m", [1, 4, 7, 32])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_every_schedule_has_the_textbook_bubble_at_any_cost_ratio(p, m, ratio):
    for name in SCHEDULES:
        report = simulate(make_schedule(name, p, m), Costs(backward=ratio))
        assert report.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert report.num_ticks == 2 * (m + p - 1)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_virtual_stages_divide_the_bubble(p, m, v):
    for name in SCHEDULES:
        report = simulate(make_schedule(name, p, m, v))
        assert report.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize("m", [1, 3, 8, 64])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_stash_is_bounded_by_the_stages_and_not_by_the_microbatches(p, m):
    def stash(name):
        return simulate(make_schedule(name, p, m)).peak_stash

    assert stash("gpipe") == (m,) * p
    assert stash("1f1b") == tuple(min(2 * (p - s) - 1, m) for s in range(p))
    interleaved = simulate(make_schedule("1f1b", p, m, 2))
    assert interleaved.activation_slots + interleaved.cotangent_slots <= 4 * p


def test_first_and_last_stage_run_their_branches_once_per_microbatch():
    # 8 microbatches of 2 virtual stages on 4 stages: 8 · 2 + 3 ticks of each kind. Layers that not
    # all stages have are not listed: an idle stage runs them, too.
    shares = branch_shares(make_schedule("1f1b", 4, 8, 2))
    assert shares == pytest.approx(dict.fromkeys(("embed", "head", "embed_gradient"), 8 / 19))
    assert branch_shares(forward_only(4, 8)) == pytest.approx({"embed": 8 / 11})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8), (4, 32), (8, 16)])
def test_loops_cover_every_tick_once_with_one_kind_of_action(name, p, m):
    schedule = make_schedule(name, p, m)
    loops = plan_loops(schedule)
    covered = []
    for loop in loops:
        for ticks in loop.rounds:
            for tick, kind in zip(ticks, loop.kinds, strict=True):
                assert {a.kind for a in schedule.ticks[tick] if a} <= {kind}
                covered.append(tick)
    assert covered == list(range(len(schedule.ticks)))
    assert len(loops) <= 3


def test_a_tick_with_both_kinds_of_action_has_no_loop():
    mixed = change_actions(make_schedule("gpipe", 2, 2), {(2, 0): Action("backward", 0)})
    with refused("tick 2", error=ScheduleError):
        plan_loops(mixed)


def change_actions(schedule: Schedule, changes: dict[tuple[int, int], Action | None]) -> Schedule:
    ticks = [list(tick) for tick in schedule.ticks]
    for (t, s), action in changes.items():
        ticks[t][s] = action
    return dataclasses.replace(schedule, ticks=tuple(map(tuple, ticks)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_that_starts_one_tick_early_is_refused(name: ScheduleName):
    schedule = make_schedule(name, 4, 8)
    column = [tick[1] for tick in schedule.ticks]
    early = [*column[1:], None]
    shifted = change_actions(schedule, {(t, 1): action for t, action in enumerate(early)})
    facts = "forward of microbatch 0", "on stage 1", "tick 0", "on stage 0"
    with refused(*facts, error=ScheduleError):
        check(shifted)


@pytest.mark.parametrize("name", SCHEDULES)
def test_swapped_chunks_are_refused(name: ScheduleName):
    schedule = make_schedule(name, 2, 4, 2)
    swap = {
        (t, 1): action._replace(virtual=1 - action.virtual)
        for t, tick in enumerate(schedule.ticks)
        if (action := tick[1]) is not None
    }
    with pytest.raises(ScheduleError, match="but needs"):
        check(change_actions(schedule, swap))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({(0, 0): None}, ["forward of microbatch 0", "stage 0", "never"]),
        ({(1, 0): Action("forward", 0)}, ["twice", "ticks 0 and 1"]),
        ({(0, 0): Action("forward", 9)}, ["microbatch=9", "not exist"]),
        ({(0, 0): Action("forward", 0, 1)}, ["virtual=1", "not exist"]),
        (
            {(3, 3): Action("backward", 0), (4, 3): Action("forward", 0)},
            ["backward of microbatch"],
        ),
    ],
    ids=["lost", "repeated", "no_such_microbatch", "no_such_chunk", "backward_first"],
)
def test_missing_repeated_and_reordered_work_is_refused(changes, facts):
    with refused(*facts, error=ScheduleError):
        check(change_actions(make_schedule("1f1b", 4, 8), changes))


def test_invalid_sizes_are_refused_with_the_fix():
    with refused("num_microbatches=0", error=ScheduleError):
        make_schedule("1f1b", 4, 0)


def test_drawing_shows_each_stage_and_the_costs():
    assert draw(make_schedule("1f1b", 2, 3)) == (
        "1f1b: 2 stages, 3 microbatches\n"
        "stage 0 F0 F1 ·  F2 B0 ·  B1 B2\n"
        "stage 1 ·  F0 B0 F1 B1 F2 B2 ·\n"
        "8 ticks, bubble 25.0 % at F=1 B=2, stash per stage 3 1, 4+4 permutes"
    )
    text = draw(make_schedule("1f1b", 2, 2, 2))
    assert "F0a" in text and "B1b" in text


def test_coloring_reuses_a_slot_only_after_its_last_tick():
    slots = assign_slots({(0, 0): (0, 3), (1, 0): (1, 2), (2, 0): (3, 5), (3, 0): (4, 6)})
    assert slots == {(0, 0): 0, (1, 0): 1, (2, 0): 1, (3, 0): 0}


def test_tables_use_the_spare_slot_if_nothing_arrives():
    tables, num_slots = to_arrays(make_schedule("gpipe", 2, 2))
    assert num_slots == [1, 1, 3, 2]
    assert np.all(tables.activation_arrival[:, 0] == 1), "stage 0 of two has no stage before it"
    assert sorted(tables.activation_arrival[:, 1].tolist())[:2] == [0, 0]


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (5, 3)])
def test_closed_form_costs_equal_the_simulation(stages, virtual):
    for count in range(1, 4 * stages + 2):
        schedule = make_schedule("1f1b", stages, count, virtual)
        stored, simulated = stages_of(stages, count, virtual), simulate(schedule)
        assert stored.report.bubble == pytest.approx(simulated.bubble, abs=1e-12)
        assert dataclasses.replace(stored.report, bubble=simulated.bubble) == simulated
        assert stored.num_loops == len(plan_loops(schedule))
        kinds = [kind for tick in schedule.ticks for kind in kinds_of(tick)]
        assert stored.ticks == Counter(kinds) and stored.num_microbatches == count
