"""Answers the doctor's questions in a process that may hang or crash.

TensorFlow is imported by the first question, whose answer says whether that works.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import math
import platform
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfcdo.bench import worker_pool
from tfcdo.doctor.examination import STRATEGIES, Check, Machine, Versions
from tfcdo.topology import detection
from tfcdo.version import __version__, adds_metrics_twice

if TYPE_CHECKING:
    from tfcdo.bench import devices, measure

# The same as in pyproject.toml, which is not there where tfcdo is installed: a test compares them.
OLDEST_TENSORFLOW = (2, 16)
_OLDEST = ".".join(map(str, OLDEST_TENSORFLOW))
# Bytes that are copied between two devices, and of a value that is summed.
_PATTERN_BYTES, _SUM_BYTES = 2**22, 2**20
# The tiny fit's steps, rows per device and step, and learning rate.
_STEPS, _ROWS, _RATE = 4, 2, 0.5
_ROUNDING = 1e-4  # Largest relative difference of a metric.


class Probe:
    """The questions: `versions`, `machine`, and after that `pair`, `sum` and `fit`."""

    _devices: devices.ChosenDevices

    def versions(self) -> Versions:
        """Imports TensorFlow and says which versions there are, and whether it can be used."""
        found: dict[str, Any] = {}
        try:
            for name in ("numpy", "tensorflow"):
                found[name] = importlib.import_module(name).__version__
            tensorflow = importlib.import_module("tensorflow")
            build = tensorflow.sysconfig.get_build_info()
            found["cuda"] = build.get("cuda_version")
            found["without_kernels"] = _without_kernels(tensorflow.config, build)
            problem, remedy = _problem_of_tensorflow(str(found["tensorflow"]))
            # Keras is needed by Keras users only.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found["keras"] = importlib.metadata.version("keras")
        except Exception as error:
            # Whatever a broken installation raises: a missing library, a numpy of the wrong age.
            problem = f"TensorFlow cannot be imported: {worker_pool.first_line(error)}"
            remedy = f"pip install 'tensorflow>={_OLDEST}'"
        python = platform.python_version()
        return Versions(__version__, python, **found, problem=problem, remedy=remedy)

    def machine(self, count: int | None) -> Machine:
        """Chooses devices; says what TensorFlow sees, and how tfcdo would use the devices."""
        import tensorflow as tf

        import tfcdo
        from tfcdo.bench import devices

        tf.get_logger().setLevel("ERROR")
        self._devices = devices.choose_devices(count)
        names = self._devices.names
        topology, reason = detection.detect_with_reason(names)
        nccl = tfcdo.nccl_status(names)
        return Machine(
            physical=[device.name for device in tf.config.list_physical_devices()],
            logical=[device.name for device in tf.config.list_logical_devices()],
            examined=names,
            description=self._devices.description,
            on_cpu=self._devices.on_cpu,
            gpus_of_nvidia_smi=list(detection.gpus_of_nvidia_smi()),
            topology=topology,
            topology_reason=reason,
            nccl_problem="" if nccl.can_run else nccl.reason,
            nccl_remedy=nccl.remedy,
        )

    def pair(self, source: int, target: int) -> Check:
        """Copies a known pattern from one device to another and compares every byte."""
        import tensorflow as tf

        from tfcdo.execute import device_ops

        # Bytes that differ from device to device.
        pattern = np.random.default_rng(source).integers(0, 256, _PATTERN_BYTES, np.uint8)
        with tf.device(self._devices.names[source]):
            sent = tf.identity(tf.constant(pattern))

        # As in a training step: a graph that begins on one device and ends on another.
        @tf.function(autograph=False)
        def send(tensor: tf.Tensor) -> tf.Tensor:
            return device_ops.copy([tensor], self._devices.names[target])[0]

        wrong = np.count_nonzero(send(sent).numpy() != pattern)
        return Check(f"{wrong} bytes" if wrong else "")

    def sum(self, name: str) -> Check:
        """All-reduces over all devices and compares every element with numpy's sum."""
        from tfcdo.bench import measure

        (implementation,) = measure.parse(name)
        data = self._values
        if implementation.reason_not_to_run(self._devices.names, data.workload.dtype):
            return Check(ran=False)
        built = measure.build(data, implementation)
        elements = data.workload.count * len(self._devices.names)
        text = f"{built.num_wrong} of {elements} elements on {len(self._devices.names)} devices"
        return Check(f"{text}, without an error" if built.num_wrong else "")

    @functools.cached_property
    def _values(self) -> measure.Data:
        """Returns the values that all classes sum."""
        from tfcdo.bench import measure, workloads

        return measure.Data(workloads.one_value(_SUM_BYTES, "float32"), self._devices)

    def fit(self, name: str) -> Check:
        """Trains one weight, from 0, to repeat its inputs, and in numpy too."""
        import keras
        import tensorflow as tf

        import tfcdo
        from tfcdo.bench import measure

        names = list(self._devices.names)
        if name == STRATEGIES[0]:
            strategy = tfcdo.MirroredStrategy(names)
        else:
            # TensorFlow's default is one of the sums above, whose collectives cannot begin again.
            (theirs,) = measure.parse("tf.ReductionToOneDevice")
            strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=theirs.ops)
        batch = _ROWS * len(names)
        inputs = np.linspace(0.0, 1.0, _STEPS * batch)[:, None]
        with strategy.scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input([1]), layer])
            model.compile(keras.optimizers.SGD(_RATE), "mse", metrics=["mae"])
        found = model.fit(inputs, inputs, batch, shuffle=False, verbose=0).history
        weight, squares, errors = 0.0, [], []
        for rows in np.split(inputs, _STEPS):
            error = (weight - 1) * rows
            squares.append(np.mean(error**2))
            errors.append(np.mean(np.abs(error)))
            weight -= _RATE * float(np.mean(2 * error * rows))
        expected = {"loss": np.mean(squares), "mae": np.mean(errors)}
        # NaN is not close to anything.
        problem = ", ".join(
            f"{metric} is {found[metric][0]:.5g} instead of {value:.5g}"
            for metric, value in expected.items()
            if not math.isclose(found[metric][0], value, rel_tol=_ROUNDING)
        )
        if problem and name != STRATEGIES[0] and adds_metrics_twice(keras.__version__):
            problem += f". Keras {keras.__version__} adds the replicas' parts twice, until they "
            problem += "are NaN; Keras 3.10 does not (keras-team/keras#21467)"
        return Check(problem)


