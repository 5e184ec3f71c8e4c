"""Runs NCCL's ops on virtual CPU devices, by a kernel in C++: what would hang is an error."""

import contextlib
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

import platformdirs
import tensorflow as tf

from tfcdo import tf_internals

_PATIENCE_SECONDS = 10
_SOURCE = pathlib.Path(__file__).with_name("nccl_cpu_kernel.cc")
# -fwrapv: integers wrap around, as they do on a GPU, instead of being undefined behaviour.
_OWN_FLAGS = ("-shared", "-fPIC", "-O2", "-fwrapv", "-Wall", "-Wno-sign-compare")
_asked_tensorflow = tf_internals.device_types_with_kernel


@contextlib.contextmanager
def running() -> Iterator[None]:
    """While this lasts, `NcclAllReduce` runs on CPU devices and fails rather than hangs."""
    # TensorFlow cannot unload the kernel. But tfcdo is not told of it any longer: it would take
    # NCCL in later tests of the process.
    load()
    seen = mock.patch.object(tf_internals, "device_types_with_kernel", _asked_tensorflow)
    with patience(_PATIENCE_SECONDS), seen:
        yield


def patience(seconds: float) -> contextlib.AbstractContextManager[object]:
    """While this lasts, a kernel waits so long for the others."""
    return mock.patch.dict(os.environ, TFCDO_NCCL_CPU_TIMEOUT_S=str(seconds))


@functools.cache
def load() -> None:
    """Makes `NcclAllReduce` run on CPU devices in this process, and hides that from tfcdo."""
    tf.load_op_library(str(_built()))
    # Not by a mock, which `mock.patch.stopall` of any test undoes.
    vars(tf_internals)["device_types_with_kernel"] = _real_device_types


def _real_device_types(op_name: str) -> frozenset[str]:
    registered = _asked_tensorflow(op_name)
    return registered - {"CPU"} if op_name == "NcclAllReduce" else registered


def _built() -> pathlib.Path:
    """Returns the shared library, which gets its name only when it is complete."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise unittest.SkipTest(
            "The CPU kernel for NcclAllReduce needs a C++17 compiler: install g++ or set the "
            "environment variable CXX to one."
        )
    flags, libraries = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
    # Without the first flag, where TensorFlow's headers are: it differs for each copy of tfcdo.
    known = (_SOURCE.read_bytes(), tf.version.GIT_VERSION, platform.machine(), compiler, flags[1:])
    digest = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    library = _folder() / f"nccl_cpu_kernel-{digest}.so"
    if not library.exists():
        # Several processes may do so at once.
        unfinished = pathlib.Path(tempfile.mkdtemp(dir=library.parent), library.name)
        command = [compiler, *_OWN_FLAGS, *flags, str(_SOURCE), *libraries, "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            unfinished.replace(library)
        shutil.rmtree(unfinished.parent)
        if done.returncode:
            raise RuntimeError(
                "The CPU kernel for NcclAllReduce did not compile (exit status "
                f"{done.returncode}):\n{' '.join(command)}\n{done.stderr}"
            )
    return library


def _folder() -> pathlib.Path:
    """Returns the cache, or a folder of this process alone where it cannot be written."""
    folder = platformdirs.user_cache_path("tfcdo")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    # What Bazel's sandbox lets a test write to is TEST_TMPDIR.
    return pathlib.Path(tempfile.mkdtemp(prefix="tfcdo-", dir=os.environ.get("TEST_TMPDIR")))
