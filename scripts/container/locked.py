"""Says which installed packages are not those of the lock file, and exits with 1 if any is not.

python scripts/container/locked.py constraints.txt
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

OWN = ("jaxdist", "pip")  # jaxdist is what is locked, and pip what installs it


def main() -> int:
    """Compare what is installed."""
    installed = {str(each.metadata["Name"]): each.version for each in distributions()}
    wrong = differences(installed, Path(sys.argv[1]).read_text())
    print("\n".join([*wrong, f"{len(installed)} packages, {len(wrong)} not as locked"]))
    return 1 if wrong else 0


def differences(installed: Mapping[str, str], lock: str) -> list[str]:
    """One line for each package (name -> version) that is not in a lock file or not as it says."""
    entries = [Requirement(line) for line in lock.splitlines() if re.match(r"\w", line)]
    holds = {x.name: x.specifier for x in entries if x.marker is None or x.marker.evaluate()}
    lines = []
    for package, version in sorted(installed.items()):
        name = re.sub("[-_.]+", "-", package).lower()
        if name in OWN:
            continue
        if name not in holds:
            lines.append(f"{name} {version}: not in the lock file")
        elif version not in holds[name]:
            lines.append(f"{name} {version}: locked is {holds[name]}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
