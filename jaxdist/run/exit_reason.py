"""Why a run ended: the values of `exit_reason` in summary.json and in the `end` event.

A process that is killed writes neither, nor does one that the watchdog ends (exit code 86): its
reason is in `logs/abort.json`.
"""

from __future__ import annotations

import enum


class ExitReason(enum.StrEnum):
    """Every reason that a run writes, with the exit code of the process next to it."""

    FINISHED = "finished"  # 0: all steps are done, and the last state is saved where asked
    PREEMPTED = "preempted"  # 75: asked to leave (Ctrl-C too), and did so after a save
    STOPPED_BY_CALLBACK = "stopped_by_callback"  # 0: a callback of a program asked, after a save
    INTERRUPTED = "interrupted"  # 130: a second Ctrl-C, without a save
    NONFINITE_LOSS = "nonfinite_loss"  # 87: NaN or Inf, see resilience.nonfinite_policy
    LOSS_SPIKE = "loss_spike"  # 87: under resilience.spike_policy
    SDC = "sdc"  # 85: silent data corruption, under resilience.sdc_policy
    CHECKPOINT_FAILURE = "checkpoint_failure"  # 1: the last save was not committed
    ERROR = "error"  # 1, or 2 for a refused setting: any other exception
