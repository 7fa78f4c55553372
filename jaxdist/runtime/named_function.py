"""Functions that settings name as module:function."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def named_function(name: str) -> Any:
    """What `module:function` names; the current directory is importable, as for a script.

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such function.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)
