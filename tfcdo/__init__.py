"""tfcdo: cross-device ops for TensorFlow, right on any machine.

strategy = tf.distribute.MirroredStrategy(cross_device_ops=tfcdo.HierarchicalCopyAllReduce())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfcdo.version import __version__

if TYPE_CHECKING:
    from tfcdo import topology
    from tfcdo.cross_device_ops import AllReduceCrossDeviceOps
    from tfcdo.cross_device_ops import AutoAllReduce
    from tfcdo.cross_device_ops import HierarchicalCopyAllReduce
    from tfcdo.cross_device_ops import NcclAllReduce
    from tfcdo.cross_device_ops import ReductionToOneDevice
    from tfcdo.execute.nccl import NcclStatus
    from tfcdo.execute.nccl import nccl_status
    from tfcdo.strategies import MirroredStrategy
    from tfcdo.strategies import MultiWorkerMirroredStrategy
    from tfcdo.strategies import is_chief

__all__ = [
    "AllReduceCrossDeviceOps",
    "AutoAllReduce",
    "HierarchicalCopyAllReduce",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "NcclStatus",
    "ReductionToOneDevice",
    "__version__",
    "is_chief",
    "nccl_status",
    "topology",
]

# Planning needs no TensorFlow, which takes seconds to import: each name is fetched when it is used.
_MODULES = {
    "AllReduceCrossDeviceOps": "tfcdo.cross_device_ops",
    "AutoAllReduce": "tfcdo.cross_device_ops",
    "HierarchicalCopyAllReduce": "tfcdo.cross_device_ops",
    "MirroredStrategy": "tfcdo.strategies",
    "MultiWorkerMirroredStrategy": "tfcdo.strategies",
    "NcclAllReduce": "tfcdo.cross_device_ops",
    "NcclStatus": "tfcdo.execute.nccl",
    "ReductionToOneDevice": "tfcdo.cross_device_ops",
    "is_chief": "tfcdo.strategies",
    "nccl_status": "tfcdo.execute.nccl",
}


def __getattr__(name: str) -> Any:
    if name == "topology":
        return importlib.import_module("tfcdo.topology")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
