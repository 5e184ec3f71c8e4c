"""Reads the table of `nvidia-smi topo -m`: what joins the GPUs of a machine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import networkx as nx

from tfcdo.topology.presets import HOST
from tfcdo.topology.presets import NVLINK_V100
from tfcdo.topology.presets import PCIE
from tfcdo.topology.presets import crossbar
from tfcdo.topology.presets import nvlinks_and_host
from tfcdo.topology.topology import Topology
from tfcdo.topology.topology import TopologyBuilder
from tfcdo.topology.topology import ordered_pairs

# What an NVLink carries each way from V100 to H200; the table does not say which GPUs these are.
_NVLINK = NVLINK_V100
# No GPU has more NVLinks than this; where a row adds up to more, a switch hands them out.
_MAX_NVLINKS = 18
# Within a PCIe switch; within a socket; from socket to socket ("SOC" is what older drivers print).
_ONE_SWITCH = ("PIX", "PXB")
_ONE_SOCKET = (*_ONE_SWITCH, "PHB", "NODE")
_KINDS = (*_ONE_SOCKET, "SYS", "SOC")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class _Table:
    """The part of the table that is about GPUs.

    Attributes:
      kinds: how each ordered pair of GPUs is joined.
      affinities: the CPUs near each GPU, as the table has them; empty if it has none.
    """

    kinds: Mapping[tuple[int, int], str]
    affinities: Sequence[str]

    @property
    def num_devices(self) -> int:
        return len(self.affinities)


def parse(text: str) -> Topology:
    """The topology that `nvidia-smi topo -m` shows.

    * `NV#`: # NVLinks of 25 GB/s. If all pairs have the same number, and more of them than a GPU
      has NVLinks, these are the ports of an NVSwitch.
    * On a machine with NVLinks, any other pair goes through the host, as on a DGX-1.
    * On a machine without, each GPU has a PCIe port; `PIX` and `PXB` pairs are under one switch;
      all others also hold their switches' ways up and down, and those of different sockets (`SYS`)
      the way from socket to socket.

    Args:
      text: what the command printed.

    Returns:
      A topology over the GPUs of the table, in its order.

    Raises:
      ValueError: if the text holds no such table, or one that cannot be read.

    References:
      The legend that `nvidia-smi topo -m` prints below its table.

    Example:
      >>> parse('''
      ...         GPU0    GPU1    CPU Affinity    NUMA Affinity
      ... GPU0     X      NV4     0-15            0
      ... GPU1    NV4      X      0-15            0
      ... ''').bandwidth(0, 1)
      100000000000.0
    """
    table = _read(text)
    nvlinks = {pair: int(kind[2:]) for pair, kind in table.kinds.items() if kind.startswith("NV")}
    if not nvlinks:
        return _pcie(table)
    counts = set(nvlinks.values())
    if (
        len(nvlinks) == len(table.kinds)
        and len(counts) == 1
        and max(counts) * (table.num_devices - 1) > _MAX_NVLINKS
        and table.num_devices > 2
    ):
        return crossbar("nvidia-smi", table.num_devices, max(counts) * _NVLINK)
    return nvlinks_and_host(
        "nvidia-smi",
        table.num_devices,
        {pair: count * _NVLINK for pair, count in nvlinks.items()},
        _sockets(table),
    )


def _read(text: str) -> _Table:
    lines = [
        (number, line.split())
        for number, line in enumerate(_COLOURS.sub("", text.lstrip("\ufeff")).splitlines(), 1)
        if "".join(line.split()[:1]).startswith("GPU")
    ]
    head = next((words for _, words in lines if words[0] == "GPU0" and "X" not in words), None)
    if head is None:
        raise ValueError(
            "no table of `nvidia-smi topo -m`: no line that begins with GPU0 and names the columns"
        )
    num_devices = sum(bool(re.fullmatch(r"GPU\d+", name)) for name in head)
    # GPUs come first, then network cards, then affinities.
    num_columns = head.index("CPU") if "CPU" in head else len(head)
    kinds: dict[tuple[int, int], str] = {}
    affinities = []
    for device in range(num_devices):
        number, row = next(
            ((at, words) for at, words in lines if words[0] == f"GPU{device}" and words != head),
            (0, None),
        )
        if row is None:
            raise ValueError(f"the table of `nvidia-smi topo -m` has no row GPU{device}")
        if len(row) <= num_devices:
            raise ValueError(
                f"line {number}: row GPU{device} has {len(row) - 1} entries for {num_devices} GPUs"
            )
        for other, kind in enumerate(row[1 : 1 + num_devices]):
            _check_kind(number, device, other, kind, kinds)
            kinds[device, other] = kind
        affinities.append(" ".join(row[1 + num_columns : 2 + num_columns]))
    joined = {pair: kind for pair, kind in kinds.items() if kind != "X"}
    return _Table(joined, affinities)


def _check_kind(
    number: int, device: int, other: int, kind: str, above: Mapping[tuple[int, int], str]
) -> None:
    """Refuses an entry of the table that cannot be there; `above` are those of the rows above."""
    where = f"line {number}: row GPU{device}, column GPU{other}"
    if device == other:
        if kind != "X":
            raise ValueError(
                f"line {number}: row GPU{device}: expected X at column GPU{other}; got {kind}"
            )
    elif kind not in _KINDS and not re.fullmatch(r"NV[1-9]\d*", kind):
        raise ValueError(f"{where}: {kind!r} is none of NV#, {', '.join(_KINDS)}")
    elif above.get((other, device), kind) != kind:
        raise ValueError(
            f"{where}: expected {above[other, device]}, as in row GPU{other}; got {kind}"
        )


def _components(table: _Table, kinds: Sequence[str]) -> list[int]:
    """Groups the devices that connections of some kinds join, and numbers the groups."""
    graph = nx.Graph()
    graph.add_nodes_from(range(table.num_devices))
    graph.add_edges_from(pair for pair, kind in table.kinds.items() if kind in kinds)
    groups = sorted(nx.connected_components(graph), key=min)
    return [
        next(index for index, group in enumerate(groups) if device in group)
        for device in range(table.num_devices)
    ]


def _sockets(table: _Table) -> list[int]:
    """The socket of each device: that of its CPUs, if the table says which these are."""
    if all(affinity not in ("", "N/A") for affinity in table.affinities):
        known = list(dict.fromkeys(table.affinities))
        return [known.index(affinity) for affinity in table.affinities]
    return _components(table, _ONE_SOCKET)


def _pcie(table: _Table) -> Topology:
    builder = TopologyBuilder()
    switches, sockets = _components(table, _ONE_SWITCH), _sockets(table)
    for source, target in ordered_pairs(table.num_devices):
        way = [(f"{source} out", PCIE)]
        if switches[source] != switches[target]:
            way.append((f"switch {switches[source]} up", HOST))
            if table.kinds[source, target] in ("SYS", "SOC"):
                name = f"socket {sockets[source]}→{sockets[target]}"
                way.append((name, HOST))
            way.append((f"switch {switches[target]} down", HOST))
        builder.link(source, target, [*way, (f"{target} in", PCIE)])
    return builder.build("nvidia-smi", table.num_devices)
