"""The door to TensorFlow's private modules, that it is the only one, and that plans need none."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import pathlib
import re
import subprocess
import sys
import tempfile
from importlib.machinery import ModuleSpec, SourcelessFileLoader

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import private_names, tf_internals

PACKAGE = pathlib.Path(tfcdo.__file__).parent

# What needs no TensorFlow, and what of tfcdo it may use.
PURE = (
    "tfcdo.plan",
    "tfcdo.topology",
    "tfcdo.cache_folder",
    "tfcdo.checks",
    "tfcdo.log",
    "tfcdo.units",
)
EXTRAS = ("click", "rich", "matplotlib", "sklearn", "hypothesis")

# Run where an import of TensorFlow, or of what needs it, raises.
_WITHOUT_TENSORFLOW = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        bound = name.split(".")[0] in ("tensorflow", "keras", "tfcdo")
        if bound and not name.startswith({PURE}):
            raise ImportError(name + " is out of bounds")

sys.meta_path.insert(0, Refuse())
try:
    import tensorflow
except ImportError:
    pass
else:
    raise AssertionError("TensorFlow can be imported")

import importlib, types
package = types.ModuleType("tfcdo")  # tfcdo/__init__.py itself imports TensorFlow.
package.__path__ = [sys.argv[1]]
sys.modules["tfcdo"] = package
for name in sys.argv[2:]:
    importlib.import_module(name)
from tfcdo import topology
from tfcdo.plan import packing
items = [packing.Item(0, "float32", 4, (10,))]
packs = packing.pack(items, packing.PackingOptions(2), "ring", topology.preset("dgx1"))
assert len(packs) == 2
print("planned", len(sys.argv) - 2, "modules")
""".replace("{PURE}", repr(PURE))


def imports(path: pathlib.Path) -> list[str]:
    """The full names of what a file imports, wherever in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [name for node in ast.walk(tree) for name in imported_by(node)]


def imported_by(node: ast.AST) -> list[str]:
    """The full names of what one statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def pure_files() -> list[pathlib.Path]:
    """The files of the rooms that need no TensorFlow."""
    return sorted([*(PACKAGE / "plan").rglob("*.py"), *(PACKAGE / "topology").rglob("*.py")])


