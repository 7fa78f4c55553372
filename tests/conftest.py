"""Every test process simulates eight CPU devices; no test sees a real accelerator by accident."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Less work on machine code, three times quicker compilation; the program that is compiled, with
# its collectives and its memory, is decided before and stays the same.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax

jax.config.update("jax_num_cpu_devices", 8)
