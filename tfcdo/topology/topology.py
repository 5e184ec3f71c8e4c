"""Defines topologies: devices, the links between them, and the resources that links share."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tfcdo import checks
from tfcdo.topology.links import (
    LATENCY,
    Link,
    Resource,
    Route,
    check_links,
    link_name,
    ordered_pairs,
    reached,
    read_routes,
)

# The format of the files of topologies, plans and measurements that this version writes.
FORMAT = 2
# The names of measured topologies begin with this.
MEASURED = "measured "


class ResourceDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a `Resource`; a bandwidth of None has no limit, because JSON has no infinity."""

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


_DOCUMENTS = {"": TopologyDocument, "resources": ResourceDocument, "links": LinkDocument}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Describes the devices of a machine and the directed links between every two of them.

    A topology is a plain, hashable value: two that compare equal cost the same, so it serves as
    the key of a cache.

    Attributes:
      name: how reports call it.
      num_devices: how many devices there are.
      resources: the resources that the links hold.
      links: one link for each ordered pair of devices.
      addition_bandwidth: bytes of one operand that a device adds per second; `math.inf` if
        additions cost nothing next to the copies.
      serial_reduction: whether all devices add with the same cores and memory, so one at a time.

    Raises:
      ValueError: if a pair of devices has no link or several, or a link names a device or a
        resource that does not exist, or a resource twice, or a number is out of range.
      TypeError: if an attribute is of another type.

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
        checks.check_type("name", self.name, str)
        checks.check_int("num_devices", self.num_devices, at_least=1)
        for field, kind in (("resources", Resource), ("links", Link)):
            # A list is none of a key's parts.
            items = checks.check_items(field, getattr(self, field), kind)
            object.__setattr__(self, field, items)
        additions = checks.check_number("addition_bandwidth", self.addition_bandwidth)
        object.__setattr__(self, "addition_bandwidth", additions)
        checks.check_bool("serial_reduction", self.serial_reduction)
        if not self.addition_bandwidth > 0:
            raise ValueError(f"addition_bandwidth must be above 0; got {self.addition_bandwidth}")
        for name, count in collections.Counter(one.name for one in self.resources).items():
            if count > 1:
                raise ValueError(f"resources must have different names; {name!r} is duplicated")
        check_links(self.links, self.resources, self.num_devices)
        # Python's own numbers, as in files: the fingerprints of 1, 1.0 and numpy's differ.
        links = (
            Link(int(a), int(b), float(latency), tuple(map(int, held)), bool(via_host))
            for a, b, latency, held, via_host in (vars(link).values() for link in self.links)
        )
        object.__setattr__(self, "links", tuple(links))

    @classmethod
    def from_routes(
        cls, name: str, num_devices: int, routes: Iterable[Route], **costs: Any
    ) -> Topology:
        """Makes a topology of one route for each ordered pair of devices.

        Resources of the same name are one resource.

        Args:
          name: the topology's name.
          num_devices: how many devices there are.
          routes: one for each ordered pair of devices.
          **costs: `addition_bandwidth` and `serial_reduction`, see `Topology`.

        Returns:
          The topology.

        Raises:
          ValueError: if two routes give one resource different bandwidths, or the routes do
            not form a topology.
          TypeError: if `routes` holds something else than routes, or as `Topology`.

        Example:
          >>> bus = Resource("bus", 12e9)
          >>> Topology.from_routes("two", 2, [Route(0, 1, [bus]), Route(1, 0, [bus])]).resources
          (Resource(name='bus', bandwidth=12000000000.0),)
        """
        routes = sorted(
            checks.check_items("routes", routes, Route),
            key=lambda route: (route.source, route.target),
        )
        resources: dict[str, Resource] = {}
        for route in routes:
            where = f"the link {link_name(route.source, route.target)}"
            for resource in checks.check_items(f"resources of {where}", route.resources, Resource):
                known = resources.setdefault(resource.name, resource)
                if resource != known:
                    raise ValueError(
                        f"bandwidth of {known.name!r} must be {known.bandwidth} B/s, as in another "
                        f"route; got {resource.bandwidth} for {where}"
                    )
        numbers = {name: number for number, name in enumerate(resources)}
        links = [
            Link(a, b, latency, tuple(numbers[resource.name] for resource in held), via_host)
            for a, b, held, via_host, latency in routes
        ]
        return cls(name, num_devices, tuple(resources.values()), tuple(links), **costs)

    def __hash__(self) -> int:
        # An all-reduce looks its topology up: the links are hashed only once.
        return hash(self.fingerprint)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a short text that is the same for topologies that differ in names alone."""
        links = [tuple(vars(link).values()) for link in self.links]
        bandwidths = [resource.bandwidth for resource in self.resources]
        costs = self.addition_bandwidth, self.serial_reduction
        content = (self.num_devices, *costs, bandwidths, links)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    @property
    def is_measured(self) -> bool:
        """Returns whether `tfcdo.topology.measure` has found this topology."""
        return self.name.startswith(MEASURED)

    @functools.cached_property
    def link_by_pair(self) -> Mapping[tuple[int, int], Link]:
        """Returns the link of each ordered pair of devices."""
        return {(link.source, link.target): link for link in self.links}

    def link(self, source: int, target: int) -> Link:
        """Returns the link of a pair of devices; a `ValueError` if there is none."""
        try:
            return self.link_by_pair[source, target]
        except (KeyError, TypeError):
            raise ValueError(
                f"source and target must be different devices of {self.name!r}, which has 0 to "
                f"{self.num_devices - 1}; got {source!r} and {target!r}"
            ) from None

    def bandwidth(self, source: int, target: int) -> float:
        """Returns the bytes per second of a transfer that shares its path with no other."""
        link = self.link(source, target)
        return min(self.resources[index].bandwidth for index in link.resources)

    def latency(self, source: int, target: int) -> float:
        """Returns the seconds that a transfer takes on top of its bytes."""
        return self.link(source, target).latency

    def route(self, source: int, target: int) -> Route:
        """Returns the route that `from_routes` would make the link of a pair of devices of."""
        link = self.link(source, target)
        resources = tuple(self.resources[index] for index in link.resources)
        return Route(source, target, resources, link.via_host, link.latency)

    @functools.cached_property
    def direct_links(self) -> tuple[Link, ...]:
        """Returns the links not via the host, or all links if those do not reach every device."""
        direct = tuple(link for link in self.links if not link.via_host)
        down = [(link.source, link.target) for link in direct]
        up = [(target, source) for source, target in down]
        joins_all = all(len(reached(pairs, 0)) == self.num_devices for pairs in (down, up))
        return direct if joins_all else self.links

    def subset(self, devices: Sequence[int]) -> Topology:
        """Returns the part of the machine that some of its devices see.

        Args:
          devices: the devices to keep; the i-th of them becomes device i.

        Returns:
          A topology over `len(devices)` devices.

        Raises:
          ValueError: if `devices` is empty, names a device twice or one that does not exist.
          TypeError: if `devices` is not a list of ints.

        Example:
          >>> from tfcdo.topology import preset
          >>> preset("dgx1").subset([0, 4, 5]).bandwidth(0, 1)
          50000000000.0
        """
        devices = checks.check_items("devices", devices, int)
        known = range(self.num_devices)
        if not devices or len(set(devices)) != len(devices) or not set(devices) <= set(known):
            raise ValueError(
                f"devices must be different devices of {self.name!r}, which has 0 to "
                f"{self.num_devices - 1}; got {list(devices)}"
            )
        if devices == tuple(known):
            return self
        routes = [
            self.route(devices[source], devices[target])._replace(source=source, target=target)
            for source, target in ordered_pairs(len(devices))
        ]
        name = f"{self.name}{{{','.join(map(str, devices))}}}"
        costs = {one: getattr(self, one) for one in ("addition_bandwidth", "serial_reduction")}
        return Topology.from_routes(name, len(devices), routes, **costs)

    def to_json(self) -> str:
        """Returns this topology as a JSON text, which `from_json` reads.

        A bandwidth of null has no limit, and links name their resources.

        Example:
          >>> from tfcdo.topology import preset
          >>> print(preset("shared_memory", 2).to_json())
          {
            "format": 2,
            "name": "shared_memory",
            "num_devices": 2,
            "addition_bandwidth": 10000000000.0,
            "serial_reduction": true,
            "resources": [
              {"name": "0→1", "bandwidth": null},
              {"name": "1→0", "bandwidth": null}
            ],
            "links": [
              {"source": 0, "target": 1, "latency": 0.0, "resources": ["0→1"], "via_host": false},
              {"source": 1, "target": 0, "latency": 0.0, "resources": ["1→0"], "via_host": false}
            ]
          }
        """
        return encode(msgspec.structs.replace(self.to_document(), format=FORMAT))

    def to_document(self) -> TopologyDocument:
        """Returns the document that describes this topology in JSON."""
        fields = dataclasses.asdict(self)
        for link in fields["links"]:
            link["resources"] = [self.resources[index].name for index in link["resources"]]
        return msgspec.convert(fields, TopologyDocument)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Reads a JSON text that `to_json` or a person has written.

        Args:
          text: a JSON object with "name", "num_devices", "resources" and "links", perhaps
            "addition_bandwidth", "serial_reduction" and "format", and nothing else; a link may
            leave out "latency" and "via_host". A bandwidth of null has no limit.

        Returns:
          The topology.

        Raises:
          ValueError: if the text is not JSON, or not of such an object, or not of a topology, or if
            another version has written it.
          TypeError: if `text` is not a text, such as the path of a file.

        Example:
          >>> from tfcdo.topology import preset
          >>> pcie = preset("pcie")
          >>> Topology.from_json(pcie.to_json()) == pcie
          True
        """
        try:
            content = of_this_format(json.loads(text))
            document = msgspec.convert(content, TopologyDocument)
        except TypeError:
            raise TypeError(f"text must be a JSON text, not a file; got {text!r}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not a JSON text: {error}; got {abbreviate(str(text))}") from error
        except RecursionError:
            raise ValueError("not a topology: lists or objects are nested too deeply") from None
        except msgspec.ValidationError as error:
            raise ValueError(f"not a topology: {_explain(str(error), content)}") from None
        return cls.from_document(document)

    @classmethod
    def from_document(cls, document: TopologyDocument) -> Topology:
        """Returns the topology that a document describes."""
        resources = [Resource(one.name, _unlimited(one.bandwidth)) for one in document.resources]
        numbers = {resource.name: number for number, resource in enumerate(resources)}
        links = []
        for position, link in enumerate(document.links):
            unknown = [name for name in link.resources if name not in numbers]
            if unknown:
                raise ValueError(
                    f"not a topology: links[{position}].resources must hold names that "
                    f'"resources" of the topology have; got {abbreviate(unknown[0])}'
                )
            held = tuple(numbers[name] for name in link.resources)
            links.append(Link(link.source, link.target, link.latency, held, link.via_host))
        costs = _unlimited(document.addition_bandwidth), document.serial_reduction
        return cls(document.name, document.num_devices, tuple(resources), tuple(links), *costs)

    @classmethod
    def from_nvidia_smi(cls, text: str) -> Topology:
        """Reads the table of `nvidia-smi topo -m`; see `tfcdo.topology.links.read_routes`.

        Args:
          text: the output of the command.

        Returns:
          A topology over the GPUs of the table, in its order.

        Raises:
          ValueError: if the text holds no such table.
          TypeError: if `text` is not a text.
        """
        checks.check_type("text", text, str, "`nvidia-smi topo -m`")
        num_devices, routes = read_routes(text)
        return cls.from_routes("nvidia-smi", num_devices, routes)


def check_topology(value: Any) -> None:
    """Raises a TypeError unless the argument `topology` is one."""
    checks.check_type("topology", value, Topology, "tfcdo.topology.preset")


def _unlimited(bandwidth: float | None) -> float:
    return math.inf if bandwidth is None else bandwidth


def encode(document: Any) -> str:
    """Returns a document as a JSON text, with each entry of a list on a line, for people."""
    lines = []
    for name, value in msgspec.to_builtins(document).items():
        is_list = isinstance(value, (list, tuple))
        encoded = map(msgspec.json.encode, value if is_list else [value])  # Infinity is null.
        texts = [msgspec.json.format(one, indent=0).decode() for one in encoded]
        text = "[" + ",".join(f"\n    {one}" for one in texts) + "\n  ]" if is_list else texts[0]
        lines.append(f'  "{name}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}"


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
    if of_object := re.fullmatch(r"(?:(\w+)\[\d+\])?", path):
        wanted += f" (fields: {', '.join(_DOCUMENTS[of_object[1] or ''].__struct_fields__)})"
    return f"{place}{wanted[0].lower()}{wanted[1:]}; got {abbreviate(given)}"


def abbreviate(value: Any) -> str:
    """Returns a value as JSON, cut after 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
