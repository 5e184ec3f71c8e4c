"""Looks at the devices through TensorFlow, and sends patterns and sums over them."""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import devices as bench_devices
from tfcdo.bench import implementations, steps, workloads
from tfcdo.doctor import answers
from tfcdo.execute import copy_trees
from tfcdo.plan import owners
from tfcdo.topology import detection

# Bytes that are copied between two devices. Between GPUs many, as the call itself takes a while.
_PATTERN_BYTES = {True: 2**22, False: 2**26}
_SUM_BYTES = 2**20
_SLOTS_OF_ADAM = 2
_SAMPLES = 3


class Patient:
    """The devices of this process, and what can be asked about them."""

    def __init__(self, count: int | None) -> None:
        tf.get_logger().setLevel("ERROR")
        self._devices = bench_devices.choose_devices(count)

    def devices(self) -> answers.SeenDevices:
        """Says what TensorFlow sees and which devices are examined."""
        return answers.SeenDevices(
            physical=tuple(device.name for device in tf.config.list_physical_devices()),
            logical=tuple(device.name for device in tf.config.list_logical_devices()),
            examined=tuple(self._devices.names),
            description=self._devices.description,
            on_cpu=self._devices.on_cpu,
            gpus_of_nvidia_smi=tuple(detection.gpus_of_nvidia_smi()),
        )

    def all_reduces(self) -> tuple[answers.AllReduce, ...]:
        """Says of each of tfcdo's all-reduces whether it can run on these devices."""
        names = ("AutoAllReduce", "HierarchicalCopyAllReduce", "ReductionToOneDevice")
        copying = (
            answers.AllReduce(name, True, "copies between any devices", "") for name in names
        )
        nccl = tfcdo.nccl_status(self._devices.names)
        return (
            *copying,
            answers.AllReduce("NcclAllReduce", nccl.can_run, nccl.reason, nccl.remedy),
        )

    def topology(self) -> answers.FoundTopology:
        """Says what joins the devices, and how that was found."""
        topology, reason = detection.detect_with_reason(self._devices.names)
        links = (
            answers.LinkSpeed(
                *pair, float(bandwidth) if np.isfinite(bandwidth) else None, link.via_host
            )
            for pair, link in sorted(topology.link_by_pair.items())
            for bandwidth in [topology.bandwidth(*pair)]
        )
        return answers.FoundTopology(topology.name, reason, tuple(links))

    def auto(self, model: str) -> answers.ModelPlan:
        """Says what `AutoAllReduce` would do with a model's gradients."""
        workload = workloads.gradients_of(model)
        explained = tfcdo.AutoAllReduce().explain(workload.shapes, devices=self._devices.names)
        sizes = [math.prod(shape) * workload.itemsize for shape in workload.shapes]
        count = len(self._devices.names)
        shares = owners.loads(sizes, owners.deal(sizes, count), count)
        return answers.ModelPlan(
            bytes=workload.size,
            values=len(workload.shapes),
            algorithm=explained.algorithm,
            reason=explained.reason,
            packs=explained.num_packs,
            graph_ops=explained.num_graph_ops,
            state_bytes=_SLOTS_OF_ADAM * workload.size,
            sharded_state_bytes=_SLOTS_OF_ADAM * max(shares),
        )

    def pair(self, source: int, target: int, seconds: float) -> answers.Copies:
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
            if not self._devices.on_cpu:
                tf.test.experimental.sync_devices()
            fastest = min(fastest, time.perf_counter() - start)
        return answers.Copies(wrong, pattern.size / fastest)

    def sum(self, name: str) -> answers.Sums | answers.Skipped:
        """All-reduces over all devices and compares every element with numpy's sum."""
        (implementation,) = implementations.parse(name)
        data = self._values
        reason = implementation.reason_not_to_run(self._devices.names, data.workload.dtype)
        if reason:
            return answers.Skipped(reason)
        built = steps.build_graph(data, implementation.reducer(self._devices.names))
        times = []
        for _ in range(_SAMPLES):
            start = time.perf_counter()
            built.step()
            times.append(time.perf_counter() - start)
        elements = data.workload.count * len(self._devices.names)
        return answers.Sums(elements, built.num_wrong, min(times))

    @functools.cached_property
    def _values(self) -> steps.Data:
        return steps.place_values(workloads.one_value(_SUM_BYTES, "float32"), self._devices)

    @functools.cache  # noqa: B019 - there is one patient in a process
    def _pattern_on(self, source: int) -> tuple[np.ndarray, tf.Tensor]:
        """Draws bytes that differ from device to device, and puts them on one."""
        size = _PATTERN_BYTES[self._devices.on_cpu]
        pattern = np.random.default_rng(source).integers(0, 256, size, np.uint8)
        with tf.device(self._devices.names[source]):
            return pattern, tf.identity(tf.constant(pattern))
