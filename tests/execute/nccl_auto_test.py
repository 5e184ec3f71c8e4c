"""AutoAllReduce takes NCCL where it runs, unless a given measurement says that trees are faster."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import measurement_testing
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from nccl_on_cpu import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from nccl_testing import K, all_reduce, function, packs_of

import tfcdo
from tfcdo import log
from tfcdo.plan import decide
from tfcdo.topology import detection, measurement
from tfcdo.topology.presets import preset


class AutoTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        log.info_once.cache_clear()
        self.folder = measurement_testing.measure_briefly(self)
        decide.decide.cache_clear()  # What was planned before is not logged again.

    def takes_nccl(self, ops: Any, *sizes: int) -> tuple[bool, str]:
        """All-reduces values of so many floats; returns whether by NCCL, and what was logged."""
        values = [[tf.fill([size], float(rank + 1)) for rank in range(K)] for size in sizes]
        step = function(lambda: all_reduce(ops, *values))
        with self.assertLogs("absl", "INFO") as logs:
            graph = step.get_concrete_function().graph
            log.info_once("end")
        for size, result in zip(sizes, step(), strict=True):
            for one in result:
                np.testing.assert_array_equal(one, np.full([size], K * (K + 1) / 2))
        return bool(packs_of(graph)), " ".join(record.getMessage() for record in logs.records)

    @parameterized.parameters(
        lambda: tfcdo.AutoAllReduce(),
        lambda: tfcdo.AllReduceCrossDeviceOps("auto"),
        lambda: tfcdo.AutoAllReduce(topology=preset("nvswitch", K)),
    )
    def test_takes_nccl_where_it_runs(self, make):
        takes, line = self.takes_nccl(make(), 5, 25_000)
        self.assertTrue(takes)
        self.assertRegex(line, f"auto takes NCCL for about .* {K} devices: .*has no measurement")
        # Trees that NCCL does not use are not planned, which may take seconds.
        self.assertEqual(1, line.count("auto takes"), line)

    def test_keeps_to_trees_if_asked(self):
        takes, line = self.takes_nccl(tfcdo.AutoAllReduce(nccl=False), 25_000)
        self.assertFalse(takes)
        self.assertNotIn("NCCL", line)

    def test_takes_trees_where_nccl_cannot_run(self):
        with tu.kernels_for("GPU"):
            takes, line = self.takes_nccl(tfcdo.AutoAllReduce(), 25_000)
        self.assertFalse(takes)
        self.assertIn("auto takes copy trees, because NCCL cannot run: no NcclAllReduce", line)

    def test_other_algorithms_do_not_take_it(self):
        takes, _ = self.takes_nccl(tfcdo.AllReduceCrossDeviceOps("ring"), 25_000)
        self.assertFalse(takes)

    def test_nccl_is_measured_where_it_runs(self):
        sizes = (2**12, 2**16)
        with mock.patch.object(measurement, "_NCCL_SIZES", sizes):
            measurement.measure(tu.device_names(K), path=self.folder / "mine.json")
        found = measurement.read(self.folder / "mine.json")
        self.assertEqual(tuple(size for size, _ in found.nccl), sizes)
        self.assertTrue(all(1e-7 < seconds < 10 for _, seconds in found.nccl))

    def test_a_measurement_that_is_passed_decides_by_size(self):
        devices = tu.device_names(K)
        name = detection.name_of_measured(devices)
        assert name is not None
        machine = dataclasses.replace(preset("shared_memory", K), name=name)
        found = measurement.Measured(machine, "2026-01-02", ((1000, 1e-9), (10**6, 1.0)))
        file = self.folder / "mine.json"
        measurement.save(found, file)
        takes, _ = self.takes_nccl(tfcdo.AutoAllReduce(), 125_000, 125_000)
        self.assertTrue(takes)  # Nobody asked for the measurement.
        takes, line = self.takes_nccl(tfcdo.AutoAllReduce(topology=file), 250)
        self.assertTrue(takes)
        self.assertRegex(line, "auto takes NCCL for about .*as measured on 2026-01-02, NCCL takes")
        # What counts is the whole batch.
        takes, line = self.takes_nccl(tfcdo.AutoAllReduce(topology=file), 125_000, 125_000)
        self.assertFalse(takes)
        self.assertRegex(line, "auto takes copy trees for about .* NCCL takes .* copy trees")
        told = tfcdo.AutoAllReduce(topology=file).explain([(250,)], devices=devices)
        self.assertEqual(told.algorithm, "NCCL")
        self.assertIn("as measured on 2026-01-02", told.reason)


if __name__ == "__main__":
    tf.test.main()
