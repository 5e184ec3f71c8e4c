"""Groups of checked reductions, each with one plan, and the run of that plan."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import log, tf_internals
from tfcdo.execute import copy_trees, interpreter
from tfcdo.execute.between import Network, begin_collectives, device_number
from tfcdo.execute.feedback import Residuals
from tfcdo.execute.interpreter import Runtime
from tfcdo.execute.request import Reduction
from tfcdo.plan.decide import Options
from tfcdo.plan.plan import Batch, Plan, Request, ValueSpec

Accumulate = Callable[[Sequence[tf.Tensor], str], tf.Tensor]
_lock = threading.Lock()  # All threads must get the same function for the same residuals.


@dataclasses.dataclass(frozen=True)
class Group:
    """Reductions of a batch that have one plan."""

    batch: Batch
    values: tuple[tuple[Any, ...], ...]  # `[v][r]` is value `v` of replica `r`.
    devices: tuple[str, ...]  # Each node's.
    positions: tuple[int, ...]  # The values' places in the caller's batch.

    def run(
        self,
        plan: Plan,
        network: Network | None,
        residuals: Residuals | None,
        accumulate: Accumulate,
        axis: Any = None,
        remembered: bool = True,
    ) -> list[tuple[int, Any]]:
        """Runs a plan; returns results, or sums on owners, with positions in the caller's batch."""
        devices = self.devices
        if network is not None and plan.over_hosts:
            # The members of a collective are known by their devices, so each replica takes part
            # with its own device, even where several values are on one: else TensorFlow would hang.
            devices = network.devices
        if plan.one_function and tf.executing_eagerly():
            # The ops wait for each other, so they must run at the same time, not one by one. A
            # concrete function is one even where tf.config.run_functions_eagerly(True) rules.
            values = [list(value) for value in self.values]
            function = _eager_function(plan, devices, network, residuals)
            results = function.get_concrete_function(values)(values)
            # A function's result is on the device of its last op; TensorFlow may name another.
            results = [
                [copy_trees.copy([own], to)[0] for own, to in zip(value, self.devices, strict=True)]
                for value in results
            ]
        else:
            collectives = begin_collectives(network, plan)
            runtime = Runtime(collectives, residuals, accumulate, axis, remembered)
            results = interpreter.run(plan, self.values, devices, runtime)
        found = []
        for position, result, asked in zip(
            self.positions, results, self.batch.requests, strict=True
        ):
            nodes = asked.to if asked.owner is None else (asked.owner,)
            found.append((position, tf_internals.mirrored([result[node] for node in nodes])))
        return found

    def emit(self, plan: Plan, network: Network | None, accumulate: Accumulate) -> None:
        """Creates the ops of a plan in the current graph, without residuals: nothing is reduced."""
        results = self.run(plan, network, None, accumulate, remembered=False)
        if self.batch.has_owners:
            interpreter.broadcast(plan, [result for _, result in results], self.devices)


@dataclasses.dataclass(frozen=True)
class Owned:
    """Values that were summed on their owners: the first half of plans."""

    sums: tuple[Any, ...]  # Each on its owner, which updates a variable with it.
    halves: tuple[tuple[Group, Plan], ...]

    def send(self, values: Sequence[Any]) -> list[list[Any]]:
        """Sends a tensor, or some rows of it, for each value from its owner: `[value][device]`."""
        results: dict[int, list[Any]] = {}
        for group, plan in self.halves:
            here = [values[position] for position in group.positions]
            arrived = interpreter.broadcast(plan, here, group.devices)
            results.update(zip(group.positions, arrived, strict=True))
        return [results[position] for position in range(len(values))]


