"""Compile the train step with the real XLA:GPU compiler, and read the compiled program."""
