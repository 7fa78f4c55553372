"""Exit reasons of a run: the values of `exit_reason` in summary.json and in the `end` event.

A killed process writes neither. If the watchdog ends a process (exit code 86), the reason is in
`logs/abort.json`.
"""

from __future__ import annotations

import enum


class ExitReason(enum.StrEnum):
    """Exit reasons, with the exit code of the process in the comment."""

    FINISHED = "finished"  # 0: all steps are done, and the last state is saved
    PREEMPTED = "preempted"  # 75: a signal requested the end (also Ctrl-C), after a save
    STOPPED_BY_CALLBACK = "stopped_by_callback"  # 0: a callback requested the end, after a save
    INTERRUPTED = "interrupted"  # 130: a second Ctrl-C, without a save
    NONFINITE_LOSS = "nonfinite_loss"  # 87: NaN or Inf, see resilience.nonfinite_policy
    LOSS_SPIKE = "loss_spike"  # 87: under resilience.spike_policy
    SDC = "sdc"  # 85: silent data corruption, under resilience.sdc_policy
    CHECKPOINT_FAILURE = "checkpoint_failure"  # 1: the last save was not committed
    ERROR = "error"  # 1, or 2 for a rejected setting: any other exception
