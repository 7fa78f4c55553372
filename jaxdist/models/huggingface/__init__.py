"""Read and write Hugging Face model directories.

config_keys   keys of `config.json`: used, harmless or rejected
families      model settings from `config.json` and back
tensors       map of tensors to our arrays
safetensors   the file format, read block by block, written tensor by tensor
directory     `config.json` and the tensors of a directory, checked against each other
loading       weights onto a mesh; each process reads the shards of its devices
"""
