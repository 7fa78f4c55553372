"""Check that this machine, and all machines of a job, are ready for a long run.

    checks      the settings, all checks in their order
    findings    results of checks: severity, text, fix; merging those of processes; the report
    variables   environment variables that slow down or break a run
    software    installed versions
    gpus        GPUs and their links, from nvidia-smi
    host        disk, shared memory, limits of the process, SLURM's settings
    processes   connections and clocks of all processes, and their shared directory
    devices     equal results of all devices, speed of all-reduce over each mesh axis

Each check reads the machine in one function (`examine_...`) and rates the values in another
(`check_...`), which tests call with values of broken machines.
"""
