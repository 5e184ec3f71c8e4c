"""The interpreter: runs the plans of groups, and turns a plan into TensorFlow ops.

Pack the values; for each pack reduce up its tree, take the root step, broadcast down; unpack. It
decides nothing: the plan lists all that it does. The plans of recent all-reduces in graphs are
remembered, to set next to a profiler's events.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.exchange import rounding
from tfcdo.exchange.protocol import state_of
from tfcdo.execute import device_ops, nccl, rows
from tfcdo.execute.between import Collectives, Network, begin_collectives
from tfcdo.execute.device_ops import PackCodec
from tfcdo.execute.feedback import Residuals
from tfcdo.execute.request import Group
from tfcdo.plan.plan import FusedTensor, Pack, Plan, Slice

# The tensors, or `tf.IndexedSlices`, of one pack: `held[node]`, None for a node without a value.
Held = list[Any]
# An accumulation_fn; gets tensors, and a name for its op.
Accumulate = Callable[[Sequence[tf.Tensor], str], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """State and callables that a plan cannot hold."""

    collectives: Collectives | None = None  # None for one host.
    residuals: Residuals | None = None  # None where no state is kept.
    accumulate: Accumulate | None = None  # Combines the values of "user" packs.
    axis: Any = 0  # To gather along.
    remembered: bool = True  # Whether a trace may show this run; False for ops that never run.


@dataclasses.dataclass(frozen=True)
class Planned:
    """Describes an all-reduce that was put into a graph."""

    scope: str  # The name scope of its ops, such as "replica_1/tfcdo_2".
    devices: tuple[str, ...]  # Each node's.
    plan: Plan


# More all-reduces than a training step, an evaluation step and a few retracings have.
_recent: collections.deque[Planned] = collections.deque(maxlen=64)


def recently_planned() -> list[Planned]:
    """Returns the remembered all-reduces, the newest first."""
    return list(_recent)[::-1]


def reduce_group(
    group: Group,
    plan: Plan,
    network: Network | None,
    residuals: Residuals | None,
    accumulate: Accumulate,
    axis: Any = None,
    remembered: bool = True,
) -> dict[int, Any]:
    """Runs a plan; returns results, or sums on owners, by their positions in the caller's batch."""
    devices = group.devices
    if network is not None and plan.over_hosts:
        # The members of a collective are known by their devices, so each replica takes part
        # with its own device, even where several values are on one: else TensorFlow would hang.
        devices = network.devices
    if plan.one_function and tf.executing_eagerly():
        # The ops wait for each other, so they must run at the same time, not one by one. A
        # concrete function is one even where tf.config.run_functions_eagerly(True) rules.
        values = [list(value) for value in group.values]
        if residuals is None:
            function = _function(plan, devices, network)
        else:  # It lives as long as its residuals; all threads get the same one.
            key, functions = (plan, devices), residuals.functions
            function = functions.get(key)
            if function is None:
                own = _make_function(plan, devices, network, residuals)
                function = functions.setdefault(key, own)
        results = function.get_concrete_function(values)(values)
        # A function's result is on the device of its last op; TensorFlow may name another.
        results = [
            [device_ops.copy([own], to)[0] for own, to in zip(value, group.devices, strict=True)]
            for value in results
        ]
    else:
        collectives = begin_collectives(network, plan)
        runtime = Runtime(collectives, residuals, accumulate, axis, remembered)
        results = run(plan, group.values, devices, runtime)
    found = {}
    for position, result, asked in zip(group.positions, results, group.batch.requests, strict=True):
        nodes = asked.to if asked.owner is None else (asked.owner,)
        found[position] = tf_internals.mirrored([result[node] for node in nodes])
    return found


@dataclasses.dataclass(frozen=True)
class Summed:
    """Gradients that were summed on all devices, or on owners: the first half of plans."""

    sums: tuple[Any, ...]  # An owner updates its variable with it.
    halves: tuple[tuple[Group, Plan], ...]

    def send(self, values: Sequence[Any]) -> list[list[Any]]:
        """Sends a tensor, or some rows of it, for each value from its owner: `[value][device]`."""
        results: dict[int, list[Any]] = {}
        for group, plan in self.halves:
            here = [values[position] for position in group.positions]
            arrived = broadcast(plan, here, group.devices)
            results.update(zip(group.positions, arrived, strict=True))
        return [results[position] for position in range(len(values))]


