"""Monitoring of a run: console, metrics.jsonl, TensorBoard, and other files; see `monitor`."""
