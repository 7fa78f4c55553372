"""Looking at checkpoints and rewriting them, on any machine, with little memory.

One file for each verb: its settings (`Config`) and what it does with them (`run`).
`checkpoint_paths` says which checkpoint a path means.
"""
