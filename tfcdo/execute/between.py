"""Between hosts: the root step that adds the sums of all hosts, with TensorFlow's collective ops.

The roots of one pack on all hosts exchange the sums of their trees; nothing else crosses between
hosts. Each host sends the data of one device, however many devices it has. Or, where NCCL runs, all
devices of all hosts take part in one collective, without trees.

Before the first byte is sent, the hosts agree on the plan's fingerprint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.cluster import progress
from tfcdo.cluster.protocol import digest
from tfcdo.cluster.session import NUM_KEYS, Session
from tfcdo.exchange import rounding
from tfcdo.exchange.protocol import CheckedPeers, Exchange, Kind, PackSpec
from tfcdo.execute import device_ops
from tfcdo.execute.device_ops import JointGradient, on_each
from tfcdo.plan import plan as plans
from tfcdo.plan.plan import Plan
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

# TensorFlow never forgets the shape with which a key was used first. So a tensor whose size differs
# from step to step is padded to one of few sizes, which have keys of their own.
_SIZES = sorted({2**octave * (4 + quarter) // 4 for octave in range(31) for quarter in range(4)})
# Group keys of ours, far from those that TensorFlow's strategies count up from 1.
_GROUP_KEYS = {"CPU": 7_001_000, "GPU": 7_002_000}
_ALL_DEVICES_KEYS = {"CPU": 7_003_000, "GPU": 7_004_000}
# The dtypes that collectives take others as: their bits, where the dtype is not wider, or a cast.
# `CollectiveReduceV2` adds: sums of integers are correct modulo their size in wider ones too, and a
# complex number is two real ones; 16-bit floats are added in 32 bits, as on one host.
_SUMMED_AS = {
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}
# The others only copy.
_COPIED_AS = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}


@dataclasses.dataclass(frozen=True)
class Network:
    """Holds the connection of a host to the others."""

    session: Session
    hint: str  # The implementation of collectives: "auto", "ring" or "nccl".
    devices: tuple[str, ...]  # This host's, one a replica; as many on every host.
    machine: Topology  # The topology of the chief's devices, which all hosts plan for.

    @property
    def num_hosts(self) -> int:
        """Returns the number of hosts."""
        return len(self.session.cluster.tasks)

    @property
    def host_device(self) -> str:
        """Returns the name of this host's own CPU."""
        prefix = self.session.cluster.tasks[self.session.cluster.index].device_prefix
        return f"{prefix}/device:CPU:0"

    def topology_of(self, devices: Sequence[str]) -> Topology:
        """Returns the topology of some of this host's devices: the same on every host."""
        if len(set(devices)) == len(devices) and set(devices) <= set(self.devices):
            return self.machine.subset([self.devices.index(device) for device in devices])
        return preset("shared_memory", len(devices))  # Several of the values are on one device.

    def with_known_devices(self, known: Sequence[str]) -> tuple[str, ...]:
        """Fills in devices that are not known while tracing."""
        # One value per replica is on the replicas' devices; other numbers of values are on the CPU.
        usual = self.devices
        if len(known) != len(self.devices):
            usual = (self.host_device,) * len(known)
        return tuple(device or default for device, default in zip(known, usual, strict=True))


def begin_collectives(network: Network | None, plan: Plan) -> Collectives | None:
    """Begins the collectives of a plan's packs; None if nothing is sent to other hosts."""
    if network is None or not plan.packs:
        return None
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ValueError("sums between hosts need TensorFlow 2; got a graph of TensorFlow 1")
    _check_gathered(plan)
    return Collectives(network, _describe(plan))


def _describe(plan: Plan) -> dict[str, Any]:
    """Describes a plan to other hosts: its fingerprint, and words that show a difference."""
    first = plan.packs[0]
    what = {"concat": "gathering", "rows": "all-reduce of slices"}.get(first.kind, "all-reduce")
    roots = [pack.tree.root if pack.tree else 0 for pack in plan.packs]
    return {
        "what": "all-reduce over all devices" if plan.over_hosts else what,
        "values": [str(value) for value in plan.values],
        "mean over": first.root.divide,
        "replicas of a host": plan.replicas,
        "packs": [
            f"{'?' if pack.size is None else pack.size} elements on {plan.nodes[root]}, "
            f"packed as {plans.digest(pack.tensors)[:8]}"
            + (f", by {pack.root.exchange}" if pack.root.exchange else "")
            for pack, root in zip(plan.packs, roots, strict=True)
        ],
        "plan": plan.fingerprint,
        "collectives": plan.num_collectives(_dtype_copied),
    }


