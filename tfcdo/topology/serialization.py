"""Reads and writes the JSON documents of topologies, and the formats of files that have one.

Links name their resources where a topology numbers them. A bandwidth without a limit is null,
because JSON has no infinity.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from tfcdo.topology.links import LATENCY


class ResourceDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Resource`; a bandwidth of None has no limit."""

    name: str
    bandwidth: float | None


class LinkDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Link`, whose resources are named."""

    source: int
    target: int
    latency: float = LATENCY
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


# The format of the files of topologies, plans and measurements that this version writes.
FORMAT = 2
# Fields of format 1, which files do not say: their names now; "" for those that nothing reads.
_FORMER = {
    "detour": "via_host",
    "shared_adder": "serial_reduction",
    "memory_bandwidth": "",
    "op_seconds": "",
    "allocation_bandwidth": "",
    "origin": "",
    "format": "",
}


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
        content = upgraded(json.loads(text))
        return msgspec.convert(content, TopologyDocument)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON text: {error}") from error
    except RecursionError:
        raise ValueError("not a topology: lists or objects are nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"not a topology: {_explain(str(error), content)}") from None


def upgraded(content: Any) -> Any:
    """Returns a file's content as one of this format has it; a newer one is a `ValueError`."""
    found = content.get("format", 1) if isinstance(content, dict) else FORMAT
    if not isinstance(found, int) or found == FORMAT:
        return content
    if not 0 < found < FORMAT:
        newer = "; a newer version of tfcdo has written it: update tfcdo" if found > 0 else ""
        raise ValueError(f"format must be from 1 to {FORMAT}; got {found}{newer}")
    return _renamed(content)


def _renamed(content: Any) -> Any:
    if isinstance(content, list):
        return [_renamed(each) for each in content]
    if not isinstance(content, dict):
        return content
    names = {name: _FORMER.get(name, name) for name in content}
    return {new: _renamed(content[name]) for name, new in names.items() if new}


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
