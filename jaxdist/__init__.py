"""jaxdist: train models on many NVIDIA GPUs with JAX and Flax, one compiled step on a named mesh.

Importing the package starts no device and imports no heavy library: each room is imported by name
(`from jaxdist.mesh import MeshSpec`), each command is `python -m jaxdist.<name>`.
"""

__version__ = "0.1.0"
