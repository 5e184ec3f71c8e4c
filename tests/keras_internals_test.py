"""The doors to private names of Keras and TensorFlow: a name that is gone is named at import."""

from __future__ import annotations

import ast
import importlib
import itertools
import pathlib
from unittest import mock

import keras
import tensorflow as tf
from absl.testing import parameterized

import tfcdo
from tfcdo import keras_internals, private_names, strategies, tf_internals
from tfcdo.training import statistics

_PACKAGE = pathlib.Path(tfcdo.__file__).parent
_DOORS = {"keras_internals.py": "keras.src", "tf_internals.py": "tensorflow.python"}
_EXTRAS = ("click", "rich", "matplotlib", "sklearn", "hypothesis")
# What tfcdo replaces, by the names that it has in TensorFlow.
_REDUCTIONS = ("ReductionToOneDevice", "NcclAllReduce", "HierarchicalCopyAllReduce")
_PUBLIC = ("_exit", "_replace")  # Names of os and of named tuples.
_TREES = {
    str(path.relative_to(_PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(_PACKAGE.rglob("*.py"))
}


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
            for name, tree in _TREES.items()
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and package in ast.unparse(node).replace(" import ", ".")
        }
        self.assertEqual({door}, found)

    def test_other_files_use_their_own_private_names_only(self):
        own = {name for _, name, _ in tf_internals.OVERRIDES} | set(_PUBLIC)
        for node in itertools.chain(*map(ast.walk, _TREES.values())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(getattr(node, "ctx", None), ast.Store):
                own.add(ast.unparse(node).removeprefix("self."))
        for name in _TREES.keys() - _DOORS.keys():
            others = {
                f"{ast.unparse(node)} in line {getattr(node, 'lineno', 0)}"
                for node in ast.walk(_TREES[name])
                if _attribute(node) not in own and _is_private(_attribute(node))
            }
            self.assertEmpty(others, f"{name}: put them into {' or '.join(_DOORS)}")

    def test_what_no_source_names(self):
        """TensorFlow's private modules by attribute; its reductions; and extras on import."""
        for path, tree in _TREES.items():
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
        ("Keras", keras.__version__, keras_internals.NAMES),
        ("TensorFlow", tf.__version__, tf_internals.OVERRIDES),
    )
    def test_each_name_and_parameter(self, library, version, members):
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

    def test_keras_is_checked_when_the_door_opens(self):
        with (
            mock.patch.object(keras_internals.BaseOptimizer, "apply", None),
            self.assertRaisesRegex(ImportError, r"BaseOptimizer\.apply"),
        ):
            importlib.reload(keras_internals)


if __name__ == "__main__":
    tf.test.main()
