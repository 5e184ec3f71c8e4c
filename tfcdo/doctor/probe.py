"""Answers the doctor's questions in a process that may hang or crash; imports TensorFlow late."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping
from typing import Any

from tfcdo.bench import worker_pool
from tfcdo.doctor.examination import Machine, Versions
from tfcdo.version import __version__

# That of pyproject.toml, which is not there where tfcdo is installed: a test compares them.
OLDEST_TENSORFLOW = (2, 16)


class Probe:
    """The questions: `versions`, `machine`, and after that `pair` and `sum`."""

    def versions(self) -> Versions:
        """Imports TensorFlow and says which versions there are, and whether it can be used."""
        found: dict[str, Any] = {}
        try:
            for name in ("numpy", "tensorflow"):
                found[name] = importlib.import_module(name).__version__
            tensorflow = importlib.import_module("tensorflow")
            build = tensorflow.sysconfig.get_build_info()
            found["cuda"] = build.get("cuda_version")
            found["without_kernels"] = _without_kernels(tensorflow.config, build)
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


def _without_kernels(config: Any, build: Mapping[str, Any]) -> list[str]:
    """Names the GPUs that none of TensorFlow's compiled kernels run on."""
    names = []
    # Such as sm_89, and compute_90, which is compiled too and can be compiled again.
    built = re.findall(r"_(\d+)(\d)", " ".join(build.get("cuda_compute_capabilities", ())))
    for gpu in config.list_physical_devices("GPU"):
        details = config.experimental.get_device_details(gpu)
        if "compute_capability" in details:
            major, minor = details["compute_capability"]
            # Kernels run on GPUs of their generation that are not older.
            if built and not any(int(x) == major and int(y) <= minor for x, y in built):
                number = gpu.name.rpartition(":")[2]
                names.append(f"GPU:{number} (compute capability {major}.{minor})")
    return names


def _oldest() -> str:
    return ".".join(map(str, OLDEST_TENSORFLOW))


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().partition("\n")[0]


if __name__ == "__main__":
    worker_pool.serve(Probe)
