"""Is this machine, and are all machines of a job, ready for a long run?

    options     the question: a run's settings, as training takes them
    checks      all checks in their order
    findings    what a check says: severity, text, fix; what many processes say as one; the report
    variables   environment variables that hurt
    software    versions that do not go together, and one code everywhere
    gpus        what nvidia-smi says of GPUs and of the links between them
    host        disk, shared memory, limits of the process
    slurm       what the cluster does to a job that it ends
    network     every pair of processes reachable, clocks compared
    directory   a shared directory that really is shared
    devices     each device computes the same, and how fast they add up over each mesh axis

Each check reads the machine in one function (`examine_...`) and rates what it read in another
(`check_...`), so that tests can show it the output of broken machines.
"""
