"""Explaining what a class would do with a batch: the plan, and what its graph really holds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import checks
from tfcdo import tf_internals
from tfcdo.execute import groups
from tfcdo.execute import nccl
from tfcdo.execute import nccl_choice
from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.devices import check_device
from tfcdo.execute.groups import Group
from tfcdo.execute.groups import Transport
from tfcdo.execute.reduction import Reduction
from tfcdo.execute.reduction import check_pairs
from tfcdo.execute.reduction import check_topology
from tfcdo.execute.travel import Wire
from tfcdo.plan.algorithms import fastest_algorithm
from tfcdo.plan.batch_plan import BatchPlan
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.size_class import size_class
from tfcdo.plan.widening import widened

_BY_NCCL = (Transport.NCCL, Transport.NCCL_ACROSS_HOSTS)
_SUM = tf.distribute.ReduceOp.SUM
# For collectives between H hosts: how many times its input a host sends.
_SENT_TIMES: Mapping[str, Callable[[int], float]] = {
    "CollectiveReduceV2": lambda hosts: 2 * (hosts - 1) / hosts,
    "CollectiveAllToAllV2": lambda hosts: (hosts - 1) / hosts,
    "CollectiveGatherV2": lambda hosts: hosts - 1,
}
_MAX_LINES = 8  # Of each kind; an explanation fits on a screen.


@dataclasses.dataclass(frozen=True)
class PackExplanation:
    """Describes one pack of a batch.

    Attributes:
      num_bytes: the bytes of its values on one device.
      num_sent_bytes: the bytes of its values as they travel.
      num_values: how many values have a part in it.
      num_tensors: how many tensors travel.
      tree: the copy tree, over the indices of the devices; None for NCCL, which has its own.
    """

    num_bytes: int
    num_sent_bytes: int
    num_values: int
    num_tensors: int
    tree: CopyTree | None

    def __str__(self) -> str:
        parts = [
            f"{_bytes(self.num_bytes)} of {_count(self.num_values, 'value')}",
            f"in {_count(self.num_tensors, 'tensor')}",
        ]
        if self.num_sent_bytes != self.num_bytes:
            parts.append(f"sent as {_bytes(self.num_sent_bytes)}")
        return " ".join(parts + ([f"along {_nested(self.tree)}"] if self.tree else []))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Describes what a class does with a batch of values of one dtype.

    Attributes:
      ops: the `repr` of the object that was asked.
      devices: the devices, by whose indices the copy trees name them.
      algorithm: what all-reduces the values, such as "ring", "NCCL" or "one device".
      reason: why it is that.
      packs: the packs; none if each value is reduced on one device as it is.
      bytes_by_link: how many bytes each device sends to each other one, `{(source, target): bytes}`
        by index; empty for NCCL.
      num_ops: how many ops of each type the all-reduce adds to a graph.
      bytes_between_hosts: how many bytes this host sends to others; 0 on one host, and for NCCL.
    """

    ops: str
    devices: tuple[str, ...]
    algorithm: str
    reason: str
    packs: tuple[PackExplanation, ...]
    bytes_by_link: Mapping[tuple[int, int], int]
    num_ops: Mapping[str, int]
    bytes_between_hosts: int = 0

    @property
    def num_packs(self) -> int:
        """Returns the number of packs."""
        return len(self.packs)

    @property
    def num_graph_ops(self) -> int:
        """Returns the number of ops that the all-reduce adds to a graph."""
        return sum(self.num_ops.values())

    def __str__(self) -> str:
        by_amount: dict[int, list[str]] = {}
        for (source, target), num_bytes in sorted(self.bytes_by_link.items()):
            by_amount.setdefault(num_bytes, []).append(f"{source} -> {target}")
        ops = sorted(self.num_ops.items(), key=lambda item: (-item[1], item[0]))
        lines = [
            f"{self.ops} on {_count(len(self.devices), 'device')}: {self.algorithm}",
            f"  because {self.reason}",
            *_shortened("pack", [f"pack {i}: {pack}" for i, pack in enumerate(self.packs)]),
            *_shortened("amount", [_links(*item) for item in sorted(by_amount.items())[::-1]]),
            *(
                [f"  {_bytes(self.bytes_between_hosts)} to other hosts"]
                * bool(self.bytes_between_hosts)
            ),
            f"  {self.num_graph_ops:,} graph ops: "
            + ", ".join(f"{count:,} {name}" for name, count in ops),
        ]
        return "\n".join(lines)