class ImportsTest(tf.test.TestCase):
    def test_one_file_imports_private_modules(self):
        private = {
            path.relative_to(PACKAGE).as_posix()
            for path in PACKAGE.rglob("*.py")
            if any(name.startswith("tensorflow.python") for name in imports(path))
        }
        self.assertEqual({"tf_internals.py"}, private)

    def test_nobody_reaches_them_by_attribute(self):
        for path in PACKAGE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute):
                    name = ast.unparse(node)
                    self.assertNotIn(name, ("tf.python", "tf.__internal__", "tf._api"), path)

    def test_plans_import_no_tensorflow(self):
        for path in pure_files():
            if path.name in ("detection.py", "measurement.py"):
                continue  # They ask TensorFlow and its devices, where TensorFlow is there already.
            for name in imports(path):
                self.assertNotIn(name.split(".")[0], ("tensorflow", "keras"), path)
                if name.startswith("tfcdo"):
                    self.assertTrue(name.startswith(PURE), f"{path} imports {name}")

    def test_plans_work_where_there_is_no_tensorflow(self):
        modules = [
            ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for path in pure_files()
            if path.name != "__init__.py"
        ]
        self.assertIn("tfcdo.plan.copy_tree", modules)
        done = subprocess.run(
            [sys.executable, "-c", _WITHOUT_TENSORFLOW, str(PACKAGE), *modules],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.assertEqual("", done.stderr)
        self.assertEqual(f"planned {len(modules)} modules\n", done.stdout)

    def test_a_plain_import_needs_no_extras(self):
        """Outside the commands and pictures, extras are imported where they are used, if at all."""
        with_extras = {*PACKAGE.glob("cli/*.py"), *PACKAGE.glob("plot/*.py")}
        for path in set(PACKAGE.rglob("*.py")) - with_extras:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in tree.body:
                for name in imported_by(node):
                    self.assertNotIn(name.split(".")[0], EXTRAS, path)


class PrivateNamesTest(tf.test.TestCase):
    """Tests of an unsupported TensorFlow: its names are renamed in a copy of the file."""

    def import_copy(self, *renamed: tuple[str, str]) -> None:
        source = pathlib.Path(tf_internals.__file__).read_text(encoding="utf-8")
        for old, new in renamed:
            self.assertRegex(source, rf"\b{old}\b")
            source = re.sub(rf"\b{old}\b", new, source)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        copy = pathlib.Path(folder, "copy_of_tf_internals.py")
        copy.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("copy_of_tf_internals", copy)
        assert spec and spec.loader
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def test_all_are_there(self):
        self.import_copy()

    def test_names_all_that_are_missing_and_the_known_versions(self):
        with self.assertRaises(ImportError) as raised:
            self.import_copy(
                ("PerReplica", "Gone"),  # a class that is used inside a function only,
                ("kernels as", "no_such_kernels as"),  # a module,
                ("abort_collective_ops", "no_such_method"),  # and a method.
            )
        self.assertEqual(
            str(raised.exception).split(". Versions")[0],
            f"tfcdo uses names of TensorFlow that are not in TensorFlow {tf.__version__}: "
            "tensorflow.python.framework.no_such_kernels, "
            "tensorflow.python.distribute.values.Gone, "
            "tensorflow.python.eager.context.context().no_such_method",
        )
        self.assertRegex(str(raised.exception), r"tests were run: 2\.16\.\d.* Install one of those")

    def test_a_name_that_is_imported_itself(self):
        source = "from tensorflow.python.framework.kernels import no_such_name"
        self.assertEqual(
            private_names.missing(source), ["tensorflow.python.framework.kernels.no_such_name"]
        )

    def test_attributes_of_modules_and_of_results(self):
        source = "from os import path as p; p.join; p.no_such; p.nothing()"
        self.assertEqual(
            private_names.missing(source, package="os"), ["os.path.no_such", "os.path.nothing"]
        )

    def test_a_module_without_source_is_not_looked_through(self):
        loader = SourcelessFileLoader("gone", "gone.pyc")
        private_names.check(ModuleSpec("gone", loader, origin="gone.pyc"))


class ValuesTest(tf.test.TestCase, parameterized.TestCase):
    def test_per_replica(self):
        value = tf_internals.per_replica([tf.constant(1), tf.constant(2)])
        self.assertIsInstance(value, tf.distribute.DistributedValues)
        self.assertIsInstance(value, tf_internals.DistributedValues)
        self.assertEqual("PerReplica", type(value).__name__)
        self.assertAllEqual([1, 2], value.values)

    def test_is_what_a_strategy_makes(self):
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        made = strategy.run(
            lambda: tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)
        )
        self.assertIs(type(made), type(tf_internals.per_replica([1, 2])))
        reduced = strategy.extended.batch_reduce_to(tu.SUM, [(made, made)])[0]
        self.assertIs(type(reduced), type(tf_internals.mirrored([1, 2])))

    def test_mirrored(self):
        value = tf_internals.mirrored([tf.constant(1), tf.constant(1)])
        self.assertEqual("Mirrored", type(value).__name__)
        single = tf.constant(1)
        self.assertIs(single, tf_internals.mirrored([single]))

    @parameterized.parameters("/cpu:3", "CPU:3", "/device:CPU:3", "/job:localhost/device:CPU:3")
    def test_canonical_device(self, name):
        self.assertEqual(tu.device_name(3), tf_internals.canonical_device(name))

    def test_devices_of_values(self):
        value = tu.per_replica([1, 2], tu.ALL_DEVICES[3:5])
        self.assertEqual(tu.ALL_DEVICES[3:5], tf_internals.devices_of_values(value))
        self.assertEqual(
            ("", "", ""),
            tf_internals.devices_of_values(tf_internals.per_replica([1.0, np.ones(2), np.int8(2)])),
        )

    def test_is_variable(self):
        self.assertTrue(tf_internals.is_variable(tf.Variable(1)))
        self.assertFalse(tf_internals.is_variable(tf.constant(1)))
        self.assertFalse(tf_internals.is_variable(None))

    def test_replicas_of_a_plain_value(self):
        self.assertEqual(1, tf_internals.replicas_of_plain_value())
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1", "/cpu:2"])
        with strategy.scope():
            self.assertEqual(3, tf_internals.replicas_of_plain_value())
        seen = []
        strategy.run(lambda: seen.append(tf_internals.replicas_of_plain_value()))
        self.assertEqual([1, 1, 1], seen)


class ValueAtCallTimeTest(tf.test.TestCase):
    def test_is_made_anew_at_each_call(self):
        """Also where a called function needs it, in a condition in a loop: Keras's steps."""
        numbers = itertools.count(1)
        spec = tf.TensorSpec([], tf.int32)

        @tf.function
        def number():
            return tf_internals.value_at_call_time(lambda: tf.constant(next(numbers)), spec)

        calls = [
            number,
            tf.function(lambda: number() + tf.function(number)() - number()),
            tf.function(lambda: tf.cond(tf.constant(True), number, lambda: 0)),
            tf.function(lambda: tf.while_loop(lambda i: i < 1, lambda i: [number()], [0])[0]),
            tf.function(
                lambda: tf.while_loop(
                    lambda i: i < 1, lambda i: [tf.cond(i < 1, number, lambda: i)], [0]
                )[0]
            ),
        ]
        # A function that calls one of them, once more in a loop.
        calls.append(
            tf.function(
                lambda: tf.while_loop(
                    lambda i: i < 1, lambda i: [tf.cond(i < 1, calls[-2], lambda: i)], [0]
                )[0]
            )
        )
        for expected, call in enumerate((*calls, *calls), start=1):
            self.assertEqual(expected, int(call()))


class RegistryTest(tf.test.TestCase):
    def test_kernels(self):
        self.assertIn("CPU", tf_internals.device_types_with_kernel("AddN"))
        self.assertEqual(frozenset(), tf_internals.device_types_with_kernel("NoSuchOp"))

    def test_dtypes(self):
        dtypes = tf_internals.dtypes_of_op("NcclAllReduce", "T")
        self.assertContainsSubset({tf.float16, tf.float32, tf.int32}, dtypes)
        self.assertNotIn(tf.complex64, dtypes)
        self.assertEqual(frozenset(), tf_internals.dtypes_of_op("NoSuchOp", "T"))
        self.assertEqual(frozenset(), tf_internals.dtypes_of_op("AddN", "NoSuchAttribute"))

    def test_options(self):
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=3)
        self.assertIsInstance(options, tf_internals.OPTIONS_TYPE)


if __name__ == "__main__":
    tf.test.main()
