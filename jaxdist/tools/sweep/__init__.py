"""`jaxdist sweep`: train every combination of some settings, sequentially or as a SLURM job array.

grid      combinations, each checked by training's own reader
__main__  one process per combination, or one task of a job array
"""
