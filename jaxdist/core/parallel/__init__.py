"""Ways to split the work over the mesh, one file per axis; none of them knows a model."""