def copy_from_chief(network: Network, value: tf.Tensor, device: str) -> tf.Tensor:
    """Returns the chief's value on every host, on this device, bit for bit."""
    description = _describe_tensors("initialization", [value], [device])
    return Collectives(network, description).broadcast(value, device)


def _describe_tensors(
    what: str, tensors: Sequence[tf.Tensor], devices: Sequence[str]
) -> dict[str, Any]:
    shapes = [None if tensor.shape.rank is None else tuple(tensor.shape) for tensor in tensors]
    dtypes = [tensor.dtype.name for tensor in tensors]
    return {
        "what": what,
        "values": [str(spec) for spec in map(plans.ValueSpec, dtypes, shapes)],
        "device": ", ".join(map(device_number, devices)),
        # Sizes that are not known are compared first.
        "collectives": 1 + any(not tensor.shape.is_fully_defined() for tensor in tensors),
    }


def _check_gathered(plan: Plan) -> None:
    """Raises `ValueError` unless collectives take all values: an exchange must be able to end."""
    taken = tf_internals.dtypes_of_op("CollectiveGatherV2")
    for pack in plan.packs:
        for name in plan.gathered_dtypes(pack) if pack.kind == "concat" else ():
            if _dtype_copied(name) not in taken:
                raise ValueError(
                    "value must be of a dtype that TensorFlow gathers between hosts; got " + name
                )


class Marks:
    """Counts the events of one kind of collectives, and keeps the time of the last ones."""

    def __init__(self, device: str, description: Mapping[str, Any]) -> None:
        self._device = device
        self._length = progress.events_kept(description["collectives"])
        name = digest(description)
        self._count = device_ops.bare_variable(f"progress_{name}", device, tf.int64)
        self._times = device_ops.bare_variable(f"times_{name}", device, tf.float64, [self._length])

    def mark(self, tensors: Sequence[tf.Tensor], after: tf.Operation | None = None) -> tf.Operation:
        """Counts one more event as soon as these tensors, and an earlier mark, exist."""
        before = [*tensors, after] if after is not None else list(tensors)
        with tf.control_dependencies(before), tf.device(self._device):
            count, times = map(tf_internals.captured, (self._count, self._times))
            number = tf.raw_ops.ReadVariableOp(resource=count, dtype=tf.int64)
            # The time is written first, so that each counted event has a time.
            timed = tf.raw_ops.ResourceScatterUpdate(
                resource=times, indices=number % self._length, updates=tf.raw_ops.Timestamp()
            )
            with tf.control_dependencies([] if timed is None else [timed]):
                mark = tf.raw_ops.AssignAddVariableOp(
                    resource=count, value=tf.constant(1, tf.int64)
                )
        if mark is not None:
            tf_internals.run_before_function_returns(mark)
        return mark

    def count(self) -> int:
        """Returns the number of events: odd while a collective waits."""
        return int(tf.raw_ops.ReadVariableOp(resource=self._count, dtype=tf.int64))

    def settle(self) -> None:
        """Counts a collective as left if an error ended the function that had entered it."""
        with tf.init_scope():
            if self.count() % 2:
                self.mark([])

    def times(self) -> np.ndarray:
        """Returns when the last events were, in seconds, each in its place modulo their number."""
        return np.asarray(tf.raw_ops.ReadVariableOp(resource=self._times, dtype=tf.float64))


