"""tfcdo's sources use none of TensorFlow's own reductions."""

from __future__ import annotations

import ast
import pathlib

from absl.testing import absltest

import tfcdo

_EXPORTED = ("ReductionToOneDevice", "NcclAllReduce", "HierarchicalCopyAllReduce")
_HELPERS = {
    "cross_device_utils",
    "reduce_non_distributed_value",
    "simple_broadcast",
    "_simple_reduce",
    "_simple_gather",
    "_group_value_by_device",
    "_ungroup_and_make_mirrored",
    "_pack_tensors",
    "_unpack_tensors",
}


class SourceTest(absltest.TestCase):
    def test_no_source_names_them(self):
        """tfcdo's own classes have the same names, so attributes and imports are what counts.

        The commands that compare tfcdo with TensorFlow's classes have to name them.
        """
        package = pathlib.Path(tfcdo.__file__).parent
        comparisons = {*package.glob("cli/*.py"), *package.glob("bench/*.py")}
        for path in set(package.rglob("*.py")) - comparisons:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.Attribute):
                    names = [node.attr]
                    if ast.unparse(node).startswith("tf.distribute."):
                        self.assertNotIn(node.attr, _EXPORTED, path)
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [alias.name.rpartition(".")[2] for alias in node.names]
                self.assertEmpty(_HELPERS.intersection(names), path)


if __name__ == "__main__":
    absltest.main()
