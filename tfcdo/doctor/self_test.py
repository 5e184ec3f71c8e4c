"""Looks at the devices through TensorFlow, and sends patterns and sums over them."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import devices as bench_devices
from tfcdo.bench import implementations
from tfcdo.bench import steps
from tfcdo.bench import workloads
from tfcdo.execute import copy_trees
from tfcdo.topology import detection

# Bytes that are copied between two devices. Between GPUs many, as the call itself takes a while.
_PATTERN_BYTES = {True: 2**22, False: 2**26}
_SUM_BYTES = 2**20
_SAMPLES = 3


class Patient:
    """The devices of this process, and what can be asked about them.

    Args:
      count: how many devices to use; None as for `tfcdo.bench.devices.choose_devices`.
    """

    def __init__(self, count: int | None) -> None:
        tf.get_logger().setLevel("ERROR")
        self._devices = bench_devices.choose_devices(count)

    def devices(self) -> dict[str, Any]:
        """Says what TensorFlow sees and which devices are examined."""
        return {
            "physical": [device.name for device in tf.config.list_physical_devices()],
            "logical": [device.name for device in tf.config.list_logical_devices()],
            "examined": list(self._devices.names),
            "description": self._devices.description,
            "on_cpu": self._devices.on_cpu,
            "gpus_of_nvidia_smi": list(detection.gpus_of_nvidia_smi()),
        }

    def all_reduces(self) -> list[dict[str, Any]]:
        """Says of each of tfcdo's all-reduces whether it can run on these devices."""
        status = tfcdo.nccl_status(self._devices.names)
        found = [
            {"name": name, "can_run": True, "reason": "copies between any devices", "remedy": ""}
            for name in ("AutoAllReduce", "HierarchicalCopyAllReduce", "ReductionToOneDevice")
        ]
        nccl = {"can_run": status.can_run, "reason": status.reason, "remedy": status.remedy}
        return [*found, {"name": "NcclAllReduce", **nccl}]

    def topology(self) -> dict[str, Any]:
        """Says what joins the devices, and how that was found."""
        topology, reason = detection.detect_with_reason(self._devices.names)
        links = [
            {
                "source": source,
                "target": target,
                # JSON has no infinity: None is a link that is never the slowest part.
                "bandwidth": bandwidth if np.isfinite(bandwidth) else None,
                "via_host": via_host,
            }
            for (source, target), (bandwidth, _, via_host) in sorted(topology.link_kinds.items())
        ]
        return {"name": topology.name, "reason": reason, "links": links}

    def auto(self, model: str) -> dict[str, Any]:
        """Says what `AutoAllReduce` would do with a model's gradients."""
        workload = workloads.gradients_of(model)
        explained = tfcdo.AutoAllReduce().explain(workload.shapes, devices=self._devices.names)
        return {
            "model": model,
            "bytes": workload.size,
            "values": len(workload.shapes),
            "algorithm": explained.algorithm,
            "reason": explained.reason,
            "packs": explained.num_packs,
            "graph_ops": explained.num_graph_ops,
        }

    def pair(self, source: int, target: int, seconds: float) -> dict[str, Any]:
        """Copies a known pattern from one device to another and compares every byte.

        Args:
          source: the sending device's index.
          target: the receiving device's index.
          seconds: how long to repeat the copy, for its speed.

        Returns:
          How many bytes were `wrong`, and `bandwidth` in bytes per second, of the fastest copy.
        """
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
        return {"wrong": wrong, "bandwidth": pattern.size / fastest}

    def sum(self, name: str) -> dict[str, Any]:
        """All-reduces over all devices and compares every element with numpy's sum.

        Args:
          name: the implementation, as `tfcdo bench --ops` takes it.

        Returns:
          `skipped`, the reason if it cannot run here; otherwise how many `elements` there were, how
          many of them `wrong`, and the `seconds` of the fastest of a few calls.
        """
        (implementation,) = implementations.parse(name)
        data = self._values
        reason = implementation.reason_not_to_run(self._devices.names, data.workload.dtype)
        if reason:
            return {"skipped": reason}
        built = steps.build_graph(data, implementation.reducer(self._devices.names))
        times = []
        for _ in range(_SAMPLES):
            start = time.perf_counter()
            built.step()
            times.append(time.perf_counter() - start)
        return {
            "skipped": "",
            "elements": data.workload.count * len(self._devices.names),
            "wrong": built.num_wrong,
            "seconds": min(times),
        }

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
