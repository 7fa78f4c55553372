"""Fuzz every reader with random inputs, for longer than CI does.

    python scripts/bench/fuzz.py [EXAMPLES]     5000 by default: about an hour on one core

It runs `tests/test_fuzz.py` with more examples, which differ each time. A failure prints the
smallest failing input; add it to the corpus in that file.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    """Run the property tests; return pytest's exit code."""
    examples = sys.argv[1] if len(sys.argv) > 1 else "5000"
    environment = {**os.environ, "JAXDIST_FUZZ_EXAMPLES": examples, "PYTHONPATH": str(ROOT)}
    tests = [sys.executable, "-m", "pytest", "-q", "tests/test_fuzz.py"]
    return subprocess.run(tests, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
