"""tfcdo reduces without TensorFlow's own reductions.

`cross_device_ops_test` runs with them replaced (see `block_tensorflow_reductions`); here it is
shown that this is effective, and undone.
"""

from __future__ import annotations

import ast
import pathlib

import block_tensorflow_reductions
import cross_device_ops_test
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest, parameterized
from tensorflow.python.distribute import cross_device_ops, cross_device_utils

import tfcdo

EXPORTED = ("ReductionToOneDevice", "NcclAllReduce", "HierarchicalCopyAllReduce")


class SabotageTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        self.existing = tf.distribute.HierarchicalCopyAllReduce()
        self.replaced = self.enter_context(block_tensorflow_reductions.installed())

    def test_much_is_replaced(self):
        self.assertGreater(len(self.replaced), 50)
        self.assertContainsSubset(
            [
                "aggregate_gradients_using_hierarchical_copy",
                "aggregate_tensors_or_indexed_slices",
                "copy_tensor_or_indexed_slices_to_device",
                "simple_broadcast",
                "ReductionToOneDevice.batch_reduce_implementation",
                "AllReduceCrossDeviceOps.__init__",
                "NcclAllReduce.__init__",
                "HierarchicalCopyAllReduce.__init__",
                "CollectiveAllReduce.__init__",
                "CollectiveReplicaLauncher.all_reduce",
            ],
            self.replaced,
        )

    def test_no_function_of_cross_device_utils_works(self):
        for name, value in vars(cross_device_utils).items():
            if callable(value) and getattr(value, "__module__", "") == cross_device_utils.__name__:
                self.assertIsInstance(value, type, name)  # A class, whose methods raise.

    @parameterized.parameters(*block_tensorflow_reductions.CONCRETE_CLASSES)
    def test_the_concrete_classes_cannot_be_made(self, name):
        with self.assertRaises(block_tensorflow_reductions.SabotageError):
            getattr(cross_device_ops, name)()

    @parameterized.parameters(*EXPORTED)
    def test_nor_by_their_exported_names(self, name):
        with self.assertRaises(block_tensorflow_reductions.SabotageError):
            getattr(tf.distribute, name)()

    def test_nor_do_those_work_that_were_there_before(self):
        value = tu.per_replica([1.0, 2.0])
        with self.assertRaises(block_tensorflow_reductions.SabotageError):
            self.existing.reduce(tu.SUM, value, value)
        with self.assertRaises(block_tensorflow_reductions.SabotageError):
            self.existing.batch_reduce(tu.SUM, [(value, value)])
        with self.assertRaises(block_tensorflow_reductions.SabotageError):
            self.existing.broadcast(tf.constant(1.0), value)
        with self.assertRaises(block_tensorflow_reductions.SabotageError):
            self.strategy.run(
                lambda: tf.distribute.get_replica_context().all_reduce(tu.SUM, tf.constant(1.0))
            )

    def test_tfcdo_does_not_notice(self):
        value = tu.per_replica([1.0, 2.0, 3.0])
        for make in cross_device_ops_test.SETTINGS.values():
            self.assertEqual(
                [6.0] * 3, [one.numpy() for one in make().reduce(tu.SUM, value, value).values]
            )


class AfterwardsTest(absltest.TestCase):
    def test_the_sabotage_is_undone(self):
        with block_tensorflow_reductions.installed():
            pass
        value = tu.per_replica([1.0, 2.0])
        result = tf.distribute.HierarchicalCopyAllReduce().reduce(tu.SUM, value, value)
        self.assertEqual([3.0, 3.0], [one.numpy() for one in result.values])


class ContractTest(absltest.TestCase):
    def test_the_contract_runs_under_sabotage(self):
        cross_device_ops_test.setUpModule()
        try:
            with self.assertRaises(block_tensorflow_reductions.SabotageError):
                tf.distribute.ReductionToOneDevice()
        finally:
            cross_device_ops_test.tearDownModule()
        self.assertIsNotNone(tf.distribute.ReductionToOneDevice())


class SourceTest(absltest.TestCase):
    def test_no_source_names_what_is_replaced(self):
        """tfcdo's own classes have the same names, so attributes and imports are what counts.

        The commands that compare tfcdo with TensorFlow's classes have to name them.
        """
        forbidden = {"cross_device_utils", *block_tensorflow_reductions.HELPERS}
        package = pathlib.Path(tfcdo.__file__).parent
        comparisons = {*package.glob("cli/*.py"), *package.glob("bench/*.py")}
        for path in set(package.rglob("*.py")) - comparisons:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.Attribute):
                    names = [node.attr]
                    if ast.unparse(node).startswith("tf.distribute."):
                        self.assertNotIn(node.attr, EXPORTED, path)
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [alias.name.rpartition(".")[2] for alias in node.names]
                self.assertEmpty(forbidden.intersection(names), path)


if __name__ == "__main__":
    tf.test.main()
