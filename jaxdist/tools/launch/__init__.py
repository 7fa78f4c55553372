"""Starting jobs and keeping them alive: on this host (`local`), or through a scheduler.

    local          flags to a plan
    supervisor     runs attempts, and decides whether to start again
    worker_group   the processes of one attempt, and why it ended; `worker` is one of them
    fork_server    a process that has imported for the next start, and forks
    elastic_agent  elastic jobs: who takes part in each round, and when it ends
    membership     the limits of an elastic job, and the largest legal one of the hosts here
    rendezvous     small files in the run directory by which launchers see each other
    console        lines for the person who watches
    resources      GPUs and ports of this host
    slurm          flags to a batch script, and sbatch
    slurm_script   the batch script: its rules and its text
    kubernetes     flags to a manifest, and kubectl

No jax is imported: a launcher holds no device and starts in milliseconds. `membership` and
`fork_server` have processes of their own for that.
"""
