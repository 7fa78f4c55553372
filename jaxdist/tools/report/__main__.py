"""`python -m jaxdist.report RUN ...`: compare runs as text, JSON and a page of curves."""

import sys

from jaxdist.tools.report import main

sys.exit(main())
