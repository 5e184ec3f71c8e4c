"""The examples in the docstrings of what users call, run as they stand there."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import os
import tempfile
from unittest import mock

import testing_utils as tu
from absl.testing import absltest, parameterized

# virtual_devices is no case: its example must come before TensorFlow starts.
_MODULES = (
    *(f"tfcdo.plan.{name}" for name in ("algorithms", "copy_tree", "lower_bound", "packing")),
    *(f"tfcdo.plan.{name}" for name in ("plan", "schedule", "simulator")),
    *(f"tfcdo.topology.{name}" for name in ("detection", "measurement", "presets", "topology")),
    "tfcdo.cross_device_ops",
    "tfcdo.execute.nccl",
    "tfcdo.keras.backup",
    "tfcdo.keras.in_sync",
    "tfcdo.keras.optimizer",
    "tfcdo.keras.statistics",
    "tfcdo.keras.trace_summary",
    "tfcdo.keras.uneven",
    "tfcdo.plot.gantt",
    "tfcdo.replica_extended",
    "tfcdo.plot.trace",
    "tfcdo.plot.trees",
)


class DocstringsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, TFCDO_CACHE_DIR=folder))
        # Another test file of this process may have loaded NCCL's kernel for CPUs.
        stack.enter_context(tu.kernels_for("GPU"))

    @parameterized.parameters(*_MODULES)
    def test_examples_of(self, name: str):
        told: list[str] = []
        runner = doctest.DocTestRunner(verbose=False)
        for examples in doctest.DocTestFinder().find(importlib.import_module(name)):
            runner.run(examples, out=told.append)
        self.assertEqual(runner.failures, 0, "".join(told))
        self.assertGreater(runner.tries, 0, f"{name} has no example")


if __name__ == "__main__":
    absltest.main()
