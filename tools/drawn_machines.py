"""Draws machines that nobody has seen: as the planner must serve them."""

from __future__ import annotations

import itertools
import random

from tfcdo.topology.links import Resource, Route, link_name, ordered_pairs
from tfcdo.topology.topology import Topology

SLOWEST, FASTEST = 0.3e9, 300e9


def draw_machine(num_devices: int, seed: int) -> Topology:
    """Draws a machine whose direct links join all its devices.

    A random tree and some more links, each with a speed from 0.3 to 300 GB/s; on one machine in
    three a link may be slower one way than the other, and on one in three some devices have ports
    that all their links share. All other pairs meet in one, two or three host bridges.
    """
    rng = random.Random(f"{num_devices} {seed}")
    order = [*range(num_devices)]
    rng.shuffle(order)
    pairs = {tuple(sorted((order[i], rng.choice(order[:i])))) for i in range(1, num_devices)}
    density = rng.random()
    others = itertools.combinations(range(num_devices), 2)
    pairs |= {pair for pair in others if rng.random() < density}
    asymmetric, ported = rng.random() < 1 / 3, rng.random() < 1 / 3
    ports = {
        (device, way): Resource(f"{device} {way}", _speed(rng))
        for device in range(num_devices)
        for way in ("out", "in")
        if ported and rng.random() < 0.5
    }
    num_bridges = rng.randint(1, 3)
    bridge_of = [rng.randrange(num_bridges) for _ in range(num_devices)]
    whole_bridges = rng.random() < 1 / 3
    bridges: dict[object, Resource] = {
        bridge: Resource(f"host {bridge}", _speed(rng)) for bridge in range(num_bridges)
    }
    wires: dict[tuple[int, int], float] = {}
    for a, b in sorted(pairs):
        wires[a, b] = wires[b, a] = _speed(rng)
        if asymmetric and rng.random() < 0.5:
            wires[b, a] = _speed(rng)
    routes = []
    for pair in ordered_pairs(num_devices):
        ends = tuple(bridge_of[device] for device in pair)
        if pair in wires:
            held = [Resource(link_name(*pair), wires[pair])]
            held += [ports[end] for end in zip(pair, ("out", "in")) if end in ports]
        elif whole_bridges:
            held = [bridges[end] for end in dict.fromkeys(ends)]
        else:
            if ends not in bridges:
                bridges[ends] = Resource(f"host {link_name(*ends)}", _speed(rng))
            held = [bridges[ends]]
        routes.append(Route(*pair, held, via_host=pair not in wires))
    return Topology.from_routes(f"drawn:{num_devices}:{seed}", num_devices, routes)


def draw_buses(num_devices: int, seed: int) -> Topology:
    """Draws a machine of unlike wires. Three in five share one or two buses."""
    rng = random.Random(f"buses {num_devices} {seed}")
    buses = [Resource(f"bus {i}", _speed(rng)) for i in range(rng.randint(1, 2))]
    bus_of = [rng.choice(buses) for _ in range(num_devices)]
    routes = []
    for a, b in itertools.combinations(range(num_devices), 2):
        shared = list(dict.fromkeys((bus_of[a], bus_of[b]))) if rng.random() < 0.6 else []
        speed = _speed(rng)
        for pair in ((a, b), (b, a)):
            routes.append(Route(*pair, [Resource(link_name(*pair), speed), *shared]))
    return Topology.from_routes(f"buses:{num_devices}:{seed}", num_devices, routes)


def draw_slow_link(num_devices: int, seed: int) -> Topology:
    """Draws a machine of equal wires but for one, 3 to 100 times slower one way or both."""
    rng = random.Random(f"slow link {num_devices} {seed}")
    speed, factor = _speed(rng), 10 ** rng.uniform(0.5, 2)
    a, b = rng.sample(range(num_devices), 2)
    slow = {(a, b), (b, a)} if rng.random() < 0.5 else {(a, b)}
    routes = [
        Route(*pair, [Resource(link_name(*pair), speed / factor if pair in slow else speed)])
        for pair in ordered_pairs(num_devices)
    ]
    return Topology.from_routes(f"slow link:{num_devices}:{seed}", num_devices, routes)


def _speed(rng: random.Random) -> float:
    return SLOWEST * (FASTEST / SLOWEST) ** rng.random()
