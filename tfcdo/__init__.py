"""tfcdo: cross-device ops for TensorFlow, right on any machine.

strategy = tf.distribute.MirroredStrategy(cross_device_ops=tfcdo.HierarchicalCopyAllReduce())
"""

import lazy_loader

# Planning needs no TensorFlow, which takes seconds to import: each name is fetched when it is used.
# The table of the public names is `__init__.pyi`, which type checkers read too.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
