"""Tells which private names of TensorFlow and Keras are missing, all at once and at import.

`tfcdo.tf_internals` and `tfcdo.keras_internals` are the only files that use such names. They change
without notice: a version that lacks some is refused before it is used, with an error that lists
them. An override whose base was renamed would otherwise just never be called.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

_PRIVATE = ("tensorflow.python.", "keras.src.")
# Owner, name and the parameters that tfcdo relies on; an attribute that is read has none.
Member = tuple[Any, str, tuple[str, ...]]


def check(spec: ModuleSpec, library: str) -> None:
    """Raises an ImportError with all private names that a module needs and a library lacks."""
    # Where only compiled files are installed, there is no source to look through: Python's own
    # ImportError names the first one.
    get_source = getattr(spec.loader, "get_source", lambda name: None)
    version = importlib.import_module(library.lower()).__version__
    _refuse(library, version, missing(get_source(spec.name) or ""))


def check_members(library: str, version: str, members: Iterable[Member]) -> None:
    """Raises an ImportError that lists all members that a library lacks."""
    _refuse(library, version, missing_members(members))


def _refuse(library: str, version: str, absent: Sequence[str]) -> None:
    if not absent:
        return
    record = json.loads(pkgutil.get_data("tfcdo", "tested_versions.json") or "")
    known = dict.fromkeys(entry[library.lower()] for entry in record)
    raise ImportError(
        f"tfcdo uses names of {library} that are not in {library} {version}: {', '.join(absent)}. "
        f"Versions on which tfcdo's tests were run: {', '.join(known)}. "
        "Install one of those, or a tfcdo that knows yours"
    )


def missing_members(members: Iterable[Member]) -> list[str]:
    """Returns the members, and their parameters, that do not exist."""
    absent = []
    for owner, name, parameters in members:
        where = f"{owner.__name__}.{name}"
        if inspect.getattr_static(owner, name, None) is None:
            # Attributes of objects are named only in the code of their class.
            if parameters or not inspect.isclass(owner) or name not in _names_in_code(owner):
                absent.append(where)
        elif parameters:
            known = inspect.signature(getattr(owner, name)).parameters
            absent += [f"{where}({each})" for each in parameters if each not in known]
    return absent


def _names_in_code(owner: Any) -> set[str]:
    """Returns the names that the methods of a class use."""
    functions = [value for base in inspect.getmro(owner) for value in vars(base).values()]
    unwrapped = map(inspect.unwrap, filter(inspect.isfunction, functions))
    return {name for function in unwrapped for name in function.__code__.co_names}


def missing(source: str) -> list[str]:
    """Returns the private names of libraries that a source uses and that do not exist."""
    # These are what is imported as `from tensorflow.python.x import y as z`, its attributes
    # (`z.name`) and attributes of the results of its functions (`z.name().attribute`). An import
    # in a `try` has another one beside it.
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(_PRIVATE)
        for alias in node.names
    }
    used = dict.fromkeys(filter(None, (_full_name(node, modules) for node in ast.walk(tree))))
    absent = [name for name in (*modules.values(), *used) if not _exists(name)]
    # Names inside a missing module are not listed again.
    return [name for name in absent if not any(name.startswith(f"{part}.") for part in absent)]


def _full_name(node: ast.AST, modules: dict[str, str]) -> str:
    """Spells `z.name` and `z.name().attribute` in full; "" for anything else."""
    if not isinstance(node, ast.Attribute):
        return ""
    owner = node.value
    if isinstance(owner, ast.Name):
        return f"{modules[owner.id]}.{node.attr}" if owner.id in modules else ""
    if isinstance(owner, ast.Call) and not owner.args and not owner.keywords:
        function = _full_name(owner.func, modules)
        return f"{function}().{node.attr}" if function else ""
    return ""


def _exists(name: str) -> bool:
    """Imports a name's module, and follows the rest."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return True
    owner, _, attribute = name.rpartition(".")
    if owner.endswith("()"):
        # dir, because to read a property may do something.
        module, _, function = owner.removesuffix("()").rpartition(".")
        made = getattr(importlib.import_module(module), function, None)
        return made is None or attribute in dir(made())
    try:
        return hasattr(importlib.import_module(owner), attribute)
    except ImportError:
        return False
