"""Inspect, verify, compare and rewrite checkpoints, on any machine, with little memory.

One file per verb with its settings (`Config`) and function (`run`). `checkpoint_paths` finds the
checkpoint of a path.
"""
