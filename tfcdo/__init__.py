"""tfcdo: cross-device ops for TensorFlow, right on any machine.

strategy = tf.distribute.MirroredStrategy(cross_device_ops=tfcdo.HierarchicalCopyAllReduce())
"""

from tfcdo import topology
from tfcdo.cross_device_ops import AllReduceCrossDeviceOps
from tfcdo.cross_device_ops import AutoAllReduce
from tfcdo.cross_device_ops import HierarchicalCopyAllReduce
from tfcdo.cross_device_ops import NcclAllReduce
from tfcdo.cross_device_ops import ReductionToOneDevice
from tfcdo.nccl import NcclStatus
from tfcdo.nccl import nccl_status
from tfcdo.version import __version__

__all__ = [
    "AllReduceCrossDeviceOps",
    "AutoAllReduce",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "NcclStatus",
    "ReductionToOneDevice",
    "__version__",
    "nccl_status",
    "topology",
]
