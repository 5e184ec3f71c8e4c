"""tfcdo: train Keras 3 on several devices or hosts, with one-device results.

strategy = tfcdo.MirroredStrategy()  # several hosts: tfcdo.MultiWorkerMirroredStrategy()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfcdo import exchange as exchange
    from tfcdo import keras as keras
    from tfcdo import plan as plan
    from tfcdo import plot as plot
    from tfcdo import topology as topology
    from tfcdo.cluster.protocol import ClusterError as ClusterError
    from tfcdo.cluster.protocol import DisagreementError as DisagreementError
    from tfcdo.cluster.protocol import LateHostError as LateHostError
    from tfcdo.cluster.protocol import RendezvousError as RendezvousError
    from tfcdo.cluster.watch import HostDelay as HostDelay
    from tfcdo.cross_device_ops import AllReduceCrossDeviceOps as AllReduceCrossDeviceOps
    from tfcdo.cross_device_ops import AutoAllReduce as AutoAllReduce
    from tfcdo.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from tfcdo.cross_device_ops import NcclAllReduce as NcclAllReduce
    from tfcdo.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
    from tfcdo.execute.explain import Explanation as Explanation
    from tfcdo.execute.nccl import NcclStatus as NcclStatus
    from tfcdo.execute.nccl import nccl_status as nccl_status
    from tfcdo.strategies import MirroredStrategy as MirroredStrategy
    from tfcdo.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from tfcdo.strategies import is_chief as is_chief
    from tfcdo.tracing.recording import Trace as Trace
    from tfcdo.tracing.recording import trace as trace
    from tfcdo.version import __version__ as __version__
    from tfcdo.virtual_devices import configure_virtual_cpus as configure_virtual_cpus

# Planning needs no TensorFlow, which takes seconds to import: each public name is fetched from its
# module when it is first used. Type checkers read the imports above; a test compares both.
_MODULES = {
    "AllReduceCrossDeviceOps": "cross_device_ops",
    "AutoAllReduce": "cross_device_ops",
    "HierarchicalCopyAllReduce": "cross_device_ops",
    "NcclAllReduce": "cross_device_ops",
    "ReductionToOneDevice": "cross_device_ops",
    "HostDelay": "cluster.watch",
    "ClusterError": "cluster.protocol",
    "DisagreementError": "cluster.protocol",
    "LateHostError": "cluster.protocol",
    "RendezvousError": "cluster.protocol",
    "Explanation": "execute.explain",
    "NcclStatus": "execute.nccl",
    "nccl_status": "execute.nccl",
    "Trace": "tracing.recording",
    "trace": "tracing.recording",
    "MirroredStrategy": "strategies",
    "MultiWorkerMirroredStrategy": "strategies",
    "is_chief": "strategies",
    "__version__": "version",
    "configure_virtual_cpus": "virtual_devices",
}
_PACKAGES = ("exchange", "keras", "plan", "plot", "topology")
__all__ = [*_MODULES, *_PACKAGES]


# For type checkers the imports above are all; they would take any name for one of this function's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"tfcdo.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'tfcdo' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"tfcdo.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
