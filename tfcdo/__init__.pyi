# The public names, once: `tfcdo/__init__.py` fetches each from its module when it is used.
__all__: list[str]

from . import keras as keras
from . import topology as topology
from .cross_device_ops import AllReduceCrossDeviceOps as AllReduceCrossDeviceOps
from .cross_device_ops import AutoAllReduce as AutoAllReduce
from .cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from .cross_device_ops import NcclAllReduce as NcclAllReduce
from .cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from .execute.nccl import NcclStatus as NcclStatus
from .execute.nccl import nccl_status as nccl_status
from .plot.trace import trace as trace
from .strategies import MirroredStrategy as MirroredStrategy
from .strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from .strategies import is_chief as is_chief
from .version import __version__ as __version__
