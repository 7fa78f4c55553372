"""jaxdist: train models on many NVIDIA GPUs with JAX and Flax, one compiled step on a named mesh.

Importing the package starts no device and imports no heavy library: each room is imported by name
(`from jaxdist.core.mesh import MeshSpec`), each command is `python -m jaxdist.<name>`.
"""

from pathlib import Path

__version__ = "0.1.0"

# The commands in tools/ run as `python -m jaxdist.launch` too. Code imports jaxdist.tools.launch.
__path__.append(str(Path(__file__).parent / "tools"))
