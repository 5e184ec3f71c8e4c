"""Topologies: what joins the devices of a machine, how fast, and what those joints share."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx

from tfcdo import checks

# The simulator's reference times use 10 us for every copy: about what an op launch and a
# peer-to-peer copy of a few bytes take.
LATENCY = 10e-6


@dataclasses.dataclass(frozen=True)
class Resource:
    """Something that carries one transfer at a time: a wire, a switch port, a host bridge.

    Attributes:
      name: how reports and drawings call it.
      bandwidth: bytes per second; `math.inf` if it is never the slowest part.
    """

    name: str
    bandwidth: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth of {self.name!r} must be above 0 B/s; got {self.bandwidth}"
            )


@dataclasses.dataclass(frozen=True)
class Link:
    """The way from one device to another.

    Attributes:
      source: the sending device.
      target: the receiving device.
      latency: seconds that a transfer takes on top of its bytes.
      resources: indices of the topology's resources on the way, in the order of travel; a transfer
        holds all of them for its whole time, at the speed of the slowest.
      via_host: whether this is a way through the host that stands in for a missing direct one. The
        bandwidth bound is that of the other links, as long as they join all devices.
    """

    source: int
    target: int
    latency: float
    resources: tuple[int, ...]
    via_host: bool = False


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices, and the directed links between every two of them.

    A topology is a plain, hashable value: two that compare equal cost the same, so it serves as
    the key of a cache.

    Attributes:
      name: how reports call it.
      num_devices: how many devices there are.
      resources: what the links are made of.
      links: one link for each ordered pair of devices.
      addition_bandwidth: bytes of one operand that a device adds per second; `math.inf` if
        additions cost nothing next to the copies.
      serial_reduction: whether all devices add with the same cores and memory, so one at a time.

    Raises:
      ValueError: if a pair of devices has no link or several, or a link names a device or a
        resource that does not exist, or a resource twice, or a number is out of range.
      TypeError: if `num_devices` is no int.

    Example:
      >>> from tfcdo.topology import preset
      >>> machine = preset("dgx1")
      >>> machine.bandwidth(0, 1), machine.bandwidth(0, 2), machine.bandwidth(0, 5)
      (50000000000.0, 25000000000.0, 10000000000.0)
    """

    name: str
    num_devices: int
    resources: tuple[Resource, ...]
    links: tuple[Link, ...]
    addition_bandwidth: float = math.inf
    serial_reduction: bool = False

    def __post_init__(self) -> None:
        checks.check_int("num_devices", self.num_devices, at_least=1)
        if not self.addition_bandwidth > 0:
            raise ValueError(
                f"addition_bandwidth must be above 0 B/s; got {self.addition_bandwidth}"
            )
        names = [resource.name for resource in self.resources]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"resources must have different names; {twice!r} is there twice")
        for link in self.links:
            way = link_name(link.source, link.target)
            if not 0 <= link.latency < math.inf:
                raise ValueError(
                    f"latency of the link {way} must be a number of seconds, at least 0; "
                    f"got {link.latency}"
                )
            if not link.resources or not all(
                0 <= index < len(self.resources) for index in link.resources
            ):
                raise ValueError(
                    f"resources of the link {way} must be at least one of the indices from 0 to "
                    f"{len(self.resources) - 1}; got {link.resources}"
                )
            if len(set(link.resources)) != len(link.resources):
                # A transfer either holds a resource or not: to hold it twice means nothing.
                index = next(one for one in link.resources if link.resources.count(one) > 1)
                raise ValueError(
                    f"resources of the link {way} must be different ones; "
                    f"{names[index]!r} is there twice"
                )
        self._check_pairs()

    def _check_pairs(self) -> None:
        devices = range(self.num_devices)
        given = collections.Counter((link.source, link.target) for link in self.links)
        too_many = [
            pair
            for pair, count in given.items()
            if count > 1 or pair[0] == pair[1] or not (pair[0] in devices and pair[1] in devices)
        ]
        wanted = self.num_devices * (self.num_devices - 1)
        if too_many or len(self.links) != wanted:
            # A wrong `num_devices` may ask for more pairs than can be listed.
            missing = (pair for pair in ordered_pairs(self.num_devices) if pair not in given)
            some = list(itertools.islice(itertools.chain(too_many, missing), 5))
            raise ValueError(
                f"links must hold each ordered pair of the {self.num_devices} devices once, "
                f"{wanted} links; got {len(self.links)}; missing or too many (at most 5 shown): "
                f"{some}"
            )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # A topology is looked up once for each all-reduce; hashing its links is worth doing once.
        return hash(
            (
                self.num_devices,
                self.resources,
                self.links,
                self.addition_bandwidth,
                self.serial_reduction,
            )
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short text that two topologies share just if they differ in names only."""
        number: dict[int, int] = {}
        for link in sorted(self.links, key=lambda link: (link.source, link.target)):
            for index in link.resources:
                number.setdefault(index, len(number))
        content = (
            self.num_devices,
            (self.addition_bandwidth, self.serial_reduction),
            [self.resources[index].bandwidth for index in number],
            sorted(
                (
                    (link.source, link.target),
                    (link.latency, link.via_host),
                    tuple(number[index] for index in link.resources),
                )
                for link in self.links
            ),
        )
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    @functools.cached_property
    def link_by_pair(self) -> Mapping[tuple[int, int], Link]:
        """The link of each ordered pair of devices."""
        return {(link.source, link.target): link for link in self.links}

    @functools.cached_property
    def link_kinds(self) -> Mapping[tuple[int, int], tuple[float, float, bool]]:
        """Bandwidth and latency of each ordered pair's link, and whether it is via the host."""
        return {
            pair: (self.bandwidth(*pair), link.latency, link.via_host)
            for pair, link in self.link_by_pair.items()
        }

    def bandwidth(self, source: int, target: int) -> float:
        """The speed of a transfer that has the way alone.

        Args:
          source: the sending device.
          target: the receiving device.

        Returns:
          Bytes per second, those of the slowest resource on the way.

        Raises:
          KeyError: if these are not two different devices.
        """
        link = self.link_by_pair[source, target]
        return min(self.resources[index].bandwidth for index in link.resources)

    def latency(self, source: int, target: int) -> float:
        """What a transfer takes on top of its bytes.

        Args:
          source: the sending device.
          target: the receiving device.

        Returns:
          Seconds.

        Raises:
          KeyError: if these are not two different devices.
        """
        return self.link_by_pair[source, target].latency

    @functools.cached_property
    def direct_links(self) -> tuple[Link, ...]:
        """The links not via the host; all links where those do not reach every device."""
        direct = tuple(link for link in self.links if not link.via_host)
        graph = nx.DiGraph((link.source, link.target) for link in direct)
        graph.add_nodes_from(range(self.num_devices))
        return direct if nx.is_strongly_connected(graph) else self.links

    def subset(self, devices: Sequence[int]) -> Topology:
        """The part of the machine that some of its devices see.

        Args:
          devices: the devices to keep; the i-th of them becomes device i.

        Returns:
          A topology over `len(devices)` devices.

        Raises:
          ValueError: if `devices` is empty, names a device twice or one that does not exist.

        Example:
          >>> from tfcdo.topology import preset
          >>> preset("dgx1").subset([0, 4, 5]).bandwidth(0, 1)
          50000000000.0
        """
        devices = tuple(devices)
        known = range(self.num_devices)
        if not devices or len(set(devices)) != len(devices) or not set(devices) <= set(known):
            raise ValueError(
                f"devices must be different devices of {self.name!r}, which has 0 to "
                f"{self.num_devices - 1}; got {list(devices)}"
            )
        if devices == tuple(known):
            return self
        kept = [
            self.link_by_pair[devices[source], devices[target]]
            for source, target in ordered_pairs(len(devices))
        ]
        used = sorted({index for link in kept for index in link.resources})
        return Topology(
            name=f"{self.name}{{{','.join(map(str, devices))}}}",
            num_devices=len(devices),
            resources=tuple(self.resources[index] for index in used),
            links=tuple(
                dataclasses.replace(
                    link,
                    source=devices.index(link.source),
                    target=devices.index(link.target),
                    resources=tuple(used.index(index) for index in link.resources),
                )
                for link in kept
            ),
            addition_bandwidth=self.addition_bandwidth,
            serial_reduction=self.serial_reduction,
        )

    def to_json(self) -> str:
        """This topology as a JSON text, which `from_json` reads.

        Returns:
          An object with the constructor's arguments; a bandwidth of null has no limit, and links
          name their resources.

        Example:
          >>> from tfcdo.topology import preset
          >>> print(preset("fully_connected", 2).to_json())
          {
            "name": "fully_connected",
            "num_devices": 2,
            "addition_bandwidth": null,
            "serial_reduction": false,
            "resources": [
              {"name": "0→1", "bandwidth": 25000000000.0},
              {"name": "1→0", "bandwidth": 25000000000.0}
            ],
            "links": [
              {"source": 0, "target": 1, "latency": 1e-05, "resources": ["0→1"], "via_host": false},
              {"source": 1, "target": 0, "latency": 1e-05, "resources": ["1→0"], "via_host": false}
            ]
          }
        """

        def lines(values: Iterable[Mapping[str, Any]]) -> str:
            # One resource or link a line: a person may want to read and change them.
            return ",".join(f"\n    {json.dumps(value, ensure_ascii=False)}" for value in values)

        resources = lines(
            {"name": resource.name, "bandwidth": _finite(resource.bandwidth)}
            for resource in self.resources
        )
        links = lines(
            {
                **dataclasses.asdict(link),
                "resources": [self.resources[index].name for index in link.resources],
            }
            for link in self.links
        )
        return (
            "{\n"
            f'  "name": {json.dumps(self.name, ensure_ascii=False)},\n'
            f'  "num_devices": {self.num_devices},\n'
            f'  "addition_bandwidth": {json.dumps(_finite(self.addition_bandwidth))},\n'
            f'  "serial_reduction": {json.dumps(self.serial_reduction)},\n'
            f'  "resources": [{resources}\n  ],\n'
            f'  "links": [{links}\n  ]\n'
            "}"
        )

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Reads what `to_json` has written, or what somebody wrote in its likeness.

        Args:
          text: a JSON object with "name", "num_devices", "resources" and "links", perhaps
            "addition_bandwidth" and "serial_reduction", and nothing else; a link may leave out
            "latency" and "via_host".

        Returns:
          The topology.

        Raises:
          ValueError: if the text is no JSON, or not of such an object, or not of a topology.

        Example:
          >>> from tfcdo.topology import preset
          >>> pcie = preset("pcie")
          >>> Topology.from_json(pcie.to_json()) == pcie
          True
        """
        from tfcdo.topology import serialization

        return serialization.parse(text)

    @classmethod
    def from_nvidia_smi(cls, text: str) -> Topology:
        """The topology that `nvidia-smi topo -m` shows; see `tfcdo.topology.nvidia_smi.parse`.

        Args:
          text: what the command printed.

        Returns:
          A topology over the GPUs of the table, in its order.

        Raises:
          ValueError: if the text holds no such table.
        """
        from tfcdo.topology import nvidia_smi

        return nvidia_smi.parse(text)


def _finite(bandwidth: float) -> float | None:
    return None if bandwidth == math.inf else bandwidth


def isomorphisms(one: Topology, other: Topology, limit: int) -> Iterator[tuple[int, ...]]:
    """The ways to match the devices of two topologies so that their links are alike.

    Bandwidth, latency and `via_host` are compared, not what links share.

    Args:
      one: a topology.
      other: another one, perhaps the same.
      limit: stop after this many.

    Yields:
      `images`, where device `d` of `one` is like device `images[d]` of `other`; in ascending order.

    Example:
      >>> from tfcdo.topology import preset
      >>> list(isomorphisms(preset("dgx1"), preset("dgx1"), 10))[1]
      (2, 3, 0, 1, 6, 7, 4, 5)
    """
    if one.num_devices != other.num_devices:
        return
    kinds, other_kinds = one.link_kinds, other.link_kinds

    def extend(images: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        new = len(images)
        if new == one.num_devices:
            yield images
            return
        for image in range(one.num_devices):
            if image not in images and all(
                kinds[new, old] == other_kinds[image, images[old]]
                and kinds[old, new] == other_kinds[images[old], image]
                for old in range(new)
            ):
                yield from extend((*images, image))

    yield from itertools.islice(extend(()), limit)


class TopologyBuilder:
    """Collects resources by name and links by device, and numbers them."""

    def __init__(self) -> None:
        self._resources: dict[str, Resource] = {}
        self._links: list[tuple[int, int, Sequence[str], bool]] = []

    def link(
        self, source: int, target: int, way: Iterable[tuple[str, float]], *, via_host: bool = False
    ) -> None:
        """Adds a link.

        Args:
          source: the sending device.
          target: the receiving device.
          way: name and bandwidth of each resource that it holds, in the order of travel.
          via_host: see `Link`.

        Raises:
          ValueError: if another link has given one of these resources another bandwidth.
        """
        names = []
        for name, bandwidth in way:
            known = self._resources.setdefault(name, Resource(name, bandwidth))
            if known.bandwidth != bandwidth:
                raise ValueError(
                    f"bandwidth of {name!r} must be {known.bandwidth} B/s, as in an earlier link; "
                    f"got {bandwidth} for the link {link_name(source, target)}"
                )
            names.append(name)
        self._links.append((source, target, names, via_host))

    def build(
        self,
        name: str,
        num_devices: int,
        *,
        latency: float = LATENCY,
        addition_bandwidth: float = math.inf,
        serial_reduction: bool = False,
    ) -> Topology:
        """Makes the topology.

        Args:
          name: its name.
          num_devices: how many devices there are.
          latency: that of every link, in seconds.
          addition_bandwidth: see `Topology`.
          serial_reduction: see `Topology`.

        Returns:
          The topology of all links so far.

        Raises:
          ValueError: if these are not all links of so many devices.
        """
        index = {resource: position for position, resource in enumerate(self._resources)}
        return Topology(
            name,
            num_devices,
            tuple(self._resources.values()),
            tuple(
                Link(source, target, latency, tuple(index[name] for name in names), via_host)
                for source, target, names, via_host in sorted(self._links)
            ),
            addition_bandwidth,
            serial_reduction,
        )


def ordered_pairs(num_devices: int) -> Iterable[tuple[int, int]]:
    """All `(source, target)` of different devices.

    Args:
      num_devices: how many devices there are.

    Returns:
      The pairs, in ascending order.
    """
    return ((a, b) for a in range(num_devices) for b in range(num_devices) if a != b)


def link_name(source: int, target: int) -> str:
    """Returns how reports and drawings call the link from one device to another."""
    return f"{source}→{target}"