def _problem_of_tensorflow(version: str) -> tuple[str, str]:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < OLDEST_TENSORFLOW:
        return (
            f"TensorFlow {version} is older than {_OLDEST}, the oldest that tfcdo runs on",
            f"pip install --upgrade 'tensorflow>={_OLDEST}'",
        )
    try:
        importlib.import_module("tfcdo.tf_internals")
    except (ImportError, AttributeError) as error:
        reason = worker_pool.first_line(error)
        return (
            f"TensorFlow {version} lacks something that tfcdo needs: {reason}",
            "install a TensorFlow that docs/versions.md lists, or a newer tfcdo",
        )
    return "", ""


def _without_kernels(config: Any, build: Mapping[str, Any]) -> list[str]:
    """Names the GPUs that none of TensorFlow's compiled kernels run on."""
    names = []
    # Such as sm_89, and compute_90, which is compiled too and can be compiled again.
    built = re.findall(r"_(\d+)(\d)", " ".join(build.get("cuda_compute_capabilities", ())))
    for gpu in config.list_physical_devices("GPU"):
        details = config.experimental.get_device_details(gpu)
        if "compute_capability" in details:
            major, minor = details["compute_capability"]
            # Kernels run on GPUs of their generation that are not older.
            if built and not any(int(x) == major and int(y) <= minor for x, y in built):
                number = gpu.name.rpartition(":")[2]
                names.append(f"GPU:{number} (compute capability {major}.{minor})")
    return names


if __name__ == "__main__":
    worker_pool.serve(Probe)
