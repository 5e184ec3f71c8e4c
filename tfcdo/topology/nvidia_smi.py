"""Reads the links of a machine's GPUs in the table of `nvidia-smi topo -m`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tfcdo.topology.links import reached
from tfcdo.topology.routes import NVLINK_V100, Route, crossbar_routes, mesh_routes, pcie_routes

# Bandwidth of an NVLink each way, from V100 to H200; the table does not say which GPUs these are.
_NVLINK = NVLINK_V100
# No GPU has more NVLinks than this; where a row adds up to more, a switch hands them out.
_MAX_NVLINKS = 18
# Within a PCIe switch; within a socket; from socket to socket ("SOC" is what older drivers print).
_ONE_SWITCH = ("PIX", "PXB")
_ONE_SOCKET = (*_ONE_SWITCH, "PHB", "NODE")
_BETWEEN_SOCKETS = ("SYS", "SOC")
_KINDS = (*_ONE_SOCKET, *_BETWEEN_SOCKETS)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class _Table:
    """How each ordered pair of GPUs is joined, and the CPUs near each GPU ("" if unknown)."""

    kinds: Mapping[tuple[int, int], str]
    affinities: Sequence[str]

    @property
    def num_devices(self) -> int:
        return len(self.affinities)


def read_routes(text: str) -> tuple[int, list[Route]]:
    """Reads how the machine is wired that `nvidia-smi topo -m` shows.

    * `NV#`: # NVLinks of 25 GB/s. If all pairs have the same number, and more of them than a GPU
      has NVLinks, these are the ports of an NVSwitch.
    * On a machine with NVLinks, any other pair goes through the host, as on a DGX-1.
    * On a machine without, each GPU has a PCIe port; `PIX` and `PXB` pairs are under one switch;
      all others also hold their switches' paths up and down, and pairs on different
      sockets (`SYS`) the path from socket to socket.

    References:
      The legend that `nvidia-smi topo -m` prints below its table.

    Example:
      >>> num_devices, routes = read_routes('''
      ...         GPU0    GPU1    CPU Affinity    NUMA Affinity
      ... GPU0     X      NV4     0-15            0
      ... GPU1    NV4      X      0-15            0
      ... ''')
      >>> num_devices, routes[0].resources[0].bandwidth
      (2, 100000000000.0)
    """
    table = _read_table(text)
    nvlinks = {pair: int(kind[2:]) for pair, kind in table.kinds.items() if kind.startswith("NV")}
    if not nvlinks:
        return table.num_devices, _pcie_routes(table)
    if _is_switched(table, nvlinks):
        bandwidth = next(iter(nvlinks.values())) * _NVLINK
        return table.num_devices, crossbar_routes(table.num_devices, bandwidth)
    speeds = {pair: count * _NVLINK for pair, count in nvlinks.items()}
    return table.num_devices, mesh_routes(table.num_devices, speeds, _sockets(table))


def _is_switched(table: _Table, nvlinks: Mapping[tuple[int, int], int]) -> bool:
    """Returns whether an NVSwitch hands out the NVLinks of the table's pairs."""
    if len(nvlinks) < len(table.kinds) or len(set(nvlinks.values())) > 1:
        return False
    return next(iter(nvlinks.values())) * (table.num_devices - 1) > _MAX_NVLINKS


def _read_table(text: str) -> _Table:
    """Returns the entries of the table, each checked."""
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
    """Raises if a table has no such entry; `above` holds the entries of the rows above."""
    where = f"line {number}: row GPU{device}, column GPU{other}"
    if device == other:
        if kind != "X":
            raise ValueError(f"{where}: expected X; got {kind}")
    elif kind not in _KINDS and not re.fullmatch(r"NV[1-9]\d*", kind):
        raise ValueError(f"{where}: expected NV# or {', '.join(_KINDS)}; got {kind}")
    elif above.get((other, device), kind) != kind:
        raise ValueError(
            f"{where}: expected {above[other, device]}, as in row GPU{other}; got {kind}"
        )


def _components(table: _Table, kinds: Sequence[str]) -> list[int]:
    """Returns the number of each device's group, if pairs of some kinds are in one group."""
    joined = [pair for pair, kind in table.kinds.items() if kind in kinds]
    joined += [(other, one) for one, other in joined]
    firsts = [min(reached(joined, device)) for device in range(table.num_devices)]
    return [sorted(set(firsts)).index(first) for first in firsts]


def _sockets(table: _Table) -> list[int]:
    """Returns the socket of each device: the socket of its CPUs, if the table names them."""
    if all(affinity not in ("", "N/A") for affinity in table.affinities):
        known = list(dict.fromkeys(table.affinities))
        return [known.index(affinity) for affinity in table.affinities]
    return _components(table, _ONE_SOCKET)


def _pcie_routes(table: _Table) -> list[Route]:
    sockets = _sockets(table)
    between_sockets = {
        (source, target): (sockets[source], sockets[target])
        for (source, target), kind in table.kinds.items()
        if kind in _BETWEEN_SOCKETS
    }
    return pcie_routes(_components(table, _ONE_SWITCH), between_sockets)
