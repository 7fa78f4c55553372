"""What a program needs before its first array: its place in the job, its log, its way to stop.

A command is run by `run_command` and makes a `Preemption` first; then it chooses its devices
(`simulate`, `tune_malloc`, `reserve_memory`, `setup_compilation_cache`), joins its job (`join`)
and its log (`setup_logging`).

Importing the room imports neither jax nor any device library, so that a launcher, which never
computes, starts in milliseconds. The settings dataclass lives in `jaxdist.runtime.config`.
"""

from jaxdist.runtime.backend import (
    be_careful,
    reserve_memory,
    setup_compilation_cache,
    simulate,
)
from jaxdist.runtime.cluster_environment import JoinPlan, resolve, visible_gpus
from jaxdist.runtime.distributed import JoinedJob, join
from jaxdist.runtime.entry_point import (
    EXIT_CONFIG,
    EXIT_DIVERGED,
    EXIT_FAILURE,
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_SDC,
    FINAL_CODES,
    HOST_MEMORY_ADVICE,
    Agreed,
    is_consequence,
    run_command,
)
from jaxdist.runtime.host_memory import give_back_memory, tune_malloc
from jaxdist.runtime.logs import close_logs, setup_logging
from jaxdist.runtime.signals import NOTICES, Preemption, TraceRequests
from jaxdist.runtime.start_times import StartTimes
