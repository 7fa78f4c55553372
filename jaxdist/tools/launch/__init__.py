"""Starting jobs and keeping them alive: on this host (`local`), or through SLURM (`slurm`).

    local        flags to a plan
    supervisor   attempts, and the rules for starting again
    attempt      the processes of one attempt, and why it ended
    host         GPUs and ports of this host
    elastic      ranges of hosts and processes: the largest legal job of what is there
    rendezvous   small files in the run directory by which launchers see each other
    rounds       who takes part until when: waiting, leading, losing a host, growing
    sizing       device counts with which training is legal
    slurm        flags to a batch script, and sbatch
    batch        the script: one SLURM job, its rules, its text

No jax: a launcher holds no device and starts in milliseconds (`sizing` asks a process of its own).
"""
