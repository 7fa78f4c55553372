"""Makes `python -m jaxdist.report` the command."""

import sys

from jaxdist.report import main

sys.exit(main())
