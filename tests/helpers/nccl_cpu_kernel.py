"""Builds and loads the CPU kernel for `NcclAllReduce`, for tests only.

TensorFlow has a kernel for this op on GPUs alone. After `load()` the op also runs on (virtual) CPU
devices, so that tests execute what they build instead of reading graphs. The kernel is compiled
when it is first needed, from the C++ file beside this one, and kept in the user's cache directory.

Example:
    reason = nccl_cpu_kernel.why_unavailable()
    if reason is not None:
        raise unittest.SkipTest(reason)
    nccl_cpu_kernel.load()
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf
from absl import logging

from tfcdo import tf_internals

TIMEOUT_VARIABLE = "TFCDO_NCCL_CPU_TIMEOUT_S"

_SOURCE = pathlib.Path(__file__).with_name("nccl_cpu_kernel.cc")
# -fwrapv: integers wrap around, as they do on a GPU, instead of being undefined behaviour.
_OWN_FLAGS = ("-shared", "-fPIC", "-O2", "-fwrapv", "-Wall", "-Wno-sign-compare")

_load_lock = threading.Lock()
_loaded_library: pathlib.Path | None = None


def why_unavailable() -> str | None:
    """Says why the kernel cannot be built on this machine.

    Returns:
        A reason to show when tests are skipped, or None when `load()` can be called. A compiler
        that is there but fails is not such a reason: `load()` raises then.
    """
    if _find_compiler() is None:
        return (
            "The CPU kernel for NcclAllReduce needs a C++17 compiler: install g++ or set the "
            "environment variable CXX to one."
        )
    return None


def load() -> pathlib.Path:
    """Makes `NcclAllReduce` run on CPU devices in this process, once; thread-safe.

    Returns:
        The shared library that was loaded, by this call or by an earlier one.

    Raises:
        RuntimeError: If there is no compiler, or it fails; the message ends with its output.
    """
    global _loaded_library
    with _load_lock:
        if _loaded_library is None:
            library = _kept_directory() / _library_name()
            if not library.exists():  # Where it does, the directory need not be writable.
                library = build(_cache_directory())
            tf.load_op_library(str(library))
            _loaded_library = library
            _hide()
        return _loaded_library


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """While this lasts, tfcdo knows of the kernel that `load` has loaded.

    TensorFlow cannot unload it, and who takes NCCL wherever it runs would take it in all later
    tests of the process.
    """
    with mock.patch.object(tf_internals, "device_types_with_kernel", _asked_tensorflow):
        yield


def _hide() -> None:
    """Keeps the kernel from tfcdo; not by a mock, which `mock.patch.stopall` of any test undoes."""
    vars(tf_internals)["device_types_with_kernel"] = _real_device_types


def _real_device_types(op_name: str) -> frozenset[str]:
    registered = _asked_tensorflow(op_name)
    return registered - {"CPU"} if op_name == "NcclAllReduce" else registered


_asked_tensorflow = tf_internals.device_types_with_kernel


def build(directory: pathlib.Path) -> pathlib.Path:
    """Compiles the kernel into a directory, unless it is there already.

    Several processes may ask for it at the same time: the first compiles, the others wait.

    Args:
        directory: Where to keep the library; it exists and is writable.

    Returns:
        The library. Its name holds a hash of all it is made from, so that a change of the source,
        the compiler, its flags or TensorFlow makes another one.

    Raises:
        RuntimeError: If there is no compiler, or it fails; the message ends with its output.
    """
    reason = why_unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    library = directory / _library_name()
    with _locked(directory):
        if not library.exists():
            _compile(library)
    return library


def _compile(library: pathlib.Path) -> None:
    """Compiles the kernel; the library gets its name only when it is complete."""
    command = _compile_command()
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


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """While this lasts, no other thread or process builds in the directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # This unlocks it, as does the end of the process.


def _find_compiler() -> str | None:
    chosen = os.environ.get("CXX")
    if chosen:
        return shutil.which(chosen)
    return shutil.which("g++") or shutil.which("c++")


def _compile_command() -> list[str]:
    return [
        str(_find_compiler()),
        *_OWN_FLAGS,
        *tf.sysconfig.get_compile_flags(),
        str(_SOURCE),
        # After the source: the linker looks up what was named before.
        *tf.sysconfig.get_link_flags(),
    ]


def _library_name() -> str:
    """The name of the library that the source, the compiler and TensorFlow make now."""
    command = _compile_command()
    compiler = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    parts = [
        _SOURCE.read_bytes(),
        tf.version.VERSION.encode(),
        tf.version.GIT_VERSION.encode(),
        platform.machine().encode(),
        compiler,
        *(flag.encode() for flag in command if flag != str(_SOURCE)),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return f"nccl_cpu_kernel-{digest.hexdigest()[:16]}.so"


def _kept_directory() -> pathlib.Path:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # Without a home directory the name stays as it is, and no such directory exists.
    return pathlib.Path(os.path.expanduser(cache)) / "tfcdo"  # noqa: PTH111


def _cache_directory() -> pathlib.Path:
    directory = _kept_directory()
    try:
        if str(directory).startswith("~"):
            raise OSError("there is no home directory")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        # A directory of our own, not a fixed name under /tmp that another user could have filled.
        # Bazel's sandbox may come here: what it lets a test write to is TEST_TMPDIR.
        fallback = pathlib.Path(
            tempfile.mkdtemp(prefix="tfcdo-", dir=os.environ.get("TEST_TMPDIR"))
        )
        atexit.register(shutil.rmtree, fallback, ignore_errors=True)
        logging.warning(
            "Cannot keep the CPU kernel for NcclAllReduce in %s (%s): building it in %s for this "
            "process alone. Set XDG_CACHE_HOME to a writable directory to build it once.",
            directory,
            error,
            fallback,
        )
        return fallback
