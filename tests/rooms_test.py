"""The package's rooms, its files, and its doors to private names of Keras and TensorFlow."""

import ast
import functools
import importlib
import itertools
import pathlib
import re
import threading
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized

import tfcdo
from tfcdo import keras_internals, private_names, strategies, tf_internals
from tfcdo.doctor import probe
from tfcdo.training import models, statistics

_ROOT = pathlib.Path(__file__).absolute().parents[1]
_FOLDERS = ("docs", "examples", "pip_package", "tests", "tfcdo", "tools")
_SETTINGS = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
_PACKAGE = pathlib.Path(tfcdo.__file__).parent
_DOORS = {"keras_internals.py": "keras.src", "tf_internals.py": "tensorflow.python"}
_EXTRAS = ("click", "rich", "matplotlib", "sklearn", "hypothesis")
# What tfcdo replaces, by the names that it has in TensorFlow.
_REDUCTIONS = ("ReductionToOneDevice", "NcclAllReduce", "HierarchicalCopyAllReduce")
_OF_KERAS = [*keras_internals.NAMES, *keras_internals.extended_members(models.extensions())]
_PUBLIC = ("_exit", "_replace")  # Names of os and of named tuples.
_FILES = sorted(str(path.relative_to(_PACKAGE)) for path in _PACKAGE.rglob("*.py"))
_trees = functools.cache(lambda: {f: ast.parse((_PACKAGE / f).read_text("utf-8")) for f in _FILES})


def _names(line: str) -> set[str]:
    return set(re.findall(r"[a-z_]+", line))


class RoomsTest(tf.test.TestCase):
    def test_the_doctor_asks_for_the_tensorflow_that_the_package_asks_for(self):
        (oldest,) = re.findall(r'"tensorflow>=([0-9.]+)"', _SETTINGS)
        self.assertEqual(probe.OLDEST_TENSORFLOW, tuple(map(int, oldest.split("."))))

    def test_the_drawing_has_the_layers_that_import_linter_keeps(self):
        (contract,) = re.findall(r"^layers = (\[.*?\n\])", _SETTINGS, re.MULTILINE | re.DOTALL)
        layers = [_names(layer) for layer in ast.literal_eval(contract)]
        page = (_ROOT / "docs/architecture.md").read_text(encoding="utf-8")
        _, drawing, _ = re.split("The (?:rooms|layers) of the package", page)[1].split("```", 2)
        drawn = [_names(re.split(r" {2,}", line)[0]) for line in drawing.splitlines()[1:]]
        self.assertEqual(layers, drawn)

    def test_no_file_is_too_long_to_be_read_as_one(self):
        paths = [path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py")]
        lines = {path: path.read_text(encoding="utf-8").count("\n") for path in paths}
        self.assertBetween(max(lines.values()), 1, 600, lines)


def _is_private(name: str) -> bool:
    return name == "src" or (name.startswith("_") and not name.startswith("__"))


def _attribute(node: ast.AST) -> str:
    """The name of an attribute that a node reads or sets, with `getattr` or without."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
        return ast.unparse(node.args[1]).strip("'")
    return ""


class DoorsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_DOORS.items())
    def test_one_file_imports_private_modules(self, door, package):
        found = {
            name
            for name, tree in _trees().items()
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and package in ast.unparse(node).replace(" import ", ".")
        }
        self.assertEqual({door}, found)

    def test_other_files_use_their_own_private_names_only(self):
        own = {name for _, name, _ in tf_internals.OVERRIDES} | set(_PUBLIC)
        for node in itertools.chain(*map(ast.walk, _trees().values())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(getattr(node, "ctx", None), ast.Store):
                own.add(ast.unparse(node).removeprefix("self."))
        for name in _trees().keys() - _DOORS.keys():
            others = {
                f"{ast.unparse(node)} in line {getattr(node, 'lineno', 0)}"
                for node in ast.walk(_trees()[name])
                if _attribute(node) not in own and _is_private(_attribute(node))
            }
            self.assertEmpty(others, f"{name}: put them into {' or '.join(_DOORS)}")

    def test_what_no_source_names(self):
        """TensorFlow's private modules by attribute; its reductions; and extras on import."""
        for path, tree in _trees().items():
            text = ast.unparse(tree)
            self.assertNotRegex(text, r"python\.distribute(\.| import )cross_device", path)
            self.assertNotRegex(text, r"\btf\.(python|__internal__|_api)\b", path)
            if not path.startswith(("cli/", "bench/")):
                self.assertNotRegex(text, rf"\btf\.distribute\.({'|'.join(_REDUCTIONS)})\b", path)
            if not path.startswith(("cli/", "plot.py")):
                self.assertNotRegex(text, rf"(?m)^(import|from) ({'|'.join(_EXTRAS)})\b", path)

    def test_all_overrides_are_listed(self):
        listed = {(owner, name) for owner, name, _ in tf_internals.OVERRIDES}
        for cls in (
            tfcdo.MirroredStrategy,
            tfcdo.MultiWorkerMirroredStrategy,
            strategies._MirroredExtended,
            strategies._MultiWorkerExtended,
            statistics.OwnVariable,
            tfcdo.AllReduceCrossDeviceOps,
        ):
            theirs = [one for one in cls.__mro__[:-1] if not one.__module__.startswith("tfcdo")]
            for part in set(cls.__mro__[:-1]).difference(theirs):
                for name, member in vars(part).items():
                    overridden = {(base, name) for base in theirs if hasattr(base, name)}
                    # A `functools.partialmethod` itself cannot be called.
                    is_method = callable(member) or callable(getattr(part, name))
                    if overridden and is_method and not name.startswith("__"):
                        self.assertNotEmpty(overridden & listed, f"{cls.__name__}.{name}")


class GoneTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("Keras", keras.__version__, _OF_KERAS, keras_internals),
        ("TensorFlow", tf.__version__, tf_internals.OVERRIDES, tf_internals),
    )
    def test_each_name_and_parameter(self, library, version, members, door):
        self.assertEmpty(private_names.missing_members(members))
        gone = [(owner, f"{name}_x", parameters) for owner, name, parameters in members]
        gone += [(owner, name, (*own, "new")) for owner, name, own in members if own]
        told = (
            f"{owner.__name__}.{name}{'(new)' * (parameters[-1:] == ('new',))}"
            for owner, name, parameters in gone
        )
        with self.assertRaises(ImportError) as raised:
            private_names.check_members(library, version, [*members, *gone])
        self.assertStartsWith(
            str(raised.exception),
            f"tfcdo uses names of {library} that are not in {library} {version}: "
            f"{', '.join(told)}. ",
        )
        known = rf"{re.escape(version)}: one, other\. .*run: [23]\.\d.* Install one of those"
        absent = mock.patch.object(private_names, "missing", return_value=["one", "other"])
        with absent, self.assertRaisesRegex(ImportError, known):
            importlib.reload(door)

    @parameterized.parameters(
        ("apply", models.install), ("apply_gradients", lambda: importlib.reload(keras_internals))
    )
    def test_keras_is_checked_when_the_door_opens(self, name, open_door):
        patched = mock.patch.object(keras_internals.BaseOptimizer, name, None)
        with patched, self.assertRaisesRegex(ImportError, rf"BaseOptimizer\.{name}"):
            open_door()

    def test_names_all_that_are_missing(self):
        source = """
from tensorflow.python.distribute import values as _values
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import no_such_kernels as _kernels
from keras.src.trainers.trainer import Gone as _Gone

def function():
    _kernels.get(_values.PerReplica, _values.Gone, _Gone.any)
    _context.context().abort_collective_ops(_context.context().no_such_method())
"""
        missing = [
            "tensorflow.python.framework.no_such_kernels",
            "tensorflow.python.distribute.values.Gone",
            "keras.src.trainers.trainer.Gone",
            "tensorflow.python.eager.context.context().no_such_method",
        ]
        self.assertCountEqual(missing, private_names.missing(source))


