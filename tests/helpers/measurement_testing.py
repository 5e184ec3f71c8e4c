"""Shared by tests that measure this machine: soon done, with a folder for files."""

from __future__ import annotations

import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from tfcdo.topology import measurement


def measure_briefly(test: absltest.TestCase) -> pathlib.Path:
    """Makes a test's measurements short, so not exact; returns a folder that ends with the test."""
    test.enter_context(mock.patch.multiple(measurement, _COUNT=2**12, _BYTES=2**14))
    return pathlib.Path(test.enter_context(tempfile.TemporaryDirectory()))
