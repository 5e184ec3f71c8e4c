"""Shared by tests that measure this machine: soon done, with a folder for files."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import unittest
from unittest import mock

from tfcdo.topology import measurement


def measure_briefly(test: unittest.TestCase) -> pathlib.Path:
    """Makes a test's measurements short: what they find need not be right, but found it must be."""
    stack = contextlib.ExitStack()
    test.addCleanup(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(mock.patch.multiple(measurement, _COUNT=2**12, _BYTES=2**14))
    return pathlib.Path(folder)
