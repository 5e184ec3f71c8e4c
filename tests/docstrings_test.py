"""The examples in the docstrings of what users call, run as they stand there."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import os
import pkgutil
import tempfile
from unittest import mock

import testing_utils as tu
from absl.testing import absltest, parameterized

import tfcdo.plan
import tfcdo.topology

# virtual_devices is no case: its example must come before TensorFlow starts.
# Modules without a name that users import.
_INTERNAL = (
    *("decide", "dtypes", "nccl_choice", "options", "stream_sources", "streams", "summary"),
    *("task_graph", "tree_program"),
)
_MODULES = (
    *(
        f"{room.__name__}.{module.name}"
        for room in (tfcdo.plan, tfcdo.topology)
        for module in pkgutil.iter_modules(room.__path__)
        if module.name not in _INTERNAL
    ),
    "tfcdo.cross_device_ops",
    "tfcdo.environment",
    "tfcdo.execute.nccl",
    "tfcdo.keras.backup",
    "tfcdo.keras.in_sync",
    "tfcdo.keras.optimizer",
    "tfcdo.keras.statistics",
    "tfcdo.keras.trace_summary",
    "tfcdo.keras.uneven",
    "tfcdo.moving_statistics",
    "tfcdo.plot.gantt",
    "tfcdo.replica_extended",
    "tfcdo.plot.trace",
    "tfcdo.plot.trees",
    "tfcdo.units",
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

    def test_there_are_modules(self):
        self.assertContainsSubset(["tfcdo.plan.schedule", "tfcdo.plan.copy_tree"], _MODULES)


if __name__ == "__main__":
    absltest.main()
