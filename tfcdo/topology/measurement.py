"""Measures the links between the devices of this machine, and the devices' additions."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from tfcdo import checks
from tfcdo.cache_folder import write_whole
from tfcdo.topology import detection
from tfcdo.topology.links import Resource, Route, link_name, ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import FORMAT, Topology, TopologyDocument, of_this_format

# Floats of a tensor that is copied or added: more than caches hold, of a few devices.
_COUNT = 2**22
_BYTES = 4 * _COUNT
_ROUNDS = 15
# More devices have too many pairs of links to try each together.
MOST_DEVICES = 16
_NCCL_SIZES = (2**16, 2**20, 2**24, 2**27)

Pair: TypeAlias = tuple[int, int]
# Called with the part that is done, from 0 to 1, and the name of the measurement.
Progress: TypeAlias = Callable[[float, str], None]


def measure(
    devices: Sequence[str],
    *,
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Topology:
    """Measures some devices of this machine, in a few seconds.

    Nothing uses a measurement unasked: pass the file, or the returned topology, as `topology=` of
    the cross-device ops. Both hold the latency and the bandwidth of each pair of devices, which
    pairs slow each other down and so share something, and the speed of additions. Only the file
    has the times of NCCL, where it runs. Virtual CPU devices hand tensors over without copying
    them: their links cost nothing, and they add with the same cores. Measure on an idle machine.

    Args:
      devices: TensorFlow device names, each of a device of its own; all CPUs or all GPUs of this
        host.
      path: the file to write, which `tfcdo plan -t FILE` reads too; None for none.
      progress: called with the part that is done and what is being measured.

    Returns:
      The topology, whose name names the devices.

    Raises:
      ValueError: if there are no devices, more than 16, one twice, one that does not exist, or they
        are of several kinds.
      TypeError: if `path` is not a path, or `progress` not a function.
      OSError: if the file cannot be written.

    Example:
      >>> measure(["CPU:0", "CPU:0"])
      Traceback (most recent call last):
      ValueError: devices must be different CPUs or GPUs of this host; got ['CPU:0', 'CPU:0']
    """
    names = checks.check_device_list(devices)
    if path is not None:
        checks.check_path("path", path)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function or None; got {progress!r}")
    name = detection.name_of_measured(names)
    if name is None or len(set(names)) < len(names):
        raise ValueError(f"devices must be different CPUs or GPUs of this host; got {list(names)}")
    if len(names) > MOST_DEVICES:
        raise ValueError(f"devices must be at most {MOST_DEVICES}; got {len(names)}")
    clock = _Clock(names, progress or (lambda done, what: None))
    today = datetime.date.today().isoformat()
    found = Measured(_topology(name, clock), today, _time_nccl(clock))
    clock.progress(1.0, "done")
    if path is not None:
        save(found, path)
    return found.topology


class _Clock:
    """Times graphs on some devices."""

    def __init__(self, devices: Sequence[str], progress: Progress) -> None:
        import tensorflow as tf

        from tfcdo.tf_internals import canonical_device

        known = [canonical_device(device.name) for device in tf.config.list_logical_devices()]
        left = list(known)
        for device in devices:  # TensorFlow would take another one's place.
            try:
                left.remove(canonical_device(device))  # It may be named again in other words.
            except ValueError:
                raise ValueError(
                    f"devices must be different ones that exist; got {device!r}, there are {known}"
                ) from None
        self._tf = tf
        self.devices = devices
        self.progress = progress
        self.on_cpu = "CPU" in devices[0].upper()
        self.values: dict[tuple[int, int, int], Any] = {}  # Graphs may outlive their use.
        self._empty = 0.0
        self._empty = self.seconds([])

    def value(self, device: int, count: int, number: int = 0) -> Any:
        """Returns a variable of so many floats on a device, the same one for the same number."""
        if (device, count, number) not in self.values:
            with self._tf.device(self.devices[device]):
                self.values[device, count, number] = self._tf.Variable(self._tf.ones([count]))
        return self.values[device, count, number]

    def seconds(
        self,
        ops: Sequence[tuple[int, Callable[[], Any]]],
        of_rounds: Callable[[Sequence[float]], float] = statistics.median,
    ) -> float:
        """Returns the time of a graph of ops, each on a device, minus the time of an empty one."""
        tf = self._tf
        with tf.device("/cpu:0"):
            truth = tf.Variable(True)

        @tf.function(autograph=False)
        def step() -> None:
            for device, op in ops:
                with tf.device(self.devices[device]):
                    output = op()
                    # Uses the tensor where it is: neither reads nor copies it, and is not pruned.
                    # The condition is a variable, because TensorFlow folds constants.
                    tf.raw_ops.Assert(condition=truth.read_value(), data=[output], summarize=1)

        run = step.get_concrete_function()
        times = []
        for _ in range(_ROUNDS + 2):
            begin = time.perf_counter()
            run()
            if not self.on_cpu:
                tf.test.experimental.sync_devices()
            times.append(time.perf_counter() - begin)
        return max(of_rounds(times[2:]) - self._empty, 1e-9)

    def copies(self, pairs: Sequence[Pair], num_bytes: int) -> float:
        """Returns the time of copies that begin together."""

        def copy(value: Any, source: int) -> Any:
            with self._tf.device(self.devices[source]):
                read = value.read_value()
            return self._tf.raw_ops.Identity(input=read)

        ops = [
            (target, functools.partial(copy, self.value(source, num_bytes // 4), source))
            for source, target in pairs
        ]
        return self.seconds(ops, of_rounds=min)

    def additions(self, adders: Sequence[int], operands: int) -> float:
        """Returns the time in which each of some devices adds so many tensors."""
        ops = []
        for device in adders:
            values = [self.value(device, _COUNT, number) for number in range(operands)]
            ops.append((device, functools.partial(self._tf.add_n, values)))
        return self.seconds(ops)


def _topology(name: str, clock: _Clock) -> Topology:
    count = len(clock.devices)
    pairs = list(ordered_pairs(count))
    if not pairs or clock.on_cpu:
        # CPU devices hand tensors over as they are, and add with the same cores.
        clock.progress(0.0, "additions")
        operands = max(2, count)
        adding = clock.additions([0], operands) / (operands + 1)
        free = preset("shared_memory", count)
        return dataclasses.replace(free, name=name, addition_bandwidth=_BYTES / adding)
    alone = []
    for number, pair in enumerate(pairs):
        clock.progress(0.3 * number / len(pairs), f"copies from {link_name(*pair)}")
        nothing, something = clock.copies([pair], 4), clock.copies([pair], _BYTES)
        wire = Resource(link_name(*pair), _BYTES / max(something - nothing, 1e-9))
        alone.append(Route(*pair, [wire], latency=nothing))
    clock.progress(0.3, "copies together")
    routes = infer_routes(alone, clock.copies, _BYTES)
    clock.progress(0.8, "additions")
    adding, together = clock.additions([0], 2), clock.additions(range(count), 2)
    return Topology.from_routes(
        name,
        count,
        routes,
        addition_bandwidth=3 * _BYTES / adding,
        serial_reduction=together > 0.6 * count * adding,
    )


def infer_routes(
    alone: Sequence[Route], time_copies: Callable[[Sequence[Pair], int], float], num_bytes: int
) -> list[Route]:
    """Adds the resources that links share to routes that hold a wire each, by timing copies."""
    bandwidths = {route[:2]: route.resources[0].bandwidth for route in alone}
    seconds = {route[:2]: route.latency + num_bytes / bandwidths[route[:2]] for route in alone}
    # Links without a common device are tried only if they are slow: they lead through a host.
    slow = 0.9 * max(bandwidths.values())
    conflicts = []
    for one, other in itertools.combinations(sorted(bandwidths), 2):
        ends_meet = one[0] == other[0] or one[1] == other[1] or one == other[::-1]
        if ends_meet or max(bandwidths[one], bandwidths[other]) < slow:
            # They share something if the second copy adds half of the shorter one's time.
            short, long = sorted((seconds[one], seconds[other]))
            if time_copies([one, other], num_bytes) > long + 0.5 * short:
                conflicts.append((one, other))
    # Links every two of which slow each other down share a resource: they are a clique.
    resources = {route[:2]: [*route.resources] for route in alone}
    for number, clique in enumerate(_cliques_over_edges(conflicts)):
        fastest = max(bandwidths[pair] for pair in clique)
        for pair in clique:
            resources[pair].append(Resource(f"{_shared_name(clique)} ({number})", fastest))
    return [route._replace(resources=resources[route[:2]]) for route in alone]


def _cliques_over_edges(edges: Sequence[tuple[Pair, Pair]]) -> Iterator[list[Pair]]:
    """Covers all edges of a graph with cliques, large ones first, each as large as it can be."""
    try:
        import networkx as nx
    except ImportError as error:
        raise ModuleNotFoundError(
            "measuring links needs networkx: in a clone of tfcdo, pip install '.[cli]'",
            name="networkx",  # The command `tfcdo` knows it by its name.
        ) from error
    covered: set[Sequence[Pair]] = set()
    cliques = map(sorted, nx.find_cliques(nx.Graph(edges)))
    for clique in sorted(cliques, key=lambda pairs: (-len(pairs), pairs[0])):
        inside = set(itertools.combinations(clique, 2))
        if inside - covered:
            covered |= inside
            yield clique


def _shared_name(clique: Sequence[Pair]) -> str:
    sources, targets = {pair[0] for pair in clique}, {pair[1] for pair in clique}
    if len(sources) == 1:
        return f"{sources.pop()} out"
    if len(targets) == 1:
        return f"{targets.pop()} in"
    return "shared"


def _time_nccl(clock: _Clock) -> tuple[tuple[int, float], ...]:
    import tensorflow as tf

    from tfcdo import tf_internals

    count, kind = len(clock.devices), "CPU" if clock.on_cpu else "GPU"
    if count < 2 or kind not in tf_internals.device_types_with_kernel("NcclAllReduce"):
        return ()
    times: list[tuple[int, float]] = []
    for size in _NCCL_SIZES:
        clock.progress(0.8 + 0.05 * len(times), "NCCL")
        name = f"tfcdo_measure_{size}_{id(clock)}"
        reduce = functools.partial(
            tf.raw_ops.NcclAllReduce, reduction="sum", num_devices=count, shared_name=name
        )
        values = (clock.value(device, size // 4) for device in range(count))
        ops = [(device, functools.partial(reduce, input=one)) for device, one in enumerate(values)]
        times.append((size, clock.seconds(ops)))
        clock.values.clear()
    return tuple(times)


_Bytes = Annotated[int, msgspec.Meta(ge=1, le=checks.LARGEST_INT)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class _MeasuredDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    topology: TopologyDocument
    date: str
    nccl: tuple[tuple[_Bytes, _Seconds], ...] = ()


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured topology, whose name names the devices, and says when it was measured."""

    topology: Topology
    date: str
    # Bytes on each device, ascending, and seconds of NCCL's all-reduce; none if it does not run.
    nccl: tuple[tuple[int, float], ...] = ()

    def nccl_seconds(self, num_bytes: int) -> float | None:
        """Returns the seconds of NCCL, between the measured sizes; None if it was not measured."""
        if not self.nccl:
            return None
        # Below the smallest size it takes as long as there, above the largest in proportion.
        sizes, seconds = np.array(self.nccl).T
        between = np.interp(math.log(max(num_bytes, 1)), np.log(sizes), np.log(seconds))
        return math.exp(float(between)) * max(1.0, num_bytes / float(sizes[-1]))


def save(measured: Measured, path: str | os.PathLike[str]) -> None:
    """Writes a file whose content `parse` reads."""
    document = {"format": FORMAT} | vars(measured) | {"topology": measured.topology.to_document()}
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    write_whole(pathlib.Path(path), text)


def parse(content: bytes) -> Measured:
    """Reads a file of `tfcdo.topology.measure` or `Topology.to_json`, or raises `ValueError`."""
    try:
        read = json.loads(content)
    except (ValueError, RecursionError):
        read = None  # `from_json` says what is wrong.
    if not isinstance(read, dict) or "date" not in read:
        return Measured(Topology.from_json(content.decode("utf-8-sig")), "")
    document = msgspec.convert(of_this_format(read), _MeasuredDocument)
    sizes = [size for size, _ in document.nccl]
    if sizes != sorted({*sizes}):
        raise ValueError(f"nccl must have its sizes in ascending order, each once; got {sizes}")
    return Measured(Topology.from_document(document.topology), document.date, document.nccl)
