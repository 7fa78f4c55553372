"""Estimates of memory, traffic, time and cost of a run, before any device starts.

Only the shapes of the model are computed; no weights are allocated.
"""
