"""Describes the links between the devices of a machine: known machines, your own, and this one."""

from tfcdo.topology.detection import detect
from tfcdo.topology.links import Link, Resource, Route
from tfcdo.topology.measurement import measure
from tfcdo.topology.presets import PRESETS, preset
from tfcdo.topology.topology import Topology

__all__ = ["PRESETS", "Link", "Resource", "Route", "Topology", "detect", "measure", "preset"]
