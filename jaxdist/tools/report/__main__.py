"""`python -m jaxdist.report RUN ...`: compare runs as text, JSON and a page of curves."""

from jaxdist.runtime import run_command
from jaxdist.tools.report import main

run_command(main)
