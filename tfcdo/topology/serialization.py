"""Reads and writes the JSON document that describes a topology.

The document differs from a `Topology` in two points: links name their resources where a topology
numbers them, and a bandwidth without a limit is null, because JSON has no infinity.
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
    """Describes a `Topology`; an addition bandwidth of None has no limit."""

    name: str
    num_devices: int
    addition_bandwidth: float | None = None
    serial_reduction: bool = False
    resources: tuple[ResourceDocument, ...]
    links: tuple[LinkDocument, ...]


_OBJECTS: dict[str, type[msgspec.Struct]] = {
    "": TopologyDocument,
    "resources": ResourceDocument,
    "links": LinkDocument,
}
# Files from before these fields were renamed are read, too.
_FORMER_NAMES = {"detour": "via_host", "shared_adder": "serial_reduction"}


def encode(document: TopologyDocument) -> str:
    """Returns a document as a JSON text, with one resource or link a line.

    Args:
      document: the description of a topology.

    Returns:
      The text, which `decode` reads.
    """
    fields = msgspec.to_builtins(document)
    lines = ",\n".join(f'  "{name}": {_lay_out(value)}' for name, value in fields.items())
    return f"{{\n{lines}\n}}"


def decode(text: str) -> TopologyDocument:
    """Reads a JSON text that `encode` or a person has written.

    Args:
      text: the JSON text.

    Returns:
      A document whose fields have the right types, and whose links name resources that it has.
      Whether it describes a topology, the topology's constructor checks.

    Raises:
      ValueError: if the text is not JSON, or not of such a document.

    Example:
      >>> decode('{"name": "one", "num_devices": "1", "resources": [], "links": []}')
      Traceback (most recent call last):
      ValueError: not a topology: num_devices: expected `int`; got "1"
    """
    content = None
    try:
        content = json.loads(text, object_pairs_hook=_collect_fields)
        document = msgspec.convert(content, TopologyDocument)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON text: {error}") from error
    except RecursionError:
        raise ValueError("not a topology: lists or objects are nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"not a topology: {_explain(str(error), content)}") from None
    known = {resource.name for resource in document.resources}
    for position, link in enumerate(document.links):
        unknown = [name for name in link.resources if name not in known]
        if unknown:
            raise ValueError(
                f'not a topology: links[{position}].resources must hold names that "resources" of '
                f"the topology have; got {_abbreviate(unknown[0])}"
            )
    return document


def _lay_out(value: Any) -> str:
    """Returns a field's value as JSON; of a list, each entry is on a line of its own."""
    if not isinstance(value, (list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    # A person may want to read and change the entries.
    lines = ",".join(f"\n    {json.dumps(entry, ensure_ascii=False)}" for entry in value)
    return f"[{lines}\n  ]"


def _collect_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a JSON object by their present names."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        present = _FORMER_NAMES.get(name, name)
        if present in fields:
            raise ValueError(f"not a topology: {_abbreviate(present)} is given twice in one object")
        fields[present] = value
    return fields


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
        wanted += f" (fields: {', '.join(_OBJECTS[of_object[1] or ''].__struct_fields__)})"
    return f"{place}{wanted[0].lower()}{wanted[1:]}; got {_abbreviate(given)}"


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
