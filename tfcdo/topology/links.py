"""Defines resources, links, and wirings: those that machines share, and nvidia-smi's table."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tfcdo import checks

# Seconds of each copy by default: about an op launch and a peer-to-peer copy of a few bytes.
LATENCY = 10e-6
# Bytes per second, each way: one NVLink of a V100 (and of its successors up to the H200), a path
# through the host, a device's PCIe port.
NVLINK_V100 = 25e9
HOST = 10e9
PCIE = 12e9
# No GPU has more NVLinks than this; where a row adds up to more, a switch hands them out.
_MAX_NVLINKS = 18
# Within a PCIe switch; within a socket; from socket to socket ("SOC" is what older drivers print).
_ONE_SWITCH = ("PIX", "PXB")
_ONE_SOCKET = (*_ONE_SWITCH, "PHB", "NODE")
_BETWEEN_SOCKETS = ("SYS", "SOC")
_KINDS = (*_ONE_SOCKET, *_BETWEEN_SOCKETS)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Resource:
    """Carries one transfer at a time: a wire, a switch port or a host bridge.

    Attributes:
      name: how reports and drawings call it.
      bandwidth: bytes per second; `math.inf` if it is never the slowest part.

    Raises:
      ValueError: if `bandwidth` is not above 0.
      TypeError: if `bandwidth` is not a number.
    """

    name: str
    bandwidth: float

    def __post_init__(self) -> None:
        bandwidth = checks.check_number(f"bandwidth of {self.name!r}", self.bandwidth)
        object.__setattr__(self, "bandwidth", bandwidth)
        if not bandwidth > 0:
            raise ValueError(f"bandwidth of {self.name!r} must be above 0 B/s; got {bandwidth}")


def reached(pairs: Sequence[tuple[int, int]], start: int) -> set[int]:
    """Returns the devices that some directed links reach from one device."""
    found = {start}
    while new := {target for source, target in pairs if source in found} - found:
        found |= new
    return found


@dataclasses.dataclass(frozen=True)
class Link:
    """Leads from one device of a topology to another.

    Attributes:
      source: the sending device.
      target: the receiving device.
      latency: seconds that a transfer takes on top of its bytes.
      resources: indices of the topology's resources on the path, in order; a transfer
        holds all of them for its whole time, at the speed of the slowest.
      via_host: whether the path through the host stands in for a missing direct one. The bandwidth
        bound ignores such links if the others join all devices.
    """

    source: int
    target: int
    latency: float
    resources: tuple[int, ...]
    via_host: bool = False


def link_name(source: int, target: int) -> str:
    """Returns the name of the link from one device to another in reports and drawings."""
    return f"{source}→{target}"


def ordered_pairs(num_devices: int) -> Iterator[tuple[int, int]]:
    """Yields each `(source, target)` of two different devices."""
    # Not `itertools.permutations`, which lists all devices first: a file may name very many.
    devices = range(num_devices)
    return ((source, target) for source in devices for target in devices if source != target)


def check_links(links: Sequence[Link], resources: Sequence[Resource], num_devices: int) -> None:
    """Raises unless links join each ordered pair of devices once, by resources that exist."""
    known = set(range(len(resources)))
    for link in links:
        where = f"of the link {link_name(link.source, link.target)}"
        checks.check_number(f"latency {where}", link.latency)
        if not 0 <= link.latency < math.inf:
            raise ValueError(
                f"latency {where} must be a number of seconds, at least 0; got {link.latency}"
            )
        held = link.resources
        if not isinstance(held, tuple) or not held or not known.issuperset(held):
            raise ValueError(
                f"resources {where} must be a tuple of at least one of the indices from 0 to "
                f"{len(resources) - 1}; got {held!r}"
            )
        if len(set(held)) != len(held):
            raise ValueError(f"resources {where} must be different; got {held}")
    devices = range(num_devices)
    given = collections.Counter((link.source, link.target) for link in links)
    too_many = [
        (a, b)
        for (a, b), count in given.items()
        if count > 1 or a == b or a not in devices or b not in devices
    ]
    wanted = num_devices * (num_devices - 1)
    if too_many or len(links) != wanted:
        missing = (pair for pair in ordered_pairs(num_devices) if pair not in given)
        some = list(itertools.islice(itertools.chain(too_many, missing), 5))
        raise ValueError(
            f"links must hold each ordered pair of the {num_devices} devices once, {wanted} links; "
            f"got {len(links)}; missing or too many (at most 5 shown): {some}"
        )


class Route(NamedTuple):
    """Describes the link from one device to another before the topology numbers its resources.

    Attributes:
      source: the sending device.
      target: the receiving device.
      resources: the resources that a transfer holds, in their order; resources of one name are one.
      via_host: whether the path through the host stands in for a missing direct one.
      latency: seconds that a transfer takes on top of its bytes.
    """

    source: int
    target: int
    resources: Sequence[Resource]
    via_host: bool = False
    latency: float = LATENCY


def wires(num_devices: int, bandwidth: float, latency: float = LATENCY) -> list[Route]:
    """Returns the routes of devices every two of which have a wire each way."""
    return [
        Route(a, b, [Resource(link_name(a, b), bandwidth)], latency=latency)
        for a, b in ordered_pairs(num_devices)
    ]


def mesh(
    num_devices: int, nvlinks: Mapping[tuple[int, int], float], sockets: Sequence[int]
) -> list[Route]:
    """Returns the routes of point-to-point links; other pairs meet in the host."""
    routes = []
    for a, b in ordered_pairs(num_devices):
        if bandwidth := nvlinks.get((min(a, b), max(a, b))):
            routes.append(Route(a, b, [Resource(link_name(a, b), bandwidth)]))
        else:
            host = Resource(f"host {link_name(sockets[a], sockets[b])}", HOST)
            routes.append(Route(a, b, [host], via_host=True))
    return routes


def crossbar(num_devices: int, bandwidth: float) -> list[Route]:
    """Returns the routes of devices that meet in a switch, which is never the slowest part."""
    return [
        Route(a, b, [Resource(f"{a} out", bandwidth), Resource(f"{b} in", bandwidth)])
        for a, b in ordered_pairs(num_devices)
    ]


def pcie(
    switches: Sequence[int], sockets: Mapping[tuple[int, int], tuple[int, int]]
) -> list[Route]:
    """Returns the routes of devices that meet in PCIe switches, which the host joins."""
    routes = []
    for a, b in ordered_pairs(len(switches)):
        path = [Resource(f"{a} out", PCIE), Resource(f"{b} in", PCIE)]
        if switches[a] != switches[b]:
            names = [f"switch {switches[a]} up", f"switch {switches[b]} down"]
            if (a, b) in sockets:
                names.insert(1, f"socket {link_name(*sockets[a, b])}")
            path[1:1] = [Resource(name, HOST) for name in names]
        routes.append(Route(a, b, path))
    return routes


def read_routes(text: str) -> tuple[int, list[Route]]:
    """Reads the number of GPUs in the table of `nvidia-smi topo -m`, and how they are wired.

    On a machine with NVLinks (25 GB/s each, from V100 to H200: the table does not name the GPUs),
    any other pair goes through the host, as on a DGX-1. On a machine without, each GPU has a PCIe
    port; pairs of two switches also hold the paths up and down, and of two sockets the one between.
    """
    kinds, affinities = _read_table(text)
    num_devices = len(affinities)
    nvlinks = {pair: int(kind[2:]) for pair, kind in kinds.items() if kind.startswith("NV")}
    sockets = _groups(num_devices, kinds, _ONE_SOCKET)
    if all(affinity not in ("", "N/A") for affinity in affinities):
        known = list(dict.fromkeys(affinities))
        sockets = [known.index(affinity) for affinity in affinities]
    if not nvlinks:
        between = {
            (a, b): (sockets[a], sockets[b]) for a, b in kinds if kinds[a, b] in _BETWEEN_SOCKETS
        }
        return num_devices, pcie(_groups(num_devices, kinds, _ONE_SWITCH), between)
    speeds = {pair: count * NVLINK_V100 for pair, count in nvlinks.items()}
    if len(set(kinds.values())) == 1 and nvlinks[0, 1] * (num_devices - 1) > _MAX_NVLINKS:
        return num_devices, crossbar(num_devices, speeds[0, 1])
    return num_devices, mesh(num_devices, speeds, sockets)


def _groups(
    num_devices: int, kinds: Mapping[tuple[int, int], str], joining: Sequence[str]
) -> list[int]:
    """Returns the number of each device's group, if pairs of some kinds are in one group."""
    joined = [pair for pair, kind in kinds.items() if kind in joining]
    firsts = [min(reached(joined, device)) for device in range(num_devices)]
    return [sorted(set(firsts)).index(first) for first in firsts]