def _make_function(
    plan: Plan,
    devices: tuple[str, ...],
    network: Network | None,
    residuals: Residuals | None = None,
) -> Any:
    def reduce(values: Any) -> list[list[Any]]:
        runtime = Runtime(begin_collectives(network, plan), residuals)
        return run(plan, values, devices, runtime)

    return tf.function(reduce, autograph=False)


# Tracing costs much more than running; the bound keeps a process that draws ever new shapes small.
_function = functools.lru_cache(maxsize=64)(_make_function)


def run(
    plan: Plan, values: Sequence[Sequence[Any]], devices: Sequence[str], runtime: Runtime
) -> list[list[Any]]:
    """Runs a plan for values `[v][replica]`; returns `[v][node]`, None on a node that gets none."""
    with tf.name_scope("tfcdo"):
        if runtime.remembered and not tf.executing_eagerly():  # Eager ops have no names.
            _recent.append(Planned(tf.get_current_name_scope(), tuple(devices), plan))
        with tf.name_scope("fuse"):
            packed = _pack_all(plan, values, devices)
        results: list[Held] = []
        for index, (pack, held) in enumerate(zip(plan.packs, packed, strict=True)):
            with tf.name_scope(f"{pack.name}{index}"):
                after = None if pack.after is None else results[pack.after]
                results.append(_reduce_pack(plan, index, held, after, devices, runtime))
        with tf.name_scope("unfuse"):
            return _unpack_all(plan, results, devices)


def broadcast(plan: Plan, values: Sequence[Any], devices: Sequence[str]) -> list[list[Any]]:
    """Sends the variables that the roots of a plan have updated down its trees: `[v][node]`."""
    # Each value is on the root of its packs: a tensor, or rows where only some are to be sent.
    roots = {part.value: pack.tree.root for pack in plan.packs if pack.tree for part in pack.slices}
    parts: dict[Slice, Any] = {}
    with tf.name_scope("tfcdo"):
        for index, slices in enumerate(plan.slices_of):
            with tf.device(devices[roots[index]]), tf.name_scope("fuse"):
                parts.update(zip(slices, _cut(values[index], slices), strict=True))
        results = []
        for index, pack in enumerate(plan.packs):
            assert pack.tree is not None
            with tf.name_scope(f"{pack.name}{index}"):
                with tf.device(devices[pack.tree.root]):
                    held = [_fuse(tensor, parts) for tensor in pack.tensors]
                sent = tf.nest.flatten(held, expand_composites=True)
                arrived = device_ops.broadcast_down(pack.tree, sent, devices)
                results.append(
                    [tf.nest.pack_sequence_as(held, own, expand_composites=True) for own in arrived]
                )
        with tf.name_scope("unfuse"):
            return _unpack_all(plan, results, devices)


def _reduce_pack(
    plan: Plan, index: int, held: Held, after: Held | None, devices: Sequence[str], runtime: Runtime
) -> Held:
    """Reduces one pack; returns the results by node."""
    pack, tree = plan.packs[index], plan.packs[index].tree
    if tree is None:
        return _reduce_without_tree(plan, index, held, devices, runtime)
    if after is not None:
        held = _after(pack, held, after, devices)
    codec = _codec(pack, index, runtime)
    root = devices[tree.root]
    match pack.kind:
        case "rows":
            by_value = list(zip(*[own or [None] * len(pack.slices) for own in held], strict=True))
            total = rows.reduce_up(tree, by_value, devices, pack.sum_equal_rows)
        case "concat":
            collected = device_ops.collect(tree, held, devices)
            with tf.device(root):
                total = [tf.concat(parts, runtime.axis) for parts in zip(*collected, strict=True)]
        case _:
            combine = runtime.accumulate if pack.kind == "user" else device_ops.add
            assert combine is not None
            total = device_ops.reduce_up(tree, held, devices, combine, codec)
    result = _root_step(plan, index, total, root, runtime)
    if pack.root.update:  # The rest is `broadcast`.
        return [result if node == tree.root else None for node in range(tree.num_devices)]
    return _down(pack, codec, result, held, devices)


def _codec(pack: Pack, index: int, runtime: Runtime) -> PackCodec | None:
    if pack.wire is None:
        return None
    residuals = runtime.residuals if pack.wire.error_feedback else None
    return PackCodec(pack.wire.dtype, tf.as_dtype(pack.dtype), pack.scaled, residuals, index)


