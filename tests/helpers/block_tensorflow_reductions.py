"""TensorFlow's own reductions, replaced by functions that raise: what still passes needs none.

Beside the functions of `cross_device_utils` and the concrete classes, the helpers are replaced that
the classes share with their base class.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from tensorflow.python.distribute import cross_device_ops, cross_device_utils

CONCRETE_CLASSES = (
    "ReductionToOneDevice",
    "AllReduceCrossDeviceOps",
    "NcclAllReduce",
    "HierarchicalCopyAllReduce",
    "CollectiveAllReduce",
    "_ConcatAndSplitPacker",
)
HELPERS = (
    "reduce_non_distributed_value",
    "simple_broadcast",
    "_simple_reduce",
    "_simple_gather",
    "_group_value_by_device",
    "_ungroup_and_make_mirrored",
    "_pack_tensors",
    "_unpack_tensors",
)


class SabotageError(Exception):
    """Raised by everything that is replaced."""


@contextlib.contextmanager
def installed() -> Iterator[list[str]]:
    """While this lasts, TensorFlow's reductions raise.

    The methods of the classes are replaced in place, and functions in every module that imported
    them, so it does not matter by which name they are reached.
    """
    replaced: list[str] = []
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, key: str, name: str) -> None:
            stack.enter_context(mock.patch.object(owner, key, _raiser(name)))
            replaced.append(name)

        functions = dict(_own(cross_device_utils, inspect.isfunction))
        functions |= {name: getattr(cross_device_ops, name) for name in HELPERS}
        for name, function in functions.items():
            for module in list(sys.modules.values()):
                for key in [key for key, value in _variables(module) if value is function]:
                    replace(module, key, name)
        classes = [getattr(cross_device_ops, name) for name in CONCRETE_CLASSES]
        classes += [cls for _, cls in _own(cross_device_utils, inspect.isclass)]
        for cls in classes:
            for key, value in list(vars(cls).items()):
                if inspect.isfunction(value):
                    replace(cls, key, f"{cls.__name__}.{key}")
        yield replaced


def _own(module: ModuleType, kind: Any) -> list[tuple[str, Any]]:
    """Returns what a module defines itself."""
    return [
        (name, value)
        for name, value in inspect.getmembers(module, kind)
        if value.__module__ == module.__name__
    ]


def _variables(module: Any) -> list[tuple[str, Any]]:
    name = getattr(module, "__name__", "")
    if not name.startswith(("tensorflow.python.distribute", "tfcdo")):
        return []
    return list(vars(module).items())


def _raiser(name: str) -> Any:
    def raise_error(*args: Any, **kwargs: Any) -> Any:
        raise SabotageError(f"TensorFlow's {name} was called")

    return raise_error
