"""Start jobs and restart them after failures: on this host (`local`), or through a scheduler.

    local          read the flags and start a supervisor
    supervisor     run attempts and decide after each whether to restart
    worker_group   the processes of one attempt and the reason for its end; `worker` is one process
    fork_server    a process with all imports done, forked at a restart
    elastic_agent  elastic jobs: choose the members of each round and end it
    membership     the limits of an elastic job and the largest legal job of the hosts present
    rendezvous     files in the run directory through which launchers see each other
    resources      GPUs, memory kills and ports of this host
    slurm          write a batch script and submit it; `slurm_script` renders it
    kubernetes     write a manifest and pass it to kubectl

The launcher imports no jax: it holds no device and starts in milliseconds. `membership.read_sizes`
and `fork_server` start child processes that do.
"""

import sys


def log(text: str) -> None:
    """Write one line to stderr, after the launcher's name."""
    print(f"launch: {text}", file=sys.stderr, flush=True)
