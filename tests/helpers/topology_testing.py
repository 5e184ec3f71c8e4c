"""Asks topologies what several tests want to know, and measures this machine in little time."""

import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from tfcdo.topology import measurement
from tfcdo.topology.topology import Topology


def meet(topology: Topology, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Returns whether two transfers share a resource, so that one has to wait for the other."""
    links = topology.link_by_pair
    return not set(links[one].resources).isdisjoint(links[other].resources)


def measure_briefly(test: absltest.TestCase) -> pathlib.Path:
    """Makes a test's measurements short, so not exact; returns a folder that ends with the test."""
    test.enter_context(mock.patch.multiple(measurement, _COUNT=2**12, _BYTES=2**14))
    return pathlib.Path(test.enter_context(tempfile.TemporaryDirectory()))