class TensorFlowDoorTest(tf.test.TestCase):
    def test_values_are_what_a_strategy_makes(self):
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        made = strategy.run(lambda: tf.random.uniform([]))
        self.assertIs(type(made), type(tf_internals.per_replica([1, 2])))
        reduced = strategy.extended.batch_reduce_to(tu.SUM, [(made, made)])[0]
        self.assertIs(type(reduced), type(tf_internals.mirrored([1, 2])))

    def test_devices_of_values_that_are_no_tensors(self):
        plain = tf_internals.per_replica([1.0, np.ones(2)])
        self.assertEqual(("", ""), tf_internals.devices_of_values(plain))

    def test_a_value_at_call_time_is_made_again_at_each_call(self):
        """Also where a called function needs it, in a condition in a loop: Keras's steps."""
        numbers = itertools.count(1)
        spec = tf.TensorSpec([], tf.int32)

        @tf.function
        def number():
            return tf_internals.value_at_call_time(lambda: tf.constant(next(numbers)), spec)

        def loop(body: Any) -> Any:
            return tf.function(lambda: tf.while_loop(lambda i: i < 1, body, [0])[0])

        in_loop = loop(lambda i: [tf.cond(i < 1, number, lambda: i)])
        calls = [
            number,
            tf.function(lambda: number() + tf.function(number)() - number()),
            # A function that calls one that has it, once more in a loop.
            loop(lambda i: [tf.cond(i < 1, in_loop, lambda: i)]),
        ]
        for expected, call in enumerate((*calls, *calls), start=1):
            self.assertEqual(expected, int(call()))

    def test_a_chief_that_is_stopped_is_not_waited_for(self):
        """TensorFlow would wait without end, also when a process ends."""
        answers, context = threading.Event(), mock.Mock()
        context.set_config_key_value.side_effect = lambda *_: answers.wait(60)
        store = tf_internals.KeyValueStore()
        with mock.patch.object(tf_internals._context, "context", return_value=context):
            with mock.patch.object(tf_internals, "_WRITE_SECONDS", 0.1):
                for call in (lambda: store.set("key", "value"), lambda: store.check_hosts({})):
                    self.assertRaisesRegex(tf.errors.DeadlineExceededError, "not answered", call)
            answers.set()
            store.set("other", "value")
            context.set_config_key_value.assert_called_with("tfcdo/other", "value")
            context.set_config_key_value.side_effect = tf.errors.AlreadyExistsError(None, None, "k")
            self.assertRaises(tf.errors.AlreadyExistsError, store.set, "key", "value")


if __name__ == "__main__":
    tf.test.main()
