"""Questions: checked reductions, grouped and described so that one plan answers each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import log
from tfcdo.execute import handles
from tfcdo.execute.between import Network
from tfcdo.execute.request import Reduction
from tfcdo.plan.options import Options
from tfcdo.plan.plan import Batch, Request, ValueSpec


@dataclasses.dataclass(frozen=True)
class Question:
    """Some reductions of a batch that one plan answers.

    Attributes:
      batch: the question, as a plan sees it.
      values: `values[v][r]` is value `v` of replica `r`.
      devices: the device of each node.
      positions: the positions of the values in the caller's batch.
    """

    batch: Batch
    values: tuple[tuple[Any, ...], ...]
    devices: tuple[str, ...]
    positions: tuple[int, ...]


def questions(
    op: Any,
    reductions: Sequence[Reduction],
    options: Options,
    network: Network | None,
    root: str | None,
    user: bool,
    axis: Any = None,
) -> list[Question]:
    """Divides a batch into questions: one for each set of devices, and for rows.

    With an `axis`, values are gathered along it. For `op` and `user` see `tfcdo.plan.plan.Batch`;
    `root` is the device that `Options.one_device` reduces on, None for the first destination.
    """
    one_device, tables = options.one_device, options.sparse_as_dense is True
    groups: dict[Any, list[int]] = {}
    if network is not None:
        reductions = [_placed(reduction, network) for reduction in reductions]
    for position, reduction in enumerate(reductions):
        everywhere = reduction.is_all_reduce and not one_device
        to = None if everywhere else reduction.destinations
        groups.setdefault((reduction.devices, to, _stays_rows(reduction, tables)), []).append(
            position
        )
    fixed = tf.get_static_value(axis) if axis is not None else None
    found = []
    for (devices, _, as_rows), positions in groups.items():
        members = [reductions[position] for position in positions]
        nodes = list(devices)
        for device in (*(root,) * one_device, *members[0].destinations):
            if device is not None and device not in nodes:
                nodes.append(device)
        requests = tuple(
            Request(spec, _nodes_of(reduction, nodes), is_exact, reduction.owner)
            for reduction in members
            for spec in [_gathered(reduction) if op == "gather" else _spec(reduction, as_rows)]
            for is_exact in [reduction.exact or spec.size == 1]
        )
        chosen = None
        if one_device:
            chosen = requests[0].to[0] if root is None else nodes.index(root)
        batch = Batch(
            op,
            len(devices),
            network.num_hosts if network else 1,
            tuple(map(handles.device_number, nodes)),
            requests,
            chosen,
            user,
            None if fixed is None else int(fixed),
        )
        values = tuple(reduction.values for reduction in members)
        found.append(Question(batch, values, tuple(nodes), tuple(positions)))
    return found


def _placed(reduction: Reduction, network: Network) -> Reduction:
    """Returns a reduction with the devices filled in that are not known while tracing."""
    if all(reduction.devices) and all(reduction.destinations):
        return reduction
    known = map(network.with_known_devices, (reduction.devices, reduction.destinations))
    devices, destinations = known
    return dataclasses.replace(reduction, devices=devices, destinations=destinations)


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


def _spec(reduction: Reduction, as_rows: bool) -> ValueSpec:
    values = reduction.values
    if as_rows:
        row = values[0].values.shape
        shape = None if row.rank is None else (None, *row.as_list()[1:])
        return ValueSpec(values[0].dtype.name, shape, rows=True)
    shapes = [value.shape for value in values]
    sizes = None if shapes[0].rank is None else tuple(shapes[0].as_list())
    known = [shape.is_fully_defined() for shape in shapes]
    if known[0] and not all(known):
        sizes = None  # Its size counts as known only if it is known of all replicas.
    return ValueSpec(values[0].dtype.name, sizes, table=reduction.is_sparse)


def _gathered(reduction: Reduction) -> ValueSpec:
    """Describes a value to gather: its sizes may differ between replicas and hosts."""
    rank = reduction.values[0].shape.rank
    return ValueSpec(reduction.values[0].dtype.name, None if rank is None else (None,) * rank)


def _nodes_of(reduction: Reduction, nodes: Sequence[str]) -> tuple[int, ...]:
    """Returns the nodes of a reduction's destinations, in their order."""
    if reduction.devices == reduction.destinations:
        return tuple(range(len(reduction.devices)))
    return tuple(nodes.index(device) for device in reduction.destinations)


def check_known_shapes(question: Question) -> None:
    """Raises `ValueError` unless all shapes are known while a function is traced."""
    for value, asked in zip(question.values, question.batch.requests, strict=True):
        if asked.value.size is None:
            raise ValueError(
                "error_feedback needs values whose shapes are known while a function is traced; "
                f"got {value[0].dtype.name} of shape {value[0].shape}"
            )