def _after(pack: Pack, held: Held, after: Held, devices: Sequence[str]) -> Held:
    """Makes the leaves of a tree wait, each for the result of an earlier pack on its own device."""
    assert pack.tree is not None
    waiting = list(held)
    for node, children in enumerate(pack.tree.children):
        if not children and held[node] is not None and after[node] is not None:
            with tf.device(devices[node]), tf.control_dependencies(after[node]):
                waiting[node] = [tf.identity(tensor) for tensor in held[node]]
    return waiting


def _root_step(plan: Plan, index: int, total: list[Any], root: str, runtime: Runtime) -> list[Any]:
    """Adds the other hosts' parts, divides and rounds, on the root."""
    pack = plan.packs[index]
    assert pack.tree is not None
    node = pack.tree.root
    if runtime.collectives is not None:
        with tf.name_scope(f"across_hosts/{node}to{node}"):
            match pack.kind:
                case "rows":
                    total = rows.add_other_hosts(
                        total, runtime.collectives, root, pack.sum_equal_rows
                    )
                case "concat":
                    total = runtime.collectives.concat(total, runtime.axis, root)
                case _:
                    total = _exchanged(plan, index, total, root, runtime)
    if pack.kind == "concat":
        return total
    divide, dtype = pack.root.divide, tf.as_dtype(pack.dtype)
    with tf.device(root), tf.name_scope(f"reduce/{node}to{node}"):
        if pack.kind == "rows":
            return [
                tf.IndexedSlices(
                    device_ops.finish(own.values, divide, dtype), own.indices, own.dense_shape
                )
                for own in total
            ]
        return [device_ops.finish(own, divide, dtype) for own in total]


def _exchanged(
    plan: Plan, index: int, total: list[tf.Tensor], root: str, runtime: Runtime
) -> list[tf.Tensor]:
    """Adds the other hosts' sums of a pack by its exchange, which sees a vector or whole values."""
    pack = plan.packs[index]
    exchange, spec = pack.root.exchange, plan.spec(pack)
    assert exchange is not None and runtime.collectives is not None and pack.tree is not None
    initial = state_of(exchange, spec, plan.hosts)
    variables = {}
    if runtime.residuals is not None:
        make, root_node = runtime.residuals.variable, pack.tree.root
        variables = {
            name: make(root_node, f"pack{index}_{name}", functools.partial(np.copy, value))
            for name, value in initial.items()
        }
    with tf.device(root):
        state = {
            name: variables[name].read_value() if variables else tf.zeros(value.shape, value.dtype)
            for name, value in initial.items()
        }
        if exchange.whole_values:
            unfused = map(functools.partial(_unfuse, plan), pack.tensors, total)
            given = [*itertools.chain.from_iterable(unfused)]
        else:
            given = [rounding.laid_out(total)]
    sums, changed = runtime.collectives.exchange(exchange, given, state, spec, root)
    with tf.device(root):
        for name, variable in variables.items():
            variable.assign(changed[name])
        if not exchange.whole_values:
            return device_ops.like(total, sums[0])
        by_slice = dict(zip(pack.slices, sums, strict=True))
        return [_fuse(fused, by_slice) for fused in pack.tensors]


def _down(
    pack: Pack, codec: PackCodec | None, result: list[Any], held: Held, devices: Sequence[str]
) -> Held:
    """Broadcasts a result: all nodes, the root too, get it as it is sent."""
    tree, nodes = pack.tree, range(len(devices))
    assert tree is not None
    sent = rows.to_tensors(result) if pack.kind == "rows" else result
    if codec is not None:
        if pack.to == (tree.root,):
            return [result if node == tree.root else None for node in nodes]
        with tf.device(devices[tree.root]):
            sent = codec.encode(result, tree.root)
    elif pack.to is not None:  # One replica's value, or rows, may be on another device.
        sent = device_ops.copy(sent, devices[tree.root])
    arrived: Held = [None] * len(devices)
    for node, copies in enumerate(device_ops.broadcast_down(tree, sent, devices, pack.to)):
        if copies is None or node not in (pack.to or nodes):
            continue
        arrived[node] = copies
        if pack.kind == "rows":  # `dense_shape` stays the one that a device itself gave.
            own = held[node] or [_with_shape_on(part, devices[node]) for part in result]
            arrived[node] = rows.from_tensors(copies, own)
        elif codec is not None:
            # Named like the copy: TensorFlow may leave that out, and then this receives.
            name = "root" if node == tree.root else f"broadcast/{tree.parents[node]}to{node}"
            with tf.device(devices[node]), tf.name_scope(name):
                arrived[node] = codec.decode(copies)
    return arrived


