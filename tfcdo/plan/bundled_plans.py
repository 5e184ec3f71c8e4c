"""The tree packings that come with the package, which `tools/bundle_plans.py` has searched."""

from __future__ import annotations

import functools
import pathlib
import pkgutil

import msgspec

from tfcdo.plan.tree_packing import TreePacking
from tfcdo.plan.tree_packing import TreePackingDocument
from tfcdo.topology.isomorphism import isomorphisms
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

FILE = pathlib.Path(__file__).with_name("bundled_plans.json")


class BundledPlan(TreePackingDocument, frozen=True, kw_only=True):
    """Describes a tree packing and what it was found for.

    Attributes:
      topology: the name of a preset.
      num_devices: the size of the preset.
      subset: which of its devices, in order; None for all of them.
      num_bytes: the size that it was found for.
      robust_ratio: its robust time over the lower bound for that size, for the reader.
    """

    topology: str
    num_devices: int
    subset: tuple[int, ...] | None = None
    num_bytes: int
    robust_ratio: float

    def machine(self) -> Topology:
        """Returns the machine that the packing was found for."""
        whole = preset(self.topology, self.num_devices)
        return whole if self.subset is None else whole.subset(self.subset)


@functools.lru_cache(maxsize=1)
def read() -> tuple[BundledPlan, ...]:
    """Reads all plans that come with the package."""
    content = pkgutil.get_data("tfcdo.plan", FILE.name)  # Also from a zip file.
    return msgspec.json.decode(content or b"", type=tuple[BundledPlan, ...])


@functools.lru_cache(maxsize=64)
def find(topology: Topology) -> tuple[TreePacking, ...]:
    """Returns the tree packings that come with the package for a machine, found for various sizes.

    Args:
      topology: the machine, under whatever name and with its devices numbered in whatever way.

    Returns:
      The packings; none for a machine that is not known.

    Example:
      >>> from tfcdo.topology import preset
      >>> len(find(preset("dgx1"))) > 2, find(preset("pcie", 7))
      (True, ())
    """
    for machine, packings in _packings_by_machine():
        # Where many numberings match as far as single links go, all of them do, or hardly any.
        for images in isomorphisms(machine, topology, limit=16):
            if topology.subset(images).fingerprint == machine.fingerprint:
                return tuple(packing.expanded([images]) for packing in packings)
    return ()


@functools.lru_cache(maxsize=1)
def _packings_by_machine() -> list[tuple[Topology, list[TreePacking]]]:
    found: dict[Topology, list[TreePacking]] = {}
    for plan in read():
        machine = plan.machine()
        found.setdefault(machine, []).append(TreePacking.from_document(plan, machine.num_devices))
    return list(found.items())
