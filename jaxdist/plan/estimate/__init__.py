"""Arithmetic before any device is started: memory, traffic, time and cost of a run on a cluster.

    job            one run's settings on one mesh of some GPUs, and the sizes all else counts in
    model_trace    what a model computes and keeps, read off its own functions
    memory         bytes of one device; `activations`: what layers keep and work with
    memory_check   what training logs, refuses and compares on the GPUs it has
    flops          FLOPs, and bytes of memory-bound kernels
    traffic        every collective by mesh axes
    schedule_costs what a pipeline's schedule costs
    products       how fast matrix products run: tiles, waves, the power limit
    software       what kernels reach in our step
    time           seconds of a step, by a roofline
    cost           days, money, checkpoints
    search         the best mesh, and why others lose
    suggestions    the least change that makes a run fit

`python -m jaxdist.plan` and `train` use it. The model is built (its shapes, never its weights) and
no device is started.
"""
