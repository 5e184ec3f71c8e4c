"""Runs the ops that GPUs would run for NCCL on virtual CPU devices.

A kernel that misses a participant waits; here it gives up after a few seconds, so that what would
hang on GPUs is an error. A test file whose tests all need it imports `setUpModule` and
`tearDownModule` by these names, for unittest to find them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import nccl_cpu_kernel

_PATIENCE_SECONDS = 10
_environment = contextlib.ExitStack()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """While this lasts, `NcclAllReduce` runs on CPU devices and fails rather than hangs.

    The kernel stays for the rest of the process, but tfcdo is not told of it.
    """
    nccl_cpu_kernel.load()
    with patience(_PATIENCE_SECONDS), nccl_cpu_kernel.seen():
        yield


def patience(seconds: float) -> contextlib.AbstractContextManager[object]:
    """While this lasts, a kernel waits so long for the others."""
    return mock.patch.dict(os.environ, {nccl_cpu_kernel.TIMEOUT_VARIABLE: str(seconds)})


def setUpModule() -> None:
    _environment.enter_context(running())


def tearDownModule() -> None:
    _environment.close()
