"""`python -m jaxdist.plan`: estimate whether a run fits, on which mesh, how fast, at what cost."""
