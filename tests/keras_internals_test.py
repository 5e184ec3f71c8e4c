"""The doors to private names of Keras and TensorFlow: a name that is gone is named at import."""

from __future__ import annotations

import ast
import importlib
import pathlib
from collections.abc import Iterator
from unittest import mock

import keras
import tensorflow as tf
from absl.testing import parameterized

import tfcdo
from tfcdo import keras_internals, private_names, strategies, tf_internals
from tfcdo.training import statistics

_PACKAGE = pathlib.Path(tfcdo.__file__).parent
_DOORS = {"keras_internals.py": "keras.src", "tf_internals.py": "tensorflow.python"}
_PUBLIC = ("_exit", "_replace")  # Names of os and of named tuples.


def _trees(*without: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.name not in without:
            yield str(path.relative_to(_PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
            for name, tree in _trees()
            if any(f"{one}.".startswith(f"{package}.") for one in _imported(tree))
        }
        self.assertEqual({door}, found)

    def test_other_files_use_their_own_private_names_only(self):
        own = {name for _, name, _ in tf_internals.OVERRIDES} | set(_PUBLIC)
        for _, tree in _trees():
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    own.add(node.name)
                elif isinstance(getattr(node, "ctx", None), ast.Store):
                    name = ast.unparse(node)
                    own.add(name.removeprefix("self."))
        for name, tree in _trees(*_DOORS):
            others = {
                f"{ast.unparse(node)} in line {getattr(node, 'lineno', 0)}"
                for node in ast.walk(tree)
                if _attribute(node) not in own and _is_private(_attribute(node))
            }
            self.assertEmpty(others, f"{name}: put them into {' or '.join(_DOORS)}")

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
                    if callable(member) and not name.startswith("__"):
                        overridden = [base for base in theirs if hasattr(base, name)]
                        known = not overridden or any((base, name) in listed for base in overridden)
                        self.assertTrue(known, f"{cls.__name__}.{name}")


class GoneTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("Keras", keras.__version__, keras_internals.NAMES),
        ("TensorFlow", tf.__version__, tf_internals.OVERRIDES),
    )
    def test_each_name_and_parameter(self, library, version, members):
        self.assertEmpty(private_names.missing_members(members))
        gone = []
        for owner, name, parameters in members:
            gone.append(((owner, f"{name}_x", parameters), f"{owner.__name__}.{name}_x"))
            if parameters:
                member = (owner, name, (*parameters, "new"))
                gone.append((member, f"{owner.__name__}.{name}(new)"))
        for member, text in gone:
            with self.subTest(text):
                with self.assertRaises(ImportError) as raised:
                    private_names.check_members(library, version, [*members, member])
                self.assertStartsWith(
                    str(raised.exception),
                    f"tfcdo uses names of {library} that are not in {library} {version}: {text}. ",
                )

    def test_keras_is_checked_when_the_door_opens(self):
        with (
            mock.patch.object(keras_internals.BaseOptimizer, "apply", None),
            self.assertRaisesRegex(ImportError, r"BaseOptimizer\.apply"),
        ):
            importlib.reload(keras_internals)


if __name__ == "__main__":
    tf.test.main()
