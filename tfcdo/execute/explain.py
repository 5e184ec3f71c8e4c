"""Explanations of plans: packs, trees and bytes, and the ops that a plan becomes in a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfcdo import checks, tf_internals, virtual_devices
from tfcdo.execute.request import check_device
from tfcdo.log import format_count
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import Pack

_MAX_LINES = 8  # For each kind of line, so that an explanation fits on a screen.


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Describes the all-reduce of a batch of values of one dtype.

    Attributes:
      ops: the `repr` of the object that was asked.
      devices: the devices, by whose indices the copy trees name them: the replicas' and then, if
        values are reduced elsewhere, that one.
      algorithm: the way in which the values are reduced, such as "ring", "NCCL" or "one_device".
      reason: the reason for it.
      packs: the packs of the plan; none for an empty batch.
      bytes_by_link: how many bytes each device sends to each other one, `{(source, target): bytes}`
        by index; empty for NCCL.
      num_ops: how many ops of each type the all-reduce adds to a graph.
      bytes_between_hosts: how many bytes this host sends to others; 0 on one host, and for NCCL.
      owned_bytes: the bytes of the variables that each device updates, with the optimizer's state
        of these variables only; empty if each device updates all of them.
    """

    ops: str
    devices: tuple[str, ...]
    algorithm: str
    reason: str
    packs: tuple[Pack, ...]
    bytes_by_link: Mapping[tuple[int, int], int]
    num_ops: Mapping[str, int]
    bytes_between_hosts: int = 0
    owned_bytes: tuple[int, ...] = ()

    @property
    def num_packs(self) -> int:
        """Returns the number of packs."""
        return len(self.packs)

    @property
    def num_graph_ops(self) -> int:
        """Returns the number of ops that the all-reduce adds to a graph."""
        return sum(self.num_ops.values())

    def __str__(self) -> str:
        by_amount: dict[int, list[str]] = {}
        for (source, target), num_bytes in sorted(self.bytes_by_link.items()):
            by_amount.setdefault(num_bytes, []).append(f"{source} -> {target}")
        ops = sorted(self.num_ops.items(), key=lambda item: (-item[1], item[0]))
        between = self.bytes_between_hosts
        to_others = [f"  {_bytes(between)} to other hosts"] if between else []
        lines = [
            f"{self.ops} on {format_count(len(self.devices), 'device')}: {self.algorithm}",
            f"  because {self.reason}",
            *_shortened("pack", [f"pack {i}: {_pack(pack)}" for i, pack in enumerate(self.packs)]),
            *_shortened("amount", [_links(*item) for item in sorted(by_amount.items())[::-1]]),
            *to_others,
            *self._lines_of_owners(),
            f"  {self.num_graph_ops:,} graph ops: "
            + ", ".join(f"{count:,} {name}" for name, count in ops),
        ]
        return "\n".join(lines)

    def _lines_of_owners(self) -> list[str]:
        if not sum(self.owned_bytes):
            return []
        most, mean = max(self.owned_bytes), sum(self.owned_bytes) / len(self.owned_bytes)
        owned = ", ".join(f"{number:,}" for number in self.owned_bytes)
        return [
            f"  bytes of the variables that each device updates: {owned}",
            f"  a slot of the optimizer takes up to {_bytes(most)} a device instead of "
            f"{_bytes(sum(self.owned_bytes))}; the largest share is {most / mean:.2f} of the mean",
        ]


def device_names(devices: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the full names of the devices that an explanation is for; see its argument."""
    if devices is None and tf.distribute.has_strategy():
        devices = tf.distribute.get_strategy().extended.worker_devices
    elif devices is None:
        devices = virtual_devices.names_here()
    names = checks.check_device_list(devices)
    for name in names:
        check_device("each of devices", name)
    return tuple(tf_internals.canonical_device(name) for name in names)


def _pack(pack: Pack) -> str:
    num_values = len({part.value for part in pack.slices})
    parts = [
        f"{_bytes(pack.num_bytes)} of {format_count(num_values, 'value')}",
        f"in {format_count(len(pack.tensors), 'tensor')}",
    ]
    if pack.num_sent_bytes != pack.num_bytes:
        parts.append(f"sent as {_bytes(pack.num_sent_bytes)}")
    if pack.root.exchange:
        parts.append(f"by {pack.root.exchange}")
    return " ".join(parts + ([f"along {_nested(pack.tree)}"] if pack.tree else []))


def _nested(tree: CopyTree) -> str:
    """Writes a tree as its root followed by the subtrees: `0(1, 2(3))`."""

    def subtree(device: int) -> str:
        children = ", ".join(map(subtree, tree.children[device]))
        return f"{device}({children})" if children else f"{device}"

    return subtree(tree.root)


def _links(num_bytes: int, links: Sequence[str]) -> str:
    more = ", ..." if len(links) > _MAX_LINES else ""
    listed = ", ".join(links[:_MAX_LINES]) + more
    return f"{_bytes(num_bytes)} on each of {format_count(len(links), 'link')}: {listed}"


def _shortened(what: str, lines: Sequence[str]) -> list[str]:
    shown = [f"  {line}" for line in lines[:_MAX_LINES]]
    hidden = len(lines) - len(shown)
    return shown + ([f"  ... and {format_count(hidden, f'more {what}')}"] if hidden else [])


def _bytes(number: int) -> str:
    return f"{number:,} bytes"
