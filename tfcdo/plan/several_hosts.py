"""Simulates all-reduces across hosts: copy trees inside each host, a ring of the hosts between.

All hosts are alike and do the same at the same time, so one of them stands for all: each pack is
reduced up its tree, crosses the network, and is broadcast down. The hosts exchange a pack by the
ring algorithm: each sends 2 (N - 1) / N of it, in 2 (N - 1) steps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from tfcdo import checks
from tfcdo.plan import algorithms
from tfcdo.plan import simulator
from tfcdo.plan import task_graph
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.task_graph import TaskGraph
from tfcdo.topology.topology import Topology

MAX_HOSTS = 1024
# What MultiWorkerMirroredStrategy packs by default.
BYTES_PER_PACK = 4 * 2**20
# Runs of the simulator, of which the median counts: packs that are ready at once go in any order.
_NUM_RUNS = 5


@dataclasses.dataclass(frozen=True)
class Network:
    """The network between hosts.

    Attributes:
      bandwidth: the bytes per second that a host can send while it receives as many.
      latency: the seconds that a message takes besides.
      sent: which part of a pack's bytes travels: 1/2 where float32 is cast to 16 bits. Then each
        host sends each other one its share and gets the sums back, in 2 (N - 1) messages as well.
    """

    bandwidth: float
    latency: float = 20e-6
    sent: float = 1.0


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts that are alike.

    Attributes:
      topology: the devices of one host.
      num_hosts: how many hosts there are.
      network: what joins them.
    """

    topology: Topology
    num_hosts: int
    network: Network

    def __post_init__(self) -> None:
        checks.check_int("num_hosts", self.num_hosts, at_least=1, at_most=MAX_HOSTS)


