"""Reads the links of a machine's GPUs in the table of `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfcdo.topology import routes
from tfcdo.topology.links import reached

# No GPU has more NVLinks than this; where a row adds up to more, a switch hands them out.
_MAX_NVLINKS = 18
# Within a PCIe switch; within a socket; from socket to socket ("SOC" is what older drivers print).
_ONE_SWITCH = ("PIX", "PXB")
_ONE_SOCKET = (*_ONE_SWITCH, "PHB", "NODE")
_BETWEEN_SOCKETS = ("SYS", "SOC")
_KINDS = (*_ONE_SOCKET, *_BETWEEN_SOCKETS)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def read_routes(text: str) -> tuple[int, list[routes.Route]]:
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
        return num_devices, routes.pcie(_groups(num_devices, kinds, _ONE_SWITCH), between)
    speeds = {pair: count * routes.NVLINK_V100 for pair, count in nvlinks.items()}
    if len(set(kinds.values())) == 1 and nvlinks[0, 1] * (num_devices - 1) > _MAX_NVLINKS:
        return num_devices, routes.crossbar(num_devices, speeds[0, 1])
    return num_devices, routes.mesh(num_devices, speeds, sockets)


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
            expected = _expected(device, other, kind, kinds)
            if kind != expected:
                where = f"line {number}: row GPU{device}, column GPU{other}"
                raise ValueError(f"{where}: expected {expected}; got {kind}")
            if device != other:
                kinds[device, other] = kind
        affinities.append(" ".join(row[1 + num_columns : 2 + num_columns]))
    return kinds, affinities


def _expected(device: int, other: int, kind: str, above: Mapping[tuple[int, int], str]) -> str:
    """Returns an entry of the table if it is correct, and else a text that says what should be."""
    if device == other:
        return "X"
    if kind not in _KINDS and not re.fullmatch(r"NV[1-9]\d*", kind):
        return f"NV# or {', '.join(_KINDS)}"
    if above.get((other, device), kind) != kind:
        return f"{above[other, device]}, as in row GPU{other}"
    return kind
