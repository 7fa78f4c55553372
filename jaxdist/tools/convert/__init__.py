"""Looking at checkpoints and rewriting them, on any machine, with little memory.

places        which checkpoint a path means
inspecting    what is in it                       checking      whether it is whole
comparing     what differs between two            resharding    rewrite it for another mesh
consolidating as safetensors
importing     from a Hugging Face model           exporting     to one
"""
