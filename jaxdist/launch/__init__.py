"""Starting jobs and keeping them alive.

Standard library only, and no jax: a launcher holds no device and starts in milliseconds.
"""
