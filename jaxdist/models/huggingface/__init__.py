"""Hugging Face model directories: what is in them, and its place in a model of ours.

config_keys   which keys of a `config.json` are read, harmless or refused
families      their tensors and ours are the same: which, where, in which order
safetensors   the file format, read block by block, written tensor by tensor
directory     `config.json` and the tensors of a directory, checked against each other
loading       weights onto a mesh, each process reading what its devices hold
"""
