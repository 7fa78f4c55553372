"""What a launcher tells the person who watches it."""

import sys


def say(text: str) -> None:
    """Write one line to stderr, with the launcher's name in front."""
    print(f"launch: {text}", file=sys.stderr, flush=True)
