"""`set_distribution`: one line for data parallelism on each of Keras's backends."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfcdo.cluster import config
from tfcdo.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

_DataParallel = keras.distribution.DataParallel


def set_distribution(distribution: Any) -> None:
    """Trains all models of this process with a distribution, on each backend of Keras.

    On TensorFlow's backend, `keras.distribution.set_distribution` ignores what it accepts: models
    train on one device. There this function makes tfcdo's strategy the process's, as
    `tf.distribute.experimental_set_strategy` does: `MirroredStrategy` over the distribution's
    devices, or `MultiWorkerMirroredStrategy` where TF_CONFIG names several hosts. On other backends
    it calls Keras's function.

    Args:
      distribution: a `keras.distribution.DataParallel`; or that class itself, for all devices, as
        several hosts need it, because it looks for devices when an object is made; or None, for
        none.

    Raises:
      TypeError: on TensorFlow, if `distribution` is something else, such as a `ModelParallel`.
      ValueError: on several hosts of TensorFlow, if it is an object with devices of its own.
      RuntimeError: on several hosts of TensorFlow, as `MultiWorkerMirroredStrategy`.

    Example:
      >>> import keras
      >>> set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
      >>> tf.distribute.get_strategy().num_replicas_in_sync
      1
      >>> set_distribution(None)
    """
    if keras.backend.backend() != "tensorflow":
        made = distribution() if distribution is _DataParallel else distribution
        keras.distribution.set_distribution(made)
        return
    is_object = isinstance(distribution, _DataParallel)
    if not is_object and distribution not in (None, _DataParallel):
        raise TypeError(
            "distribution must be a keras.distribution.DataParallel or None on TensorFlow's "
            f"backend, which has no model parallelism; got {distribution!r}: to divide the "
            "optimizer's state, use tfcdo.MirroredStrategy(shard_optimizer_state=True)"
        )
    cluster = config.from_tf_config()
    strategy = None
    if cluster is not None and len(cluster.tasks) > 1 and distribution is not None:
        if is_object:
            raise ValueError(
                "distribution must be the class keras.distribution.DataParallel on several hosts, "
                "so that hosts meet before TensorFlow looks for devices; got an object of it"
            )
        strategy = MultiWorkerMirroredStrategy()
    elif distribution is not None:
        made = distribution if is_object else distribution()
        strategy = MirroredStrategy([f"/{name}" for name in made.device_mesh.devices.flat])
    tf.distribute.experimental_set_strategy(strategy)