def _with_shape_on(part: tf.IndexedSlices, device: str) -> tf.IndexedSlices:
    if part.dense_shape is None:
        return part
    with tf.device(device):
        return tf.IndexedSlices(part.values, part.indices, tf.identity(part.dense_shape))


def _reduce_without_tree(
    plan: Plan, index: int, held: Held, devices: Sequence[str], runtime: Runtime
) -> Held:
    """Reduces a pack by collectives over all devices: of this host, or of all hosts."""
    pack = plan.packs[index]
    if not plan.over_hosts:
        return nccl.reduce_pack(pack, held, devices, _codec(pack, index, runtime))
    assert runtime.collectives is not None
    dtype = tf.as_dtype(pack.dtype)
    totals = runtime.collectives.all_reduce_flat([tensor for (tensor,) in held], devices)
    return device_ops.on_each(
        devices, lambda total: [device_ops.finish(total, pack.root.divide, dtype)], totals
    )


def _pack_all(plan: Plan, values: Sequence[Sequence[Any]], devices: Sequence[str]) -> list[Held]:
    """Makes the content of all packs: `[pack][node]`."""
    packed: list[Held] = [[None] * len(plan.nodes) for _ in plan.packs]
    dtypes = {part.value: pack.dtype for pack in plan.packs for part in pack.slices}
    for node in range(plan.replicas):
        with tf.device(devices[node]):
            parts: dict[Slice, Any] = {}
            for index, slices in enumerate(plan.slices_of):
                value, dtype = values[index][node], dtypes[index]
                if plan.values[index].table:
                    value = tf.cast(rows.to_table(value), value.dtype)
                if dtype and value.dtype != dtype:  # A gather mixes dtypes.
                    value = tf.cast(value, dtype)
                parts.update(zip(slices, _cut(value, slices), strict=True))
            for pack, held in zip(plan.packs, packed, strict=True):
                held[node] = [_fuse(tensor, parts) for tensor in pack.tensors]
    return packed


def _cut(value: Any, slices: Sequence[Slice]) -> list[Any]:
    if len(slices) == 1:
        return [value]
    flat = rounding.laid_out([value])
    return list(tf.split(flat, rounding.int64(*(part.size for part in slices))))


def _fuse(fused: FusedTensor, parts: Mapping[Slice, Any]) -> Any:
    own = [parts[part] for part in fused.slices]
    if len(own) == 1:
        return own[0]
    if fused.stacked:
        return tf.stack(own)
    return rounding.laid_out(own)


def _unpack_all(plan: Plan, results: list[Held], devices: Sequence[str]) -> list[list[Any]]:
    """Takes the results for all values out of the packs: `[value][node]`."""
    unpacked: list[list[Any]] = [[None] * len(plan.nodes) for _ in plan.values]
    for node, device in enumerate(devices):
        own = [held[node] for held in results]
        with tf.device(device):
            parts: dict[Slice, Any] = {}
            for pack, tensors in zip(plan.packs, own, strict=True):
                for fused, tensor in zip(pack.tensors, tensors or ()):
                    parts.update(zip(fused.slices, _unfuse(plan, fused, tensor), strict=True))
            for index, slices in enumerate(plan.slices_of):
                found = [parts[part] for part in slices if part in parts]
                if len(found) > 1:
                    found = [_shaped(plan, index, tf.concat(found, 0))]
                unpacked[index][node] = found[0] if found else None
    return unpacked


def _unfuse(plan: Plan, fused: FusedTensor, tensor: Any) -> list[Any]:
    """Takes the slices out of a tensor; those that are a whole value have its shape again."""
    if len(fused.slices) == 1:
        return [tensor]
    if fused.stacked:
        return list(tf.unstack(tensor, len(fused.slices)))
    return [
        _shaped(plan, part.value, own) if len(plan.slices_of[part.value]) == 1 else own
        for part, own in zip(fused.slices, _cut(tensor, fused.slices), strict=True)
    ]


def _shaped(plan: Plan, index: int, flat: tf.Tensor) -> tf.Tensor:
    """Gives a value its shape again; only values of known size are flattened."""
    shape = plan.values[index].shape
    assert shape is not None
    return flat if len(shape) == 1 else tf.reshape(flat, rounding.int64(*shape))