def _read_table(text: str) -> tuple[dict[tuple[int, int], str], list[str]]:
    """Returns how each two GPUs are joined, and the CPUs near each GPU, "" if it names none."""
    lines = enumerate(_COLOURS.sub("", text.lstrip("\ufeff")).splitlines(), 1)
    rows = [(number, line.split()) for number, line in lines if line.lstrip().startswith("GPU")]
    head = next((words for _, words in rows if words[0] == "GPU0" and "X" not in words), None)
    if head is None:
        raise ValueError(
            "no table of `nvidia-smi topo -m`: no line that begins with GPU0 and names the columns"
        )
    row_of = {words[0]: (number, words) for number, words in reversed(rows) if words != head}
    num_devices = sum(bool(re.fullmatch(r"GPU\d+", name)) for name in head)
    # GPUs come first, then network cards, then affinities.
    num_columns = head.index("CPU") if "CPU" in head else len(head)
    kinds: dict[tuple[int, int], str] = {}
    affinities = []
    for device in range(num_devices):
        if f"GPU{device}" not in row_of:
            raise ValueError(f"the table of `nvidia-smi topo -m` has no row GPU{device}")
        number, row = row_of[f"GPU{device}"]
        if len(row) <= num_devices:
            raise ValueError(
                f"line {number}: row GPU{device} has {len(row) - 1} entries for {num_devices} GPUs"
            )
        for other, kind in enumerate(row[1 : 1 + num_devices]):
            expected = kind
            if device == other:
                expected = "X"
            elif kind not in _KINDS and not re.fullmatch(r"NV[1-9]\d*", kind):
                expected = f"NV# or {', '.join(_KINDS)}"
            elif kinds.get((other, device), kind) != kind:
                expected = f"{kinds[other, device]}, as in row GPU{other}"
            if kind != expected:
                where = f"line {number}: row GPU{device}, column GPU{other}"
                raise ValueError(f"{where}: expected {expected}; got {kind}")
            if device != other:
                kinds[device, other] = kind
        affinities.append(" ".join(row[1 + num_columns : 2 + num_columns]))
    return kinds, affinities
