"""Run a command in a fork: python -m forked_command FOLDER ERRORS (MODULE | -c CODE) ..."""

import os
import runpy
import sys

folder, errors, *sys.argv = sys.argv[1:]
os.chdir(folder)
sys.path[0] = folder
os.dup2(os.open(errors, os.O_WRONLY), 2)
if sys.argv[0] == "-c":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
