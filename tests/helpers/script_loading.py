"""Imports scripts that are in no package."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType


def load_script(path: pathlib.Path) -> ModuleType:
    """Runs a Python file as a module of its own, named like the file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
