"""Parallelism over the mesh, one file per axis; no file depends on a model."""
