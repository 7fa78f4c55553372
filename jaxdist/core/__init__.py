"""The training core: mesh, shardings, collectives, the compiled step. Accesses no files."""
