"""Looks at the devices through TensorFlow, and sends patterns and sums over them."""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import devices as bench_devices
from tfcdo.bench import implementations, measure, workloads
from tfcdo.doctor.examination import Copies, Machine, Sums
from tfcdo.execute import copy_trees
from tfcdo.log import format_bytes
from tfcdo.plan.packing import deal_owners, owned_sizes
from tfcdo.topology import detection

_MODELS = ("mobilenet", "bert-base")
# Bytes that are copied between two devices. Between GPUs many, as the call itself takes a while.
_PATTERN_BYTES = {True: 2**22, False: 2**26}
_SUM_BYTES = 2**20
_SLOTS_OF_ADAM = 2


class Patient:
    """The devices of this process, and the questions about them."""

    def __init__(self, count: int | None) -> None:
        tf.get_logger().setLevel("ERROR")
        self._devices = bench_devices.choose_devices(count)

    def machine(self) -> Machine:
        """Says what TensorFlow sees, which devices are examined, and how tfcdo would use them."""
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
            topology=topology.to_json(),
            topology_reason=reason,
            nccl_problem="" if nccl.can_run else nccl.reason,
            nccl_remedy=nccl.remedy,
            models=list(map(self._choices_for, _MODELS)),
        )

    def _choices_for(self, model: str) -> str:
        """Says what `AutoAllReduce` would do with a model's gradients, and the memory of Adam."""
        workload = workloads.gradients_of(model)
        plan = tfcdo.AutoAllReduce().explain(workload.shapes, devices=self._devices.names)
        sizes = [math.prod(shape) * workload.itemsize for shape in workload.shapes]
        count = len(self._devices.names)
        share = max(owned_sizes(sizes, deal_owners(sizes, count), count))
        return (
            f"{model} ({format_bytes(workload.size)} in {len(sizes)} gradients): "
            f"{plan.algorithm} in {plan.num_packs} pack{'' if plan.num_packs == 1 else 's'}, "
            f"{plan.num_graph_ops} graph ops; Adam's state "
            f"{format_bytes(_SLOTS_OF_ADAM * workload.size)} a device, "
            f"{format_bytes(_SLOTS_OF_ADAM * share)} with shard_optimizer_state"
        )

    def pair(self, source: int, target: int, seconds: float) -> Copies:
        """Copies a known pattern from one device to another and compares every byte."""
        pattern, sent = self._pattern_on(source)
        receiver = self._devices.names[target]

        # As in a training step: a graph that begins on one device and ends on another.
        @tf.function(autograph=False)
        def send(tensor: tf.Tensor) -> tf.Tensor:
            return copy_trees.copy([tensor], receiver)[0]

        received = send(sent).numpy()
        wrong = int(np.count_nonzero(received != pattern))
        end, fastest = time.perf_counter() + seconds, np.inf
        while time.perf_counter() < end:
            start = time.perf_counter()
            send(sent)
            self._devices.wait()
            fastest = min(fastest, time.perf_counter() - start)
        return Copies(wrong, pattern.size / fastest)

    def sum(self, name: str) -> Sums:
        """All-reduces over all devices and compares every element with numpy's sum."""
        (implementation,) = implementations.parse(name)
        data = self._values
        if implementation.reason_not_to_run(self._devices.names, data.workload.dtype):
            return Sums()
        built = measure.build(data, implementation.reducer(self._devices.names))
        return Sums(data.workload.count * len(self._devices.names), built.num_wrong)

    @functools.cached_property
    def _values(self) -> measure.Data:
        return measure.place_values(workloads.one_value(_SUM_BYTES, "float32"), self._devices)

    @functools.cache  # noqa: B019 - there is one patient in a process
    def _pattern_on(self, source: int) -> tuple[np.ndarray, tf.Tensor]:
        """Draws bytes that differ from device to device, and puts them on one."""
        size = _PATTERN_BYTES[self._devices.on_cpu]
        pattern = np.random.default_rng(source).integers(0, 256, size, np.uint8)
        with tf.device(self._devices.names[source]):
            return pattern, tf.identity(tf.constant(pattern))
