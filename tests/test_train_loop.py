"""The order of the training loop, with a session that only records its calls."""

import contextlib
import types
from pathlib import Path
from unittest import mock

import pytest
from refusals import missing

from jaxdist import train
from jaxdist.checkpoint import CheckpointConfig
from jaxdist.checkpoint.events import make_group
from jaxdist.checkpoint.save_schedule import SaveSchedule
from jaxdist.run import session as session_module
from jaxdist.run.evaluation_loop import EarlyStopping, NoLabels
from jaxdist.run.metrics_log import ExitReason
from jaxdist.run.resilience.anomalies import Rollback
from jaxdist.run.session import Session, StepActions


class Recorder:
    """A session of `steps` steps; `due` maps a step to the actions after it."""

    def __init__(self, steps: int, due: dict[int, StepActions], roll_back_at: int = 0):
        self.config = types.SimpleNamespace(
            train=types.SimpleNamespace(steps=steps), eval=types.SimpleNamespace(max_batches=2)
        )
        self.due, self.roll_back_at = due, roll_back_at
        self.step, self.state, self.loader = 0, None, None
        self.reporter, self.deferred = self, 0
        self.calls: list[str] = []
        self.early_stopping = EarlyStopping(0)

    def start_steps(self):
        self.calls.append(f"start {self.step}")

    def next_batch(self):
        self.calls.append("batch")

    def dispatch(self, batch):
        self.step += 1
        self.calls.append(f"dispatch {self.step}")

    def flush(self):
        step, self.deferred = self.deferred, 0
        if step:
            self.calls.append(f"report {step}")
        if step and step == self.roll_back_at:
            self.roll_back_at = 0
            raise Rollback

    def defer(self, step, state, metrics, loader):
        self.deferred = step

    def due_actions(self):
        return self.due.get(self.step, StepActions(last=self.step == self.config.train.steps))

    def sync(self, due):
        self.flush()
        self.calls.append("synced")

    def evaluate(self, max_batches):
        self.calls.append("evaluate")
        return {"loss": 1.0}

    def save(self, metrics, *, due):
        self.calls.append(f"save {due} {metrics}")

    def turn_trace(self):
        self.calls.append("trace")

    def roll_back(self, rollback):
        self.step, self.deferred = 0, 0
        self.calls.append("roll back")

    def leave(self):
        self.calls.append("leave")
        return 75

    def finish(self):
        self.calls.append("finish")
        return 0


def test_a_step_is_reported_while_the_next_one_runs():
    session = Recorder(3, {})
    assert train.train(session) == 0
    assert session.calls == [
        *("start 0", "batch", "dispatch 1"),
        *("batch", "dispatch 2", "report 1"),
        *("batch", "dispatch 3", "report 2"),
        *("report 3", "synced", "finish"),
    ]


def test_no_step_is_in_flight_during_other_actions():
    every = StepActions(evaluate=True, save="interval", trace=True)
    session = Recorder(2, {1: every})
    assert train.train(session) == 0
    assert session.calls[2:7] == [
        *("dispatch 1", "report 1", "synced", "evaluate", "save interval {'loss': 1.0}"),
    ]
    assert session.calls[7:10] == ["trace", "batch", "dispatch 2"]


def test_job_saves_and_exits_after_a_stop_request():
    session = Recorder(9, {2: StepActions(leave=True)})
    assert train.train(session) == 75
    assert session.calls[-3:] == ["report 2", "synced", "leave"]


def test_a_rollback_starts_the_steps_again():
    session = Recorder(2, {}, roll_back_at=1)
    assert train.train(session) == 0
    index = session.calls.index("roll back")
    assert session.calls[index - 1] == "report 1" and session.calls[index + 1] == "start 0"
    assert session.calls[-1] == "finish"


def test_finished_run_does_not_train():
    session = Recorder(2, {})
    session.step = 2
    assert train.train(session) == 0
    assert session.calls == ["start 2", "finish"]


def test_last_state_is_saved_over_a_corrupt_checkpoint_of_its_step():
    """The checkpointer skips the save if the existing checkpoint is valid."""
    space, forced = types.SimpleNamespace, []
    session = space(
        config=space(train=space(steps=2), eval=space(final_max_batches=0, sample="never")),
        guard=space(skipped=0), checkpointer=space(steps=lambda: [1, 2]), step=2,
        evaluate=lambda count: {}, save=lambda metrics, force: forced.append(force),
        run=space(path="run"), parts=space(model=space(decoding=None)), _end=lambda *args: 0,
    )  # fmt: skip
    assert Session.finish(session) == 0 and forced == [True]


def test_local_saves_of_a_run_that_stops_early_are_deleted():
    space, calls, none = types.SimpleNamespace, [], lambda *args, **fields: None
    session = space(
        watchdog=space(phase=lambda name: contextlib.nullcontext(), enter=none), step=2,
        checkpointer=space(wait=lambda exports: True, discard_local=lambda: calls.append("local")),
        loader=space(close=none), forward_events=none, run=space(checkpoints=Path("checkpoints")),
        monitor=space(summary=none),
    )  # fmt: skip
    assert Session._end(session, ExitReason.PREEMPTED, 75, []) == 75 and calls == []
    assert Session._end(session, ExitReason.STOPPED_EARLY, 0, []) == 0 and calls == ["local"]


def test_all_actions_due_on_one_step_are_done():
    saves = CheckpointConfig(save_interval_steps=4, save_interval_minutes=0)
    space = types.SimpleNamespace
    session = space(
        config=space(train=space(steps=12), eval=space(interval_steps=2)),
        checkpointer=SaveSchedule(saves, make_group()),
        preemption=space(preempted=lambda: session.step == 8),
        monitor=space(profiler=space(reaches=lambda step: step == 9)),
    )
    due = {}
    for session.step in (3, 4, 6, 8, 12):
        due[session.step] = Session.due_actions(session)
    assert not due[3]
    assert due[4] == StepActions(evaluate=True, save="interval")
    assert due[6] == StepActions(evaluate=True, save="halfway")
    assert due[8] == StepActions(evaluate=True, save="interval", leave=True, trace=True)
    assert due[12] == StepActions(last=True)


def test_results_of_tasks_are_kept_if_held_out_rows_have_no_labels(monkeypatch):
    monkeypatch.setattr(session_module, "task_metrics", lambda *_: {"task/one/acc": 0.5})
    monkeypatch.setattr(session_module, "evaluate", mock.Mock(side_effect=NoLabels("none")))
    session = mock.MagicMock()
    session.config.eval.tasks, session.monitor.eval = ["one"], lambda step, metrics: metrics
    assert Session.evaluate(session, 0) == {"task/one/acc": 0.5}


@pytest.mark.parametrize(("keep_best", "warned"), [("acc:3", 1), ("accuracy:3", 0), ("none", 0)])
def test_unknown_best_metric_is_reported_once(keep_best, warned):
    messages = []
    session = types.SimpleNamespace(
        config=types.SimpleNamespace(checkpoint=CheckpointConfig(keep_best=keep_best)),
        monitor=types.SimpleNamespace(
            event=lambda name, *, message, level: messages.append(message)
        ),
        _has_evaluated=False,
    )
    for _ in range(2):
        Session._warn_of_missing_best(session, {"loss": 1.0, "accuracy": 0.5})
    assert len(messages) == warned
    assert all(missing(text, "acc:3", "loss, accuracy") == [] for text in messages)
