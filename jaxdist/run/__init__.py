"""A training run: setup, the step report, evaluation, monitoring and guards."""
