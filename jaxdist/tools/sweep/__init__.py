"""`jaxdist sweep`: train every combination of some settings, in turn or as a SLURM job array."""
