"""Start and end a process: devices, job, log, stop requests, failures. Imports no jax itself."""

from jaxdist.runtime.backend import (
    enable_debug_checks,
    reserve_memory,
    setup_compilation_cache,
    simulate,
)
from jaxdist.runtime.cluster_environment import JoinPlan, listed_gpus, resolve, visible_gpus
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
