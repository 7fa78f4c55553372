"""Estimates of memory, traffic, time and cost of a run, before any device starts.

    job            one run's settings on one mesh of GPUs, with the sizes that everything else uses
    model_trace    FLOPs, saved bytes and structure of a model, from the trace of its functions
    model_costs    work and activations of a model on one device: a decoder's, or any other's
    attention      keys that queries see, load imbalance, kernel scratch
    memory         bytes of one device: the state, and each phase of a step
    remat          `train.remat = auto`
    memory_check   the estimate that training logs, enforces, and compares with the compiled step
    traffic        every collective, by mesh axes
    products       rates of matrix products: tiles, waves, the power limit
    software       efficiency of our kernels
    muon           matrices that Muon orthogonalizes on one device
    time           seconds of a step, by a roofline
    cost           days, money, checkpoints
    restart        seconds of a restart
    search         the best mesh, and why others lose
    suggestions    the smallest change that makes a run fit

The model's shapes are built, never its weights.
"""
