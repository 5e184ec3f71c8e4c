"""Answers the doctor's questions in a process that may hang or crash.

Run as `python -m tfcdo.doctor.probe`, it reads a question a line and answers each with a line.
Nothing here imports TensorFlow before it is asked to.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tfcdo.bench import worker_pool
from tfcdo.doctor.answers import Failure, Versions
from tfcdo.version import __version__

# That of pyproject.toml, which is not there where tfcdo is installed: a test compares them.
OLDEST_TENSORFLOW = (2, 16)


def versions() -> Versions:
    """Imports TensorFlow and says which versions there are, and whether TensorFlow can be used."""
    found: dict[str, str | None] = {}
    try:
        for name in ("numpy", "tensorflow"):
            found[name] = importlib.import_module(name).__version__
        found["cuda"] = _cuda_of_tensorflow()
        problem, remedy = _problem_of_tensorflow(str(found["tensorflow"]))
        # Keras is needed by Keras users only.
        found["keras"] = _version_of("keras")
    except Exception as error:
        # Whatever a broken installation raises: a missing library, a numpy of the wrong age.
        problem = f"TensorFlow cannot be imported: {_first_line(error)}"
        remedy = f"pip install 'tensorflow>={'.'.join(map(str, OLDEST_TENSORFLOW))}'"
    return Versions(__version__, platform.python_version(), **found, problem=problem, remedy=remedy)


def _problem_of_tensorflow(version: str) -> tuple[str, str]:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < OLDEST_TENSORFLOW:
        oldest = ".".join(map(str, OLDEST_TENSORFLOW))
        return (
            f"TensorFlow {version} is older than {oldest}, the oldest that tfcdo runs on",
            f"pip install --upgrade 'tensorflow>={oldest}'",
        )
    try:
        importlib.import_module("tfcdo.tf_internals")
    except (ImportError, AttributeError) as error:
        return (
            f"TensorFlow {version} lacks something that tfcdo needs: {_first_line(error)}",
            "install a TensorFlow that tfcdo's README lists, or a newer tfcdo",
        )
    return "", ""


def _cuda_of_tensorflow() -> str | None:
    built: Mapping[str, str] = importlib.import_module("tensorflow").sysconfig.get_build_info()
    return built.get("cuda_version")


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Probe:
    """Answers questions, the one about devices before those that need them.

    A question is an object with `question`, the name of a function of `self_test` or `versions`,
    and that function's arguments. An answer is a value of `answers`, as JSON holds it.
    """

    def __init__(self) -> None:
        self._patient: Any = None

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Answers one question."""
        arguments = dict(request)
        question = arguments.pop("question")
        try:
            return msgspec.to_builtins(self._ask(question, arguments))
        except Exception as error:
            return msgspec.to_builtins(Failure(f"{type(error).__name__}: {_first_line(error)}"))

    def _ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        if question == "versions":
            return versions()
        if question == "devices":
            from tfcdo.doctor import self_test

            self._patient = self_test.Patient(**arguments)
            return self._patient.devices()
        return getattr(self._patient, question)(**arguments)


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().partition("\n")[0]


if __name__ == "__main__":
    worker_pool.serve(Probe().answer)