def explain(
    ops: tf.distribute.CrossDeviceOps,
    config_for: Callable[[Reduction], AllReduceConfig],
    wire: Wire,
    shapes: Iterable[Any],
    dtype: Any,
    devices: Sequence[str] | None,
) -> Explanation:
    """Explains how a class sums a batch of values; see `ConfiguredCrossDeviceOps.explain`.

    Args:
      ops: the object that is asked.
      config_for: how it reduces a value.
      wire: how values travel between devices.
      shapes: the shape of each value.
      dtype: the dtype of all values.
      devices: the replicas' devices; None for the usual ones.

    Returns:
      The explanation.
    """
    dtype = tf.as_dtype(dtype)
    names = _device_names(devices)
    if not isinstance(shapes, Iterable):
        raise TypeError(f"shapes must be a list with the shape of each value; got {shapes!r}")
    sizes = [_known_shape(index, shape) for index, shape in enumerate(shapes)]
    found: list[Group] = []
    plans: list[BatchPlan] = []

    def all_reduce() -> None:
        values = [_placeholders(shape, dtype, names) for shape in sizes]
        reductions = check_pairs([(value, value) for value in values])
        configs = [config_for(reduction) for reduction in reductions]
        for reduction, config in zip(reductions, configs, strict=True):
            check_topology(config.topology, reduction)
        found.extend(groups.group_batch(_SUM, reductions, configs, wire))
        for group in found:
            if group.transport in (*_BY_NCCL, Transport.COPY_TREES):
                plans.append(groups.plan_group(group, reductions))
        ops.batch_reduce(_SUM, [(value, value) for value in values])

    graph = tf.function(all_reduce, autograph=False).get_concrete_function().graph
    operations = [op for op in graph.get_operations() if op.type != "Placeholder"]
    sent_dtype = (found[0].wire.dtype if found else None) or dtype
    count = sum(s.num_elements() for s in sizes)
    algorithm, reason = _algorithm(found, dtype, sent_dtype, count * sent_dtype.size)
    uses_nccl = any(group.transport in _BY_NCCL for group in found)
    return Explanation(
        repr(ops),
        names,
        algorithm,
        reason,
        tuple(pack for plan in plans for pack in _packs(plan, dtype, sent_dtype, uses_nccl)),
        {} if uses_nccl else _bytes_by_link(operations, names),
        dict(collections.Counter(op.type for op in operations)),
        0 if uses_nccl or not found else _bytes_between_hosts(operations, found[0].config),
    )


def _device_names(devices: Sequence[str] | None) -> tuple[str, ...]:
    if devices is None and tf.distribute.has_strategy():
        devices = tf.distribute.get_strategy().extended.worker_devices
    elif devices is None:
        logical = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        devices = [device.name for device in logical]
    names = checks.check_device_list(devices)
    for name in names:
        check_device("each of devices", name)
    return tuple(tf_internals.canonical_device(name) for name in names)


def _known_shape(index: int, given: Any) -> tf.TensorShape:
    shape = tf.TensorShape(given)
    if not shape.is_fully_defined():
        raise ValueError(f"shapes[{index}] must be fully known; got {shape}")
    return shape


def _placeholders(shape: tf.TensorShape, dtype: tf.DType, devices: Sequence[str]) -> Any:
    values = []
    for device in devices:
        with tf.device(device):
            values.append(tf.raw_ops.Placeholder(dtype=dtype, shape=shape))
    return tf_internals.per_replica(values)


