"""What a program needs before its first array: its place in the job, its log, its way to stop.

The order in which a command uses the room:

    run_command(main)        entry point: exit codes, report of a failure, no hang at exit
    Preemption()             first line of main: SIGTERM and SIGUSR1 are kept from here on
    simulate(8)              optional: N CPU devices instead of what the machine has
    reserve_memory(0.92)     what a run may take of a GPU
    setup_compilation_cache()    compiled programs survive restarts
    job = join()             alone, or with the processes that a launcher or scheduler started
    setup_logging(...)       process 0 on the console, every process in its own file

Importing the room imports neither jax nor any device library, so that a launcher, which never
computes, starts in milliseconds. The settings dataclass lives in `jaxdist.runtime.config`.
"""

from jaxdist.runtime.backend import (
    DEFAULT_MEMORY_FRACTION,
    MEMORY_FRACTION,
    be_careful,
    reserve_memory,
    setup_compilation_cache,
    simulate,
)
from jaxdist.runtime.cluster_environment import JoinPlan, resolve, visible_gpus
from jaxdist.runtime.distributed import DeviceRow, Job, join
from jaxdist.runtime.entry_point import (
    EXIT_CONFIG,
    EXIT_FAILURE,
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_SDC,
    Agreed,
    is_consequence,
    run_command,
)
from jaxdist.runtime.logs import setup_logging
from jaxdist.runtime.signals import NOTICES, Preemption, TraceRequests

__all__ = [
    "DEFAULT_MEMORY_FRACTION",
    "EXIT_CONFIG",
    "EXIT_FAILURE",
    "EXIT_HANG",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_PREEMPTED",
    "EXIT_SDC",
    "MEMORY_FRACTION",
    "NOTICES",
    "Agreed",
    "DeviceRow",
    "Job",
    "JoinPlan",
    "Preemption",
    "TraceRequests",
    "be_careful",
    "is_consequence",
    "join",
    "reserve_memory",
    "resolve",
    "run_command",
    "setup_compilation_cache",
    "setup_logging",
    "simulate",
    "visible_gpus",
]
