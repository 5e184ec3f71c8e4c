"""What joins the devices of a machine: known machines, machines of your own, and this one."""

from tfcdo.topology.detection import detect
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Link
from tfcdo.topology.topology import Resource
from tfcdo.topology.topology import Topology
from tfcdo.topology.topology import TopologyBuilder

__all__ = ["PRESETS", "Link", "Resource", "Topology", "TopologyBuilder", "detect", "preset"]
