"""Reads a topology from a JSON text, as `Topology.to_json` writes it or a person does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfcdo.topology.topology import LATENCY
from tfcdo.topology.topology import Link
from tfcdo.topology.topology import Resource
from tfcdo.topology.topology import Topology


class _Kind(NamedTuple):
    """What a field may hold: in words, and the test."""

    accepted: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    # True is an int to Python, and an int may be too large for a float.
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_INT = _Kind("a whole number", lambda value: type(value) is int)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_NAMES = _Kind("a list of names", _is_names)
_SECONDS = _Kind("a number of seconds", _is_number)
_BANDWIDTH = _Kind(
    "a number of bytes per second, or null for no limit",
    lambda value: value is None or _is_number(value),
)

_TOPOLOGY = {
    "name": _TEXT,
    "num_devices": _INT,
    "addition_bandwidth": _BANDWIDTH,
    "serial_reduction": _FLAG,
    "resources": _LIST,
    "links": _LIST,
}
_RESOURCE = {"name": _TEXT, "bandwidth": _BANDWIDTH}
_LINK = {
    "source": _INT,
    "target": _INT,
    "latency": _SECONDS,
    "resources": _NAMES,
    "via_host": _FLAG,
}
# What may be left out, and what it is then.
_DEFAULTS = {
    "addition_bandwidth": None,
    "serial_reduction": False,
    "latency": LATENCY,
    "via_host": False,
}

# Files from before these fields were renamed are read, too.
_FORMER_NAMES = {"detour": "via_host", "shared_adder": "serial_reduction"}


def parse(text: str) -> Topology:
    """See `tfcdo.topology.topology.Topology.from_json`.

    Args:
      text: the JSON text.

    Returns:
      The topology.

    Raises:
      ValueError: if the text is no JSON, or not of such an object, or not of a topology.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON text: {error}") from error
    except RecursionError:
        raise ValueError("not a topology: lists or objects are nested too deeply") from None
    whole = _fields(content, "the topology", _TOPOLOGY)
    resources = []
    for position, entry in enumerate(whole["resources"]):
        own = _fields(entry, f"resources[{position}]", _RESOURCE)
        resources.append(Resource(own["name"], _bandwidth(own["bandwidth"])))
    index = {resource.name: position for position, resource in enumerate(resources)}
    links = []
    for position, entry in enumerate(whole["links"]):
        own = _fields(entry, f"links[{position}]", _LINK)
        for name in own["resources"]:
            if name not in index:
                raise ValueError(
                    f'not a topology: "resources" of links[{position}] must hold names that the '
                    f'topology\'s "resources" have; got {_brief(name)}'
                )
        held = tuple(index[name] for name in own["resources"])
        links.append(
            Link(own["source"], own["target"], float(own["latency"]), held, own["via_host"])
        )
    return Topology(
        whole["name"],
        whole["num_devices"],
        tuple(resources),
        tuple(links),
        _bandwidth(whole["addition_bandwidth"]),
        whole["serial_reduction"],
    )


def _fields(entry: Any, where: str, kinds: Mapping[str, _Kind]) -> dict[str, Any]:
    """The fields of a JSON object, of the right kinds and with those that were left out."""
    known = ", ".join(kinds)
    if not isinstance(entry, dict):
        raise ValueError(
            f"not a topology: {where} must be an object with {known}; got {_brief(entry)}"
        )
    entry = {_FORMER_NAMES.get(field, field): value for field, value in entry.items()}
    unknown = [field for field in entry if field not in kinds]
    if unknown:
        raise ValueError(
            f"not a topology: {where} must have no other fields than {known}; "
            f"got {_brief(unknown[0])}"
        )
    fields = _DEFAULTS | entry
    for field, kind in kinds.items():
        if field not in fields:
            raise ValueError(f'not a topology: "{field}" of {where} is missing')
        if not kind.holds(fields[field]):
            raise ValueError(
                f'not a topology: "{field}" of {where} must be {kind.accepted}; '
                f"got {_brief(fields[field])}"
            )
    return fields


def _bandwidth(value: float | None) -> float:
    return float("inf") if value is None else float(value)


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
