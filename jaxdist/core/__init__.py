"""The training core: mesh, shardings, collectives, the compiled step. Knows no files."""