def grouped(
    op: Any,
    reductions: Sequence[Reduction],
    options: Options,
    network: Network | None,
    root: str | None,  # Where `one_device` reduces; None for the first destination.
    user: bool,  # Whether an accumulation_fn combines the values.
) -> list[Group]:
    """Divides a batch into groups: one for each set of devices, and for rows."""
    one_device, tables = options.one_device, options.sparse_as_dense
    groups: dict[Any, list[int]] = {}
    if network is not None:
        reductions = [
            dataclasses.replace(
                reduction,
                devices=network.with_known_devices(reduction.devices),
                destinations=network.with_known_devices(reduction.destinations),
            )
            for reduction in reductions
        ]
    for position, reduction in enumerate(reductions):
        everywhere = reduction.is_all_reduce and not one_device
        to = None if everywhere else reduction.destinations
        key = reduction.devices, to, _stays_rows(reduction, tables)
        groups.setdefault(key, []).append(position)
    found = []
    for (devices, _, as_rows), positions in groups.items():
        members = [reductions[position] for position in positions]
        nodes = list(devices)
        for device in (*(root,) * one_device, *members[0].destinations):
            if device is not None and device not in nodes:
                nodes.append(device)
        requests = tuple(_request(op, member, as_rows, nodes, options) for member in members)
        chosen = None
        if one_device:
            chosen = requests[0].to[0] if root is None else nodes.index(root)
        batch = Batch(
            op,
            len(devices),
            network.num_hosts if network else 1,
            tuple(map(device_number, nodes)),
            requests,
            chosen,
            user,
        )
        values = tuple(reduction.values for reduction in members)
        found.append(Group(batch, values, tuple(nodes), tuple(positions)))
    return found


def _stays_rows(reduction: Reduction, tables: bool) -> bool:
    if not reduction.is_sparse:
        return False
    if tables and reduction.values[0].dense_shape is None:
        log.warn_once(
            "sparse_as_dense=True was requested, but tf.IndexedSlices without dense_shape cannot "
            "become dense; sending rows instead; set dense_shape"
        )
        return True
    return not tables


def _request(
    op: str, reduction: Reduction, as_rows: bool, nodes: Sequence[str], options: Options
) -> Request:
    spec = _spec(op, reduction, as_rows)
    exact = reduction.exact or spec.size == 1
    exchange = None
    if options.between is not None and not (exact or op == "gather" or spec.rows):
        exchange = options.between.exchange_of(reduction.path, spec)
    to = tuple(range(len(reduction.devices)))  # In the order of the destinations.
    if reduction.devices != reduction.destinations:
        to = tuple(map(nodes.index, reduction.destinations))
    return Request(spec, to, exact, exchange, reduction.owner)


def _spec(op: str, reduction: Reduction, as_rows: bool) -> ValueSpec:
    first = reduction.values[0]
    if as_rows:
        row = first.values.shape
        shape = None if row.rank is None else (None, *row.as_list()[1:])
        return ValueSpec(first.dtype.name, shape, rows=True)
    rank = first.shape.rank
    sizes = None if rank is None else tuple(first.shape.as_list())
    if op == "gather":  # Its sizes may differ between replicas and hosts.
        sizes = None if rank is None else (None,) * rank
    elif first.shape.is_fully_defined() and not all(
        value.shape.is_fully_defined() for value in reduction.values
    ):
        sizes = None  # Its size counts as known only if it is known of all replicas.
    return ValueSpec(first.dtype.name, sizes, table=reduction.is_sparse)


def _eager_function(
    plan: Plan, devices: tuple[str, ...], network: Network | None, residuals: Residuals | None
) -> Any:
    """Returns the function that runs a plan eagerly; it lives as long as its residuals."""
    if residuals is None:
        return _function(plan, devices, network)
    with _lock:
        if (plan, devices) not in residuals.functions:
            residuals.functions[plan, devices] = _make_function(plan, devices, network, residuals)
        return residuals.functions[plan, devices]


def _make_function(
    plan: Plan,
    devices: tuple[str, ...],
    network: Network | None,
    residuals: Residuals | None = None,
) -> Any:
    def reduce(values: Any) -> list[list[Any]]:
        runtime = Runtime(begin_collectives(network, plan), residuals)
        return interpreter.run(plan, values, devices, runtime)

    return tf.function(reduce, autograph=False)


# Tracing costs much more than running; the bound keeps a process that draws ever new shapes small.
_function = functools.lru_cache(maxsize=64)(_make_function)