def _algorithm(
    groups: Sequence[Group], dtype: tf.DType, sent_dtype: tf.DType, num_bytes: int
) -> tuple[str, str]:
    """Returns the name of what reduces a batch, and the reason for it."""
    if not groups:
        return "nothing", "the batch is empty"
    group = groups[0]  # All values have one dtype and are on the same devices.
    config, devices = group.config, group.devices
    match group.transport:
        case Transport.NCCL if config.nccl == "auto":
            return "NCCL", nccl_choice.compare(devices, size_class(num_bytes))[1]
        case Transport.NCCL:
            return "NCCL", str(nccl.nccl_status(devices, sent_dtype))
        case Transport.NCCL_ACROSS_HOSTS:
            return "NCCL", "it runs between hosts, over all devices of all of them"
        case Transport.ONE_DEVICE:
            if config.accumulate is not None:
                return "one device", f"accumulation_fn is called on {config.root}"
            return "one device", f"reduce_to_device is {config.root}, not one of the devices"
    topology = config.topology_of(devices)
    origin = "was detected" if config.topology is None else "was given"
    machine = f"the topology {topology.name!r} {origin}"
    if config.saved is not None:
        return config.saved.resolved, f"the plan was given: {config.saved.origin}; {machine}"
    if not isinstance(config.algorithm, str):
        assert isinstance(config.algorithm, tuple)
        return "one_device", f"everything is summed on {devices[config.algorithm[0].root]}"
    if config.nccl == "always" and len(devices) > 1:
        return config.algorithm, f"NCCL cannot run: {nccl.nccl_status(devices, sent_dtype)}"
    if config.algorithm != "auto":
        return config.algorithm, f"it was asked for; {machine}"
    topology = widened(topology, dtype.size / sent_dtype.size)
    fastest = fastest_algorithm(topology, num_bytes, config.packing.num_packs or None)
    return fastest, f"auto found it fastest for {_bytes(num_bytes)} in the simulator; {machine}"


def _packs(
    plan: BatchPlan, dtype: tf.DType, sent_dtype: tf.DType, uses_nccl: bool
) -> list[PackExplanation]:
    explanations = []
    for pack in plan.packs:
        slices = [part for fused in pack.fused_tensors for part in fused.slices]
        explanations.append(
            PackExplanation(
                sum(part.size for part in slices) * dtype.size,
                sum(part.size for part in slices) * sent_dtype.size,
                len(slices),
                len(pack.fused_tensors),
                None if uses_nccl else pack.tree,
            )
        )
    return explanations


def _bytes_by_link(
    operations: Iterable[tf.Operation], devices: Sequence[str]
) -> dict[tuple[int, int], int]:
    """Adds up the tensors that ops take from other devices; TensorFlow sends each to each once."""
    index = {device: rank for rank, device in enumerate(devices)}
    sent: dict[tuple[str, str], tuple[tuple[int, int], int]] = {}
    for op in operations:
        for tensor in op.inputs:
            source, target = tensor.op.device, op.device
            if source in index and target in index and source != target:
                num_bytes = (tensor.shape.num_elements() or 0) * tensor.dtype.size
                sent[tensor.name, target] = (index[source], index[target]), num_bytes
    totals: collections.Counter[tuple[int, int]] = collections.Counter()
    for link, num_bytes in sent.values():
        totals[link] += num_bytes
    return dict(totals)


def _bytes_between_hosts(operations: Iterable[tf.Operation], config: AllReduceConfig) -> int:
    """Adds up what a host's collectives send to the other hosts."""
    if config.across_hosts is None:
        return 0
    hosts, total = config.across_hosts.count, 0.0
    for op in operations:
        if op.type in _SENT_TIMES:
            (sent, *_) = op.inputs
            size = (sent.shape.num_elements() or 0) * sent.dtype.size
            total += size * _SENT_TIMES[op.type](hosts)
    return round(total)


def _nested(tree: CopyTree) -> str:
    """Writes a tree as its root followed by the subtrees: `0(1, 2(3))`."""

    def subtree(device: int) -> str:
        children = ", ".join(map(subtree, tree.children[device]))
        return f"{device}({children})" if children else f"{device}"

    return subtree(tree.root)


def _links(num_bytes: int, links: Sequence[str]) -> str:
    more = ", ..." if len(links) > _MAX_LINES else ""
    listed = ", ".join(links[:_MAX_LINES]) + more
    return f"{_bytes(num_bytes)} on each of {_count(len(links), 'link')}: {listed}"


def _shortened(what: str, lines: Sequence[str]) -> list[str]:
    shown = [f"  {line}" for line in lines[:_MAX_LINES]]
    hidden = len(lines) - len(shown)
    return shown + ([f"  ... and {_count(hidden, f'more {what}')}"] if hidden else [])


def _bytes(number: int) -> str:
    return f"{number:,} bytes"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
