"""Inspect, verify, compare and rewrite checkpoints, on any machine, with little memory."""
