"""The train step compiled by the real XLA:GPU compiler, and what its program holds."""
