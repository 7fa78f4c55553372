"""Estimates of memory, traffic, time and cost of a run; no weights are allocated."""
