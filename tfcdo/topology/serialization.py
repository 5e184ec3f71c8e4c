"""Reads and writes topologies as texts: JSON documents, and the table of `nvidia-smi topo -m`.

In JSON, links name their resources where a topology numbers them. A bandwidth without a limit is
null, because JSON has no infinity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tfcdo.topology import links

# The format of the files of topologies, plans and measurements that this version writes.
FORMAT = 2

# No GPU has more NVLinks than this; where a row adds up to more, a switch hands them out.
_MAX_NVLINKS = 18
# Within a PCIe switch; within a socket; from socket to socket ("SOC" is what older drivers print).
_ONE_SWITCH = ("PIX", "PXB")
_ONE_SOCKET = (*_ONE_SWITCH, "PHB", "NODE")
_BETWEEN_SOCKETS = ("SYS", "SOC")
_KINDS = (*_ONE_SOCKET, *_BETWEEN_SOCKETS)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class ResourceDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Resource`; a bandwidth of None has no limit."""

    name: str
    bandwidth: float | None


class LinkDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Link`, whose resources are named."""

    source: int
    target: int
    latency: float = links.LATENCY
    resources: tuple[str, ...]
    via_host: bool = False


class TopologyDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Topology`; one in another document has no format of its own."""

    format: int | msgspec.UnsetType = msgspec.UNSET
    name: str
    num_devices: int
    addition_bandwidth: float | None = None
    serial_reduction: bool = False
    resources: tuple[ResourceDocument, ...]
    links: tuple[LinkDocument, ...]


_FIELDS: dict[str, type[msgspec.Struct]] = {
    "": TopologyDocument,
    "resources": ResourceDocument,
    "links": LinkDocument,
}


def encode(document: Any) -> str:
    """Returns a document as a JSON text, with each entry of a list on a line, for people."""
    lines = []
    for name, value in msgspec.to_builtins(document).items():
        text = _on_one_line(value)
        if isinstance(value, (list, tuple)):
            text = "[" + ",".join(f"\n    {_on_one_line(entry)}" for entry in value) + "\n  ]"
        lines.append(f'  "{name}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}"


def _on_one_line(value: Any) -> str:
    """Returns a value as JSON; infinity is null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def decode(text: str) -> TopologyDocument:
    """Reads a JSON text that `encode` or a person has written; raises `ValueError` for others."""
    content = None
    try:
        content = of_this_format(json.loads(text))
        return msgspec.convert(content, TopologyDocument)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON text: {error}") from error
    except RecursionError:
        raise ValueError("not a topology: lists or objects are nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"not a topology: {_explain(str(error), content)}") from None


def of_this_format(content: Any) -> Any:
    """Returns a file's content; one that another version of tfcdo has written is a `ValueError`."""
    found = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
    if isinstance(found, int) and found != FORMAT:
        raise ValueError(f"format must be {FORMAT}; got {found}, of another version of tfcdo")
    return content


def _explain(message: str, content: Any) -> str:
    """Returns msgspec's message with the place in front and what was given there at the end."""
    wanted, _, path = message.partition(" - at `$")
    path = path.strip(".`")
    given = content
    for step in re.findall(r"\w+", path):
        given = given[int(step) if step.isdigit() else step]
    place = f"{path}: " if path else ""
    wanted = re.sub(", got `.*", "", wanted)
    of_object = re.fullmatch(r"(?:(\w+)\[\d+\])?", path)
    if of_object:
        wanted += f" (fields: {', '.join(_FIELDS[of_object[1] or ''].__struct_fields__)})"
    return f"{place}{wanted[0].lower()}{wanted[1:]}; got {abbreviate(given)}"


def abbreviate(value: Any) -> str:
    """Returns a value as JSON, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_routes(text: str) -> tuple[int, list[links.Route]]:
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
        return num_devices, links.pcie(_groups(num_devices, kinds, _ONE_SWITCH), between)
    speeds = {pair: count * links.NVLINK_V100 for pair, count in nvlinks.items()}
    if len(set(kinds.values())) == 1 and nvlinks[0, 1] * (num_devices - 1) > _MAX_NVLINKS:
        return num_devices, links.crossbar(num_devices, speeds[0, 1])
    return num_devices, links.mesh(num_devices, speeds, sockets)


def _groups(
    num_devices: int, kinds: Mapping[tuple[int, int], str], joining: Sequence[str]
) -> list[int]:
    """Returns the number of each device's group, if pairs of some kinds are in one group."""
    joined = [pair for pair, kind in kinds.items() if kind in joining]
    firsts = [min(links.reached(joined, device)) for device in range(num_devices)]
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
