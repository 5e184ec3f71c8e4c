"""Reads and writes the JSON document that describes a topology.

The document differs from a `Topology` in two points: links name their resources where a topology
numbers them, and a bandwidth without a limit is null, because JSON has no infinity.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tfcdo.topology.links import LATENCY, Link, Resource


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
    """Describes a `Topology`; a bandwidth of None has no limit."""

    name: str
    num_devices: int
    addition_bandwidth: float | None = None
    serial_reduction: bool = False
    memory_bandwidth: float | None = None
    op_seconds: float = 0.0
    allocation_bandwidth: float | None = None
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
    """Returns a document as a JSON text, with one resource or link a line."""
    content = msgspec.to_builtins(document)
    lines = ",\n".join(f'  "{name}": {_lay_out(value)}' for name, value in content.items())
    return f"{{\n{lines}\n}}"


def decode(text: str) -> TopologyDocument:
    """Reads a JSON text that `encode` or a person has written.

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
    return document


def describe(fields: Mapping[str, Any]) -> TopologyDocument:
    """Returns what describes a topology in JSON."""
    resources: Sequence[Resource] = fields["resources"]
    return TopologyDocument(
        name=fields["name"],
        num_devices=fields["num_devices"],
        addition_bandwidth=_none_if_unlimited(fields["addition_bandwidth"]),
        serial_reduction=fields["serial_reduction"],
        memory_bandwidth=_none_if_unlimited(fields["memory_bandwidth"]),
        op_seconds=fields["op_seconds"],
        allocation_bandwidth=_none_if_unlimited(fields["allocation_bandwidth"]),
        resources=tuple(
            ResourceDocument(name=one.name, bandwidth=_none_if_unlimited(one.bandwidth))
            for one in resources
        ),
        links=tuple(
            LinkDocument(
                source=link.source,
                target=link.target,
                latency=link.latency,
                resources=tuple(resources[index].name for index in link.resources),
                via_host=link.via_host,
            )
            for link in fields["links"]
        ),
    )


def fields(document: TopologyDocument) -> dict[str, Any]:
    """Returns the fields of the topology that a document describes."""
    numbers = {resource.name: number for number, resource in enumerate(document.resources)}
    for position, link in enumerate(document.links):
        unknown = [name for name in link.resources if name not in numbers]
        if unknown:
            raise ValueError(
                f'not a topology: links[{position}].resources must hold names that "resources" of '
                f"the topology have; got {_abbreviate(unknown[0])}"
            )
    return {
        "name": document.name,
        "num_devices": document.num_devices,
        "resources": tuple(
            Resource(one.name, _infinite_if_none(one.bandwidth)) for one in document.resources
        ),
        "links": tuple(
            Link(
                link.source,
                link.target,
                link.latency,
                tuple(numbers[name] for name in link.resources),
                link.via_host,
            )
            for link in document.links
        ),
        "addition_bandwidth": _infinite_if_none(document.addition_bandwidth),
        "serial_reduction": document.serial_reduction,
        "memory_bandwidth": _infinite_if_none(document.memory_bandwidth),
        "op_seconds": document.op_seconds,
        "allocation_bandwidth": _infinite_if_none(document.allocation_bandwidth),
    }


def _none_if_unlimited(bandwidth: float) -> float | None:
    return None if bandwidth == math.inf else bandwidth


def _infinite_if_none(bandwidth: float | None) -> float:
    return math.inf if bandwidth is None else bandwidth


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
