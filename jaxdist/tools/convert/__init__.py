"""Inspect, verify, compare and rewrite checkpoints, import and export models."""
