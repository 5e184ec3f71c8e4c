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
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading

import tensorflow as tf
from absl import logging

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
            library = build(_cache_directory())
            tf.load_op_library(str(library))
            _loaded_library = library
        return _loaded_library


def build(directory: pathlib.Path) -> pathlib.Path:
    """Compiles the kernel into a directory, unless it is there already.

    Several processes may do so at the same time: a library gets its name only when it is complete.

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
    command = _compile_command()
    library = directory / f"nccl_cpu_kernel-{_fingerprint(command)}.so"
    if library.exists():
        return library
    unfinished = directory / f"{library.stem}.{os.getpid()}-{threading.get_ident()}.tmp"
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
    return library


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


def _fingerprint(command: list[str]) -> str:
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
    return digest.hexdigest()[:16]


def _cache_directory() -> pathlib.Path:
    directory = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tfcdo"
    try:
        directory = directory.expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory.
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
