"""Import functions that settings name as module:function."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def named_function(name: str) -> Any:
    """Return the function `module:function`; modules of the current directory are importable."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)