@dataclasses.dataclass(frozen=True)
class HostsEvaluation:
    """The simulated times of one all-reduce across hosts.

    Attributes:
      algorithm: its name.
      num_packs: into how many packs the data is cut.
      seconds: the time of the all-reduce alone.
      exposed: how much of it is left after a backward pass whose gradients it sums as they are
        made, in seconds.
    """

    algorithm: str
    num_packs: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Returns the part of the time, from 0 to 1, that hides behind the backward pass."""
        return 1 - min(self.exposed / self.seconds, 1.0) if self.seconds else 0.0


def evaluate_across_hosts(
    algorithm: str,
    cluster: Cluster,
    num_bytes: int,
    *,
    backward: float = 0.0,
    bytes_per_pack: int = BYTES_PER_PACK,
) -> HostsEvaluation:
    """Simulates packs that are summed inside hosts, between them, and copied inside them.

    Args:
      algorithm: whose trees sum inside a host, one of `algorithms.ALGORITHMS`.
      cluster: the hosts.
      num_bytes: how many bytes each device holds.
      backward: the seconds of a backward pass that makes the packs evenly, one after the other.
      bytes_per_pack: the largest pack.

    Returns:
      The evaluation.

    Raises:
      ValueError, TypeError: as `algorithms.make_schedule`.

    Example:
      >>> from tfcdo.topology import preset
      >>> cluster = Cluster(preset("dgx1"), 4, Network(12.5e9))
      >>> found = evaluate_across_hosts("shuffle", cluster, 10**8, backward=60e-3)
      >>> found.num_packs, found.exposed < found.seconds
      (24, True)
    """
    checks.check_int("bytes_per_pack", bytes_per_pack, at_least=1)
    num_packs = max(1, math.ceil(num_bytes / bytes_per_pack))
    schedule = algorithms.make_schedule(algorithm, cluster.topology, num_bytes, num_packs)
    alone = _simulate(schedule, cluster, 0.0)
    behind = _simulate(schedule, cluster, backward) if backward else alone
    return HostsEvaluation(algorithm, len(schedule.packs), alone, behind - backward)


def evaluate_flat_ring(cluster: Cluster, num_bytes: int) -> HostsEvaluation:
    """Computes the time of one ring over all devices, which begins when all gradients are there.

    It is TensorFlow's, which casts nothing.

    Each of the 2 (M - 1) steps over M devices takes as long as the slowest link of the ring takes
    for a part of 1 / M of the data.

    Args:
      cluster: the hosts.
      num_bytes: how many bytes each device holds.

    Returns:
      The evaluation; its one pack cannot hide behind a backward pass.

    Example:
      >>> from tfcdo.topology import preset
      >>> cluster = Cluster(preset("nvswitch", 1), 2, Network(1e9, 0.0))
      >>> evaluate_flat_ring(cluster, 10**9).seconds
      1.0
    """
    num_devices = cluster.num_hosts * cluster.topology.num_devices
    if num_devices == 1 or not num_bytes:
        return HostsEvaluation("flat ring", 1, 0.0, 0.0)
    part = num_bytes / num_devices
    steps = [_slowest_link_of_path(cluster.topology, part)]
    if cluster.num_hosts > 1:
        steps.append(cluster.network.latency + part / cluster.network.bandwidth)
    seconds = 2 * (num_devices - 1) * max(steps)
    return HostsEvaluation("flat ring", 1, seconds, seconds)


def lower_bound_across_hosts(cluster: Cluster, num_bytes: int) -> float:
    """Returns the seconds below which no all-reduce that sums inside hosts first can get.

    Args:
      cluster: the hosts.
      num_bytes: how many bytes each device holds.

    Returns:
      The longer of two: what the links of a host take, and what its network takes for
      2 (N - 1) / N of the bytes.

    Example:
      >>> from tfcdo.topology import preset
      >>> lower_bound_across_hosts(Cluster(preset("nvswitch", 2), 4, Network(1e9)), 10**9)
      1.5
    """
    sent = 2 * (cluster.num_hosts - 1) / cluster.num_hosts * num_bytes * cluster.network.sent
    return max(sent / cluster.network.bandwidth, lower_bound(cluster.topology, num_bytes))


def _simulate(schedule: Schedule, cluster: Cluster, backward: float) -> float:
    graph = task_graph.build(schedule, cluster.topology)
    across = _with_network(graph, schedule, cluster, backward)
    times = [
        max(simulator.run_shuffled(across, 0.0, seed)[1], default=0.0) for seed in range(_NUM_RUNS)
    ]
    return statistics.median(times)


def _with_network(
    graph: TaskGraph, schedule: Schedule, cluster: Cluster, backward: float
) -> TaskGraph:
    """Adds to each pack's tasks its way through the network, and the wait for its gradients."""
    hosts, network = cluster.num_hosts, cluster.network
    dependencies: list[list[int]] = [[] for _ in graph.names]
    for task, dependents in enumerate(graph.dependents):
        for after in dependents:
            dependencies[after].append(task)
    builder = task_graph.TaskGraphBuilder(graph)
    tasks_by_pack: dict[int, list[int]] = {}
    for task, (_, pack_index, _, _) in enumerate(graph.names):
        tasks_by_pack.setdefault(pack_index, []).append(task)
    # The host's way out is shared by all packs; waiting holds something of its pack's own.
    way_out = graph.num_resources
    for index, pack in enumerate(schedule.packs):
        tasks = tasks_by_pack.get(index, [])
        roots_reduced = {
            before
            for task in tasks
            if _is_broadcast_by_root(graph.names[task], pack.tree.root)
            for before in dependencies[task]
        }
        fraction = (index + 1) / len(schedule.packs)
        own = way_out + 2 * index + 1
        ready = builder.wait_for_gradients(graph, index, backward * fraction, own)
        sent_bytes = 2 * (hosts - 1) / hosts * pack.size * network.sent
        sent = builder.add(
            ("network", index, 0, 0),
            sent_bytes / network.bandwidth,
            (way_out,),
            [ready, *roots_reduced],
        )
        latency = 2 * (hosts - 1) * network.latency
        arrived = builder.add(("latency", index, 0, 0), latency, (own + 1,), [sent])
        for task in tasks:
            if _is_broadcast_by_root(graph.names[task], pack.tree.root):
                builder.depend(task, arrived)
    return builder.graph()


def _is_broadcast_by_root(name: tuple[str, int, int, int], root: int) -> bool:
    kind, _, source, _ = name
    return kind == "broadcast" and source == root


def _slowest_link_of_path(topology: Topology, num_bytes: float) -> float:
    """Returns the seconds of the slowest link of the fastest path through all devices of a host.

    Finding the very fastest is a travelling salesman's problem: the nearest device that is left
    comes next, from each device as the first.
    """
    count = topology.num_devices
    if count == 1:
        return 0.0

    def seconds(source: int, target: int) -> float:
        link = topology.link_by_pair.get((source, target))
        if link is None:
            return math.inf
        return link.latency + num_bytes / topology.bandwidth(source, target)

    slowest = []
    for first in range(count):
        here, left, worst = first, set(range(count)) - {first}, 0.0
        while left:
            after = min(left, key=lambda device: (seconds(here, device), device))
            worst = max(worst, seconds(here, after))
            here = after
            left.remove(after)
        slowest.append(worst)
    return min(slowest)
