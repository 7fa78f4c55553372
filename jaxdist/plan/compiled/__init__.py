"""The train step compiled by the real XLA:GPU compiler, and the contents of its program."""
