"""Shared by tests of the bench: its devices, measurements, and ops that are wrong on purpose."""

import tensorflow as tf
import testing_utils as tu  # It configures the virtual devices.

from tfcdo.bench import results

TF_HIERARCHICAL = "tf.HierarchicalCopyAllReduce(num_packs=1)"
_kernels = tu.kernels_for("GPU")
# For test files to take over by names that unittest finds.
set_up, tear_down = _kernels.start, _kernels.stop


def measurement_of(name: str, kind: str, seconds: float, wrong: int = 0) -> results.Measurement:
    return results.Measurement(
        name, kind, 4, seconds, 0.0, "w", 4000, 1000, wrong=wrong, first_call=1.0
    )


def forgets_the_last_device() -> tf.distribute.CrossDeviceOps:
    return tf.distribute.ReductionToOneDevice(None, lambda values: tf.add_n(values[:-1]))
