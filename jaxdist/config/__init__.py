"""Settings of a run: every room's dataclass in one table of contents, a TOML file, and flags.

    fields    what a tree of dataclasses offers, and how a value is read
    sources   the TOML file and the command line, each value with its origin
    reading   defaults + file + flags -> one checked dataclass, every problem in one message
    help      `--help`
    writing   settings as TOML that reads back equal

Importing this starts no device.
"""
