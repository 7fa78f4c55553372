"""`python -m jaxdist.plan`: does it fit, with which mesh, how fast, at what price, and the proof.

__main__   the command, its advice and its page
compiled   the very train step compiled by the real XLA:GPU compiler, without a GPU
compiler   the process that compiles
program    what a compiled program moves: its text read collective by collective
target     a GPU described to the compiler, from its datasheet
"""
