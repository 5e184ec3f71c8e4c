"""Builds and loads the CPU kernel for `NcclAllReduce`, for tests only.

TensorFlow has a kernel for this op on GPUs alone. After `load()` the op also runs on (virtual) CPU
devices, so that tests execute what they build instead of reading graphs. The kernel is compiled
when it is first needed, from the C++ file beside this one, and kept in the user's cache directory.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import unittest
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf

from tfcdo import tf_internals

TIMEOUT_VARIABLE = "TFCDO_NCCL_CPU_TIMEOUT_S"

_SOURCE = pathlib.Path(__file__).with_name("nccl_cpu_kernel.cc")
# -fwrapv: integers wrap around, as they do on a GPU, instead of being undefined behaviour.
_OWN_FLAGS = ("-shared", "-fPIC", "-O2", "-fwrapv", "-Wall", "-Wno-sign-compare")


@functools.cache
def load() -> pathlib.Path:
    """Makes `NcclAllReduce` run on CPU devices in this process; returns the shared library.

    Raises:
        unittest.SkipTest: If there is no compiler.
        RuntimeError: If the compiler fails; the message ends with its output.
    """
    kept = _cache_directory() / _library_name(_compile_command())
    # Where it is kept already, the directory need not be writable.
    library = kept if kept.exists() else build(_writable(kept.parent))
    tf.load_op_library(str(library))
    # Hidden from tfcdo; not by a mock, which `mock.patch.stopall` of any test undoes.
    vars(tf_internals)["device_types_with_kernel"] = _real_device_types
    return library


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """While this lasts, tfcdo knows of the kernel that `load` has loaded.

    TensorFlow cannot unload it, and who takes NCCL wherever it runs would take it in all later
    tests of the process.
    """
    with mock.patch.object(tf_internals, "device_types_with_kernel", _asked_tensorflow):
        yield


def _real_device_types(op_name: str) -> frozenset[str]:
    registered = _asked_tensorflow(op_name)
    return registered - {"CPU"} if op_name == "NcclAllReduce" else registered


_asked_tensorflow = tf_internals.device_types_with_kernel


def build(directory: pathlib.Path) -> pathlib.Path:
    """Compiles the kernel into a directory, unless it is there already; returns the library.

    Several processes may ask for it at the same time: the first compiles, the others wait. The
    name holds a hash of the source, the compiler, its flags and TensorFlow.
    """
    command = _compile_command()
    library = directory / _library_name(command)
    if library.exists():
        return library
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # Until it is closed, or the process ends.
        if not library.exists():
            _compile(command, library)
    finally:
        os.close(descriptor)
    return library


def _compile(command: list[str], library: pathlib.Path) -> None:
    """Compiles the kernel; the library gets its name only when it is complete."""
    unfinished = library.with_suffix(".tmp")
    try:
        result = subprocess.run(
            [*command, "-o", str(unfinished)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(
                "The CPU kernel for NcclAllReduce did not compile (exit status "
                f"{result.returncode}):\n{' '.join(command)}\n{result.stderr}"
            )
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def _compile_command() -> list[str]:
    chosen = os.environ.get("CXX")
    compiler = shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise unittest.SkipTest(
            "The CPU kernel for NcclAllReduce needs a C++17 compiler: install g++ or set the "
            "environment variable CXX to one."
        )
    return [
        compiler,
        *_OWN_FLAGS,
        *tf.sysconfig.get_compile_flags(),
        str(_SOURCE),
        # After the source: the linker looks up what was named before.
        *tf.sysconfig.get_link_flags(),
    ]


def _library_name(command: list[str]) -> str:
    compiler = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    parts = [
        _SOURCE.read_bytes(),
        f"{tf.version.VERSION} {tf.version.GIT_VERSION} {platform.machine()}".encode(),
        compiler,
        *(flag.encode() for flag in command if flag != str(_SOURCE)),
    ]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
    return f"nccl_cpu_kernel-{digest.hexdigest()[:16]}.so"


def _cache_directory() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return pathlib.Path(cache) / "tfcdo"


def _writable(directory: pathlib.Path) -> pathlib.Path:
    """Returns the folder, or one of this process alone where it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        # What Bazel's sandbox lets a test write to is TEST_TMPDIR.
        folder = tempfile.mkdtemp(prefix="tfcdo-", dir=os.environ.get("TEST_TMPDIR"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return pathlib.Path(folder)
