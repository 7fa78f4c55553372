"""Guards of a run. They detect failures; the training loop saves, restores and stops."""
