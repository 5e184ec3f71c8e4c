"""Answers the doctor's questions in a process that may hang or crash; imports TensorFlow late."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import platform
import re

from tfcdo.bench import worker_pool
from tfcdo.doctor.answers import Machine, Versions
from tfcdo.version import __version__

# That of pyproject.toml, which is not there where tfcdo is installed: a test compares them.
OLDEST_TENSORFLOW = (2, 16)


class Probe:
    """The questions: `versions`, `machine`, and after that `pair` and `sum`."""

    def versions(self) -> Versions:
        """Imports TensorFlow and says which versions there are, and whether it can be used."""
        found: dict[str, str | None] = {}
        try:
            for name in ("numpy", "tensorflow"):
                found[name] = importlib.import_module(name).__version__
            build = importlib.import_module("tensorflow").sysconfig.get_build_info()
            found["cuda"] = build.get("cuda_version")
            problem, remedy = _problem_of_tensorflow(str(found["tensorflow"]))
            # Keras is needed by Keras users only.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found["keras"] = importlib.metadata.version("keras")
        except Exception as error:
            # Whatever a broken installation raises: a missing library, a numpy of the wrong age.
            problem = f"TensorFlow cannot be imported: {_first_line(error)}"
            remedy = f"pip install 'tensorflow>={_oldest()}'"
        python = platform.python_version()
        return Versions(__version__, python, **found, problem=problem, remedy=remedy)

    def machine(self, count: int | None) -> Machine:
        """Looks at the devices, and chooses those to examine."""
        from tfcdo.doctor import self_test

        patient = self_test.Patient(count)
        self.pair, self.sum = patient.pair, patient.sum
        return patient.machine()


def _problem_of_tensorflow(version: str) -> tuple[str, str]:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < OLDEST_TENSORFLOW:
        return (
            f"TensorFlow {version} is older than {_oldest()}, the oldest that tfcdo runs on",
            f"pip install --upgrade 'tensorflow>={_oldest()}'",
        )
    try:
        importlib.import_module("tfcdo.tf_internals")
    except (ImportError, AttributeError) as error:
        return (
            f"TensorFlow {version} lacks something that tfcdo needs: {_first_line(error)}",
            "install a TensorFlow that tfcdo's README lists, or a newer tfcdo",
        )
    return "", ""


def _oldest() -> str:
    return ".".join(map(str, OLDEST_TENSORFLOW))


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().partition("\n")[0]


if __name__ == "__main__":
    worker_pool.serve(Probe)