class Collectives:
    """Emits the collectives of all hosts for one batch of values, in a fixed order."""

    def __init__(self, network: Network, description: Mapping[str, Any]) -> None:
        # The description is the same on all hosts.
        self.network = network
        self._count: int = description["collectives"]
        self._marks = Marks(network.host_device, description)
        network.session.watch.add(description, self._marks)
        with tf.device(network.host_device):
            keys = tf_internals.value_at_call_time(
                lambda: self._next_keys(description), tf.TensorSpec([self._count], tf.int32)
            )
            self._keys = iter(tf.unstack(keys, self._count))

    def exchange(
        self,
        exchange: Exchange,
        tensors: Sequence[tf.Tensor],
        state: Mapping[str, tf.Tensor],
        spec: PackSpec,
        device: str,
    ) -> tuple[list[tf.Tensor], Mapping[str, tf.Tensor]]:
        """Runs an exchange of tensors of one device of each host; returns sums and new state."""
        peers = _RootPeers(exchange, spec, self, device)
        with tf.device(device):
            sums, changed = peers.run(tensors, state)
            wide = [tf.cast(own, total.dtype) for own, total in zip(tensors, sums, strict=True)]
            joint = _gradient_of_sums(self.network, (device,))
            return joint.of(sums, wide, (device,) * len(wide)), changed

    def all_reduce_flat(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[tf.Tensor]:
        """Adds up one tensor of each device of all hosts, with a gradient; 16-bit floats in 32."""
        totals = self.sum(tensors, devices)
        wide = on_each(devices, lambda own, total: tf.cast(own, total.dtype), tensors, totals)
        return _gradient_of_sums(self.network, tuple(devices)).of(totals, wide, devices)

    def all_gather(
        self, tensors: Sequence[tf.Tensor], device: str, check: bool = False
    ) -> list[tf.Tensor]:
        """Concatenates the rows of all hosts, in their order; numbers of rows may differ."""
        # One collective for the numbers, or for whole shapes where plans do not compare them, and
        # one for each dtype that TensorFlow gathers.
        with tf.device(device):
            sent = [_as_copied(tensor) for tensor in tensors]
            shapes = [tf.shape(tensor, tf.int64)[: None if check else 1] for tensor in sent]
            here = tf.concat(shapes, 0)[tf.newaxis]
            [counts] = self.emit(tf.raw_ops.CollectiveGatherV2, [here], [device])
            if check:
                are_rows = tf.concat([tf.range(tf.size(shape)) < 1 for shape in shapes], 0)
                others = tf.boolean_mask(counts, ~are_rows, axis=1)
                what = "hosts gather tensors of different sizes, other than along the axis"
                with _if_equal(others, what):
                    counts = tf.boolean_mask(counts, are_rows, axis=1)
            groups: dict[tf.DType, list[int]] = {}
            for index, tensor in enumerate(sent):
                groups.setdefault(tensor.dtype, []).append(index)
            results: dict[int, tf.Tensor] = {}
            for members in groups.values():
                own = tf.gather(counts, rounding.int64(*members), axis=1)
                gathered = self._gather_flat([sent[index] for index in members], own, device)
                results.update(zip(members, gathered, strict=True))
            return [
                _from_collective(results[index], tensor.dtype)
                for index, tensor in enumerate(tensors)
            ]

    def _gather_flat(
        self, tensors: Sequence[tf.Tensor], counts: tf.Tensor, device: str
    ) -> list[tf.Tensor]:
        """Gathers tensors of one dtype, laid end to end; `counts[host, tensor]` are their rows."""
        num_hosts = self.network.num_hosts
        row_shapes = [device_ops.shape(tensor)[1:] for tensor in tensors]
        sizes = counts * tf.stack([tf.reduce_prod(shape) for shape in row_shapes])
        totals = tf.reduce_sum(sizes, 1)
        # The collective takes as much from each host.
        size, key = self._size_and_key(tf.reduce_max(totals))
        sent = _padded(rounding.laid_out(tensors), size)
        [gathered] = self.emit(tf.raw_ops.CollectiveGatherV2, [sent], [device], key=key)
        cuts = tf.reshape(tf.concat([sizes, (size - totals)[:, tf.newaxis]], 1), [-1])
        parts = tf.split(gathered, cuts, num=num_hosts * (len(tensors) + 1))
        results = []
        for index, (tensor, shape) in enumerate(zip(tensors, row_shapes, strict=True)):
            joined = tf.concat(parts[index :: len(tensors) + 1], 0)
            rows = tf.reduce_sum(counts[:, index])[tf.newaxis]
            result = tf.reshape(joined, tf.concat([rows, shape], 0))
            result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
            results.append(result)
        return results

    def concat(self, tensors: Sequence[tf.Tensor], axis: Any, device: str) -> list[tf.Tensor]:
        """Concatenates tensors of all hosts along an axis, by the collectives of `all_gather`."""
        if tf.get_static_value(axis) == 0:
            return self.all_gather(tensors, device, check=True)
        with tf.device(device):
            turns = [_axis_first(tf.rank(tensor), axis) for tensor in tensors]
            gathered = self.all_gather([*map(tf.transpose, tensors, turns)], device, check=True)
            results = []
            for rows, tensor, turn in zip(gathered, tensors, turns, strict=True):
                result = tf.transpose(rows, tf.math.invert_permutation(turn))
                result.set_shape([None] * tensor.shape.rank if tensor.shape.rank else None)
                results.append(result)
            return results

    def broadcast(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """Returns the chief's tensor on every host, bit for bit; takes one collective."""

        def send_or_receive(*, input: tf.Tensor, ordering_token: Any, **common: Any) -> tf.Tensor:
            del ordering_token  # These ops have none.
            if self.network.session.cluster.is_chief:
                return tf.raw_ops.CollectiveBcastSendV2(input=input, **common)
            return tf.raw_ops.CollectiveBcastRecvV2(T=input.dtype, shape=tf.shape(input), **common)

        with tf.device(device):
            [received] = self.emit(send_or_receive, [_as_copied(tensor)], [device])
            return _from_collective(received, tensor.dtype)

    def sum(
        self,
        tensors: Sequence[tf.Tensor],
        devices: Sequence[str],
        line: str = "",
        are_alike: bool = False,
    ) -> list[tf.Tensor]:
        """Adds up one tensor of each device of all hosts; it has no gradient."""
        # One collective, and one before it if their size is not known, unless all `are_alike`.
        parts = on_each(devices, _as_summed, tensors)
        reduce = functools.partial(tf.raw_ops.CollectiveReduceV2, merge_op="Add", final_op="Id")
        if parts[0].shape.is_fully_defined():
            totals = self.emit(reduce, parts, devices, line)
        else:
            sizes = on_each(devices, lambda part: tf.size(part, tf.int64)[tf.newaxis], parts)
            if not are_alike:
                sizes = self.emit(tf.raw_ops.CollectiveGatherV2, sizes, devices, line)
            with tf.device(devices[0]), _if_equal(sizes[0], "hosts add tensors of different sizes"):
                size, key = self._size_and_key(sizes[0][0])
            sent = on_each(devices, lambda part: _padded(rounding.laid_out([part]), size), parts)
            sums = self.emit(reduce, sent, devices, line, key)
            totals = on_each(devices, _unpadded, sums, parts)
        wide = [device_ops.upcast_dtype(tensor.dtype) for tensor in tensors]
        return on_each(devices, _from_collective, totals, wide)

    def emit(
        self,
        collective: Callable[..., tf.Tensor],
        tensors: Sequence[tf.Tensor],
        devices: Sequence[str],
        line: str = "",
        key: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Emits one collective of some devices of all hosts, in one of the orders of a device."""
        entered = self._marks.mark(tensors)
        key = next(self._keys) if key is None else key
        results = []
        for tensor, device in zip(tensors, devices, strict=True):
            with tf.device(device):
                result = collective(
                    input=tensor,
                    group_size=self.network.num_hosts * len(devices),
                    group_key=_group_key(*devices),
                    instance_key=key,
                    ordering_token=[_ordering_token(device, line)],
                    communication_hint=self.network.hint,
                )
                results.append(result)
        self._marks.mark(results, after=entered)
        return results

    def _size_and_key(self, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns one of few sizes, at least as large as another, and the next key of that size."""
        all_sizes = tf.constant(_SIZES, tf.int64)
        index = tf.reduce_sum(tf.cast(all_sizes < size, tf.int32))
        return all_sizes[index], next(self._keys) + (index + 1) * NUM_KEYS

    def _next_keys(self, description: Mapping[str, Any]) -> tf.Tensor:
        self._marks.settle()  # After an own loop's error; after one of Keras's: `Watch.go_on`.
        keys = self.network.session.next_keys(description, self._count)
        with tf.device(self.network.host_device):
            return tf.constant(keys, tf.int32)


class _RootPeers(CheckedPeers):
    """The roots of one pack on all hosts, on one device of each."""

    def __init__(
        self, exchange: Exchange, spec: PackSpec, collectives: Collectives, device: str
    ) -> None:
        cluster = collectives.network.session.cluster
        super().__init__(exchange, spec, cluster.index, len(cluster.tasks))
        self._collectives, self._device = collectives, device

    def emit(self, kind: Kind, tensor: tf.Tensor, number: int) -> tf.Tensor:
        """Emits a collective; see `CheckedPeers`."""
        # While the second collective of one pack runs, the first one of the next pack does.
        line, shape = str(number or ""), tensor.shape
        match kind:
            case "all_reduce":
                # Only an exchange's own choice, such as `PowerSGD.start_step`, leaves a size open.
                known = not any(None in shape for shape in self._spec.shapes)
                [result] = self._collectives.sum([tensor], [self._device], line, are_alike=known)
            case "broadcast":
                result = self._collectives.broadcast(tensor, self._device)
            case "all_to_all" | "all_gather":
                is_gather = kind == "all_gather"
                op = tf.raw_ops.CollectiveGatherV2 if is_gather else tf.raw_ops.CollectiveAllToAllV2
                sent = [_as_copied(tensor)]
                [copied] = self._collectives.emit(op, sent, [self._device], line)
                result = _from_collective(copied, tensor.dtype)
        if kind == "all_gather" and shape.rank and shape[0] is not None:
            shape = tf.TensorShape([shape[0] * self.size, *shape[1:]])
        result.set_shape(shape)  # Which TensorFlow does not know of all collectives.
        return result


def _padded(flat: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    return tf.pad(flat, [[0, size - tf.size(flat, tf.int64)]])


def _unpadded(flat: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    return tf.reshape(flat[: tf.size(own, tf.int64)], tf.shape(own, tf.int64))


def _if_equal(of_hosts: tf.Tensor, message: str) -> Any:
    """Returns a context of ops that run if all hosts' rows are equal; else it is an error."""
    return tf.control_dependencies([tf.debugging.assert_equal(of_hosts, of_hosts[:1], message)])


def _axis_first(rank: tf.Tensor, axis: Any) -> tf.Tensor:
    """Returns the permutation of axes that puts one first."""
    axis = tf.cast(axis, tf.int32) % rank
    return tf.concat([[axis], tf.range(axis), tf.range(axis + 1, rank)], 0)


def _as_summed(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that `CollectiveReduceV2` adds, exactly."""
    return _as_sent(tensor, _SUMMED_AS.get(tensor.dtype, device_ops.upcast_dtype(tensor.dtype)))


def _dtype_copied(name: str) -> tf.DType:
    """Returns the dtype that `_as_copied` turns tensors of a dtype into."""
    return _COPIED_AS.get(tf.as_dtype(name), tf.as_dtype(name))


def _as_copied(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that TensorFlow's other collective ops copy, exactly."""
    return _as_sent(tensor, _dtype_copied(tensor.dtype.name))


def _as_sent(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # An empty NumPy array has no memory, and then TensorFlow's collectives end the process.
    if tensor.shape.num_elements() == 0:
        tensor = tf.zeros(tensor.shape, tensor.dtype)
    return tf.bitcast(tensor, dtype) if _is_bits(dtype, tensor.dtype) else tf.cast(tensor, dtype)


def _from_collective(received: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Turns a result of a collective back into a dtype: the values' dtype, or their sums'."""
    as_bits = _is_bits(received.dtype, dtype)
    return tf.bitcast(received, dtype) if as_bits else tf.cast(received, dtype)


def _is_bits(sent: tf.DType, dtype: tf.DType) -> bool:
    return bool(sent != dtype and sent.size <= dtype.size)


@functools.lru_cache(maxsize=1024)
def device_number(device: str) -> str:
    """Returns the name of a device on every host, such as "CPU:0"; "" for an unknown device."""
    if not device:
        return ""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def _group_key(*devices: str) -> int:
    """Returns the key of the group of these devices and those with their numbers on other hosts."""
    spec = tf.DeviceSpec.from_string(devices[0])
    if len(devices) > 1:
        return _ALL_DEVICES_KEYS[spec.device_type] + len(devices)
    return _GROUP_KEYS[spec.device_type] + int(spec.device_index)


def _ordering_token(device: str, line: str = "") -> tf.Tensor:
    """Returns the resource by which TensorFlow runs the collectives of a device one by one."""
    # On a CPU, only the collectives of one `line` wait for each other. NCCL needs one order.
    is_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
    name = f"order_{device_number(device)}_{line if is_cpu else ''}"
    return tf_internals.captured(device_ops.bare_variable(name, device, tf.float32))


@functools.cache
def _gradient_of_sums(network: Network, devices: tuple[str, ...]) -> JointGradient:
    """Returns the gradient of sums over all hosts: the sums of all gradients, sent together."""

    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
        tensors = list(upstream)
        if len(devices) == 1:  # The sums are several of it; else one of each device.
            with tf.device(devices[0]):
                tensors = [rounding.laid_out(upstream)]
        description = _describe_tensors("gradient of an all-reduce", tensors, devices)
        totals = Collectives(network, description).all_reduce_flat(tensors, devices)
        if len(devices) > 1:
            return totals
        with tf.device(devices[0]):
            return device_ops.like(upstream, totals[0])

    return JointGradient(gradient)
