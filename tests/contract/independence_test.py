"""tfcdo reduces without TensorFlow's own reductions.

`cross_device_ops_test` runs with them replaced (see `block_tensorflow_reductions`); here it is
shown that this is effective, and undone.
"""

from __future__ import annotations

import ast
import pathlib

import block_tensorflow_reductions
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest, parameterized

import tfcdo

EXPORTED = ("ReductionToOneDevice", "NcclAllReduce", "HierarchicalCopyAllReduce")


class SabotageTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        self.existing = tf.distribute.HierarchicalCopyAllReduce()
        self.replaced = self.enter_context(block_tensorflow_reductions.installed())

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
