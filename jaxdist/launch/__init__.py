"""Starting jobs and keeping them alive: on this host (`local`), or through SLURM (`slurm`).

Standard library only, and no jax: a launcher holds no device and starts in milliseconds.
"""
