"""`jaxdist sweep`: train every combination of some settings, one after the other.

grid      which combinations, each checked by training's own reader   (read_sweep)
slurm_array  the same as a SLURM job array          (read_slurm, tasks_of)
__main__  one process for each, and what came of them
"""
