"""Arithmetic before any device is touched: memory, traffic, time and cost of a run on a cluster.

    job          one run's settings on one mesh of some GPUs, and the sizes all else counts in
    weights      the parameters, leaf by leaf         stages     what a pipeline's schedule costs
    memory       bytes of one device; `activations` what layers keep and work with
    traffic      every collective by mesh axes        work       FLOPs and bytes of the rest
    time         a step's seconds, by a roofline      cost       days, money, checkpoints
    search       the best mesh, and why others lose   fixing     the least change that makes it fit
    budget       what training says, refuses and compares on the GPUs it has

`jaxdist plan` and `train` use it. No device is started and no model code imported.
"""
