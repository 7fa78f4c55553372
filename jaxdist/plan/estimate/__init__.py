"""Estimates of memory, traffic, time and cost of a run, before any device starts.

    job            settings of a run on one mesh of GPUs, with derived sizes
    model_trace    FLOPs, saved bytes and structure of a model, from traces of its functions
    model_costs    work and activations of a model on one device: for decoders, and in general
    attention      number of keys per query, load imbalance, kernel scratch
    memory         bytes of one device: the state, and each phase of a step
    remat          choice of `train.remat = auto`
    memory_check   logs the estimate, rejects runs that do not fit, checks the compiled step
    traffic        all collectives, by mesh axes
    products       achievable rate of matrix products: tiles, waves, the power limit
    software       efficiency of our kernels
    muon           matrices that Muon orthogonalizes on one device
    time           seconds of a step, by a roofline model
    cost           days, money, checkpoints
    restart        seconds of a restart
    search         the best mesh, and reasons why others are worse
    suggestions    the smallest change that makes a run fit

Only the shapes of the model are computed; no weights are allocated.
"""
