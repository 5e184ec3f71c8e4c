"""The plan of an all-reduce: one immutable value that says everything that will happen.

A plan is a list of packs. Each pack is reduced up a copy tree, takes the root step, and is
broadcast down. `tfcdo.plan.decide` makes plans, `tfcdo.execute.interpreter` turns them into ops.
Everything else about an all-reduce (explanation, fingerprint, number of collectives, keys of
residuals, simulated time) is computed from this value.

Devices are known by index: a node. Nodes `0..replicas - 1` are the replicas; later ones are
destinations without a value.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from tfcdo.exchange import dtypes
from tfcdo.exchange.casts import Cast
from tfcdo.exchange.protocol import Collective, Exchange, PackSpec, calls_of, identity, state_of
from tfcdo.plan.copy_tree import CopyTree


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """One value, as far as it is known while a function is traced."""

    dtype: str
    # Its dimensions, None for an unknown one; None if not even their number is known. The number of
    # rows is left out: it differs between replicas and steps.
    shape: tuple[int | None, ...] | None
    rows: bool = False  # Whether it is a `tf.IndexedSlices` that stays one.
    table: bool = False  # Whether it is one that becomes a table first.

    @functools.cached_property
    def size(self) -> int | None:
        """Returns the number of elements; None if it is not known until the step runs."""
        if self.shape is None or None in self.shape:
            return None
        return math.prod(self.shape)  # type: ignore[arg-type]

    def __str__(self) -> str:
        sizes = "..."
        if self.shape is not None:
            sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{'rows of ' * self.rows}{self.dtype}[{sizes}]"


@dataclasses.dataclass(frozen=True)
class Request:
    """One value to reduce, and its destinations."""

    value: ValueSpec
    to: tuple[int, ...]  # The nodes that get the result, in the caller's order.
    exact: bool = False  # Whether it is never rounded: only gradients are.
    exchange: Exchange | None = None  # How hosts add it up where it is not exact; None for a sum.
    owner: int | None = None  # Updates its variable with the sum; None if the sum itself is sent.


@dataclasses.dataclass(frozen=True)
class Batch:
    """Values that are reduced together, and how."""

    op: Literal["sum", "mean", "gather"]
    replicas: int  # This host's.
    hosts: int
    nodes: tuple[str, ...]  # The devices, such as "GPU:0"; "" for one that is not known.
    requests: tuple[Request, ...]  # Either all dense (or to become so), or all rows.
    root: int | None = None  # The node that everything is reduced on; None to choose.
    user: bool = False  # Whether an accumulation_fn combines the values.

    @property
    def stays_rows(self) -> bool:
        """Returns whether the values are `tf.IndexedSlices` that stay ones."""
        return bool(self.requests) and self.requests[0].value.rows

    @property
    def has_owners(self) -> bool:
        """Returns whether the variables of the values have owners, which update them."""
        return any(request.owner is not None for request in self.requests)

    @property
    def divide(self) -> int | None:
        """Returns the number of values in a mean, of all hosts; None where nothing is divided."""
        count = self.replicas * self.hosts
        return count if self.op == "mean" and not (count == 1 and self.is_all_reduce) else None

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all values on one device, as far as their sizes are known."""
        specs = [request.value for request in self.requests]
        return sum((spec.size or 0) * dtypes.itemsize(spec.dtype) for spec in specs)

    @functools.cached_property
    def is_all_reduce(self) -> bool:
        """Returns whether each result goes to exactly the replicas' devices."""
        everyone = list(range(self.replicas))
        return all(sorted(to) == everyone for to in {request.to for request in self.requests})


@dataclasses.dataclass(frozen=True)
class Slice:
    """A range of the elements of one flattened value."""

    value: int
    start: int
    stop: int | None  # None for a whole value of unknown size.

    @property
    def size(self) -> int:
        """Returns the number of elements; 0 if it is not known."""
        return 0 if self.stop is None else self.stop - self.start


@dataclasses.dataclass(frozen=True)
class FusedTensor:
    """Slices that are sent as one tensor: flattened and concatenated, or a single one as it is."""

    slices: tuple[Slice, ...]
    stacked: bool = False  # Whether they are whole values of one shape, along a new first axis.


@dataclasses.dataclass(frozen=True)
class RootStep:
    """The root's work on a sum, in this order, before the result is broadcast."""

    # How the sums of other hosts are added; None for one host, and for rows and concatenations,
    # which are gathered.
    exchange: Exchange | None = None
    divide: int | None = None  # The number of replicas of all hosts, for a mean; None for a sum.
    # Whether the root updates variables with the sum, which are broadcast in their own dtype.
    update: bool = False


@dataclasses.dataclass(frozen=True)
class Pack:
    """Values, or parts of values, that are reduced together along a copy tree.

    Attributes:
      tensors: its content, as it is sent.
      tree: the copy tree; None where NCCL reduces, over all devices of all hosts.
      after: the window: the index of an earlier pack of the same tree, whose result a leaf holds
        before it sends this pack. None for no window: a leaf sends the pack when its values are
        ready.
    """

    # How a node combines its children's parts: "user" by an accumulation_fn, "rows" one after the
    # other.
    kind: Literal["sum", "user", "rows", "concat"]
    tensors: tuple[FusedTensor, ...]
    dtype: str  # The dtype that values are packed in; "" for a gather, which mixes them.
    tree: CopyTree | None  # Over all nodes.
    # How values are cast on the edges of the tree, or before NCCL; None to send them as they are.
    wire: Cast | None = None
    root: RootStep = RootStep()
    to: tuple[int, ...] | None = None  # The nodes that get the result; None for all.
    # Whether rows of the same index are added, as rows or, where these have fewer bytes, as tables.
    sum_equal_rows: bool = False
    after: int | None = None

    @functools.cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Returns the slices of all tensors."""
        return tuple(part for tensor in self.tensors for part in tensor.slices)

    @functools.cached_property
    def size(self) -> int | None:
        """Returns the number of elements; None if it is not known until the step runs."""
        if any(part.stop is None for part in self.slices):
            return None
        return sum(part.size for part in self.slices)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes on one device; 0 if they are not known."""
        return (self.size or 0) * dtypes.itemsize(self.dtype)

    @property
    def num_sent_bytes(self) -> int:
        """Returns the bytes as a leaf sends them, without scales."""
        return (self.size or 0) * dtypes.itemsize(self.wire.dtype if self.wire else self.dtype)

    @property
    def scaled(self) -> bool:
        """Returns whether values are scaled before they are cast."""
        return self.wire is not None and dtypes.needs_scale(self.wire.dtype, self.dtype)

    @property
    def name(self) -> str:
        """Returns the first part of the name of its scope in a graph."""
        return {"rows": "rows", "concat": "gather"}.get(self.kind, "pack")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A whole all-reduce. A plan that misses an element, or packs one twice, cannot be built.

    Attributes:
      packs: the packs, in the order in which they are sent.
      num_sent_bytes: the bytes of all packs, as a leaf sends them.

    Raises:
      ValueError: if the packs do not hold each element of each value once, a tree spans another
        number of devices, or a window is not an earlier pack of its tree.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> pack = Pack("sum", (FusedTensor((Slice(0, 0, 6),)),), "float32", star(2))
      >>> Plan(("CPU:0", "CPU:1"), 2, 1, (ValueSpec("float32", (3, 2)),), (pack,)).packs[0].size
      6
    """

    nodes: tuple[str, ...]  # The devices, such as "GPU:0"; "" for one that is not known.
    replicas: int  # This host's; nodes after them have no value.
    hosts: int
    values: tuple[ValueSpec, ...]
    packs: tuple[Pack, ...]
    algorithm: str = ""  # The way in which most values are reduced, for readers.
    why: str = ""  # Why that is; like the algorithm not part of the fingerprint.

    def __post_init__(self) -> None:
        for index, pack in enumerate(self.packs):
            if not all(0 <= part.value < len(self.values) for part in pack.slices):
                raise ValueError(f"packs[{index}] must be of values that exist; got {pack.slices}")
            if pack.tree is not None and pack.tree.num_devices != len(self.nodes):
                raise ValueError(
                    f"packs[{index}] must have a tree over the {len(self.nodes)} nodes; got one "
                    f"over {pack.tree.num_devices}"
                )
            if pack.after is not None and not (
                0 <= pack.after < index and self.packs[pack.after].tree == pack.tree
            ):
                raise ValueError(
                    f"packs[{index}].after must be an earlier pack of the same tree; got "
                    f"{pack.after}"
                )
        for index, (value, slices) in enumerate(zip(self.values, self.slices_of, strict=True)):
            stops = [0, *(part.stop for part in slices)]
            if [part.start for part in slices] != stops[:-1] or stops[-1] != value.size:
                raise ValueError(
                    f"packs must hold each element of value {index}, of size {value.size}, once; "
                    f"got it cut at {stops}"
                )

    @functools.cached_property
    def slices_of(self) -> tuple[tuple[Slice, ...], ...]:
        """Returns `slices_of`; `slices_of[v]` has value `v`'s slices, in its elements' order."""
        slices: list[list[Slice]] = [[] for _ in self.values]
        for pack in self.packs:
            for part in pack.slices:
                slices[part.value].append(part)
        return tuple(tuple(sorted(parts, key=lambda part: part.start)) for parts in slices)

    @functools.cached_property
    def one_function(self) -> bool:
        """Returns whether its ops wait for each other, so that they must run at the same time."""
        return any(pack.tree is None for pack in self.packs)

    @property
    def over_hosts(self) -> bool:
        """Returns whether NCCL reduces over all devices of all hosts, without copy trees."""
        return self.hosts > 1 and self.one_function

    @functools.cached_property
    def trees(self) -> tuple[CopyTree, ...]:
        """Returns the trees of the packs that have one: of all, unless NCCL reduces."""
        return tuple(pack.tree for pack in self.packs if pack.tree is not None)

    @property
    def num_sent_bytes(self) -> int:
        """Returns the bytes as a leaf sends them, without scales, as far as they are known."""
        return sum(pack.num_sent_bytes for pack in self.packs)

    @property
    def has_known_times(self) -> bool:
        """Returns whether the simulator knows its copies: all are along trees, of known sizes."""
        return all(pack.tree is not None and pack.num_sent_bytes for pack in self.packs)

    def spec(self, pack: Pack) -> PackSpec:
        """Returns the spec that the exchange of a dense pack gets: one vector, or whole values."""
        shapes: tuple[tuple[int | None, ...], ...] = ((pack.size,),)
        if pack.root.exchange is not None and pack.root.exchange.whole_values:
            shapes = tuple(self.values[part.value].shape or () for part in pack.slices)
        return PackSpec(dtypes.SUM_DTYPE.get(pack.dtype, pack.dtype), shapes)

    @functools.cached_property
    def stateful(self) -> tuple[Exchange | None, ...]:
        """Returns `stateful`; `stateful[p]` is the exchange of pack `p` if it keeps state."""
        exchanges = [(pack, pack.root.exchange) for pack in self.packs]
        return tuple(
            exchange if exchange and state_of(exchange, self.spec(pack), self.hosts) else None
            for pack, exchange in exchanges
        )

    @functools.cached_property
    def has_state(self) -> bool:
        """Returns whether rounding errors, or state of exchanges, are kept for the next step."""
        return any(self.stateful) or any(
            pack.wire is not None and pack.wire.error_feedback for pack in self.packs
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a short text that is equal for equal plans, on every host."""
        exchanges = [pack.root.exchange and identity(pack.root.exchange) for pack in self.packs]
        return digest([dataclasses.replace(self, why="", algorithm=""), exchanges])

    @functools.cached_property
    def residual_key(self) -> str:
        """Returns a text that names the state of a plan, such as rounding errors, in checkpoints.

        It depends on nothing but the nodes, the values, and the content, trees and codecs of the
        packs; and on the exchange and the number of hosts, where an exchange keeps state.
        """
        packs = []
        for pack, exchange in zip(self.packs, self.stateful, strict=True):
            wire = pack.wire
            key: list[Any] = [
                pack.tree.parents if pack.tree else None,
                {
                    "dtype": wire and wire.dtype,
                    "scale": pack.scaled,
                    "feedback": wire is not None and wire.error_feedback,
                },
                pack.tensors,
            ]
            packs.append(key + ([identity(exchange), self.hosts] if exchange else []))
        return f"2-{digest([self.nodes, self.values, packs])}"

    def num_collectives(self, dtype_copied: Callable[[str], Any]) -> int:
        """Returns the number of collectives between hosts, given what a dtype is gathered as."""
        return sum(
            len(self.exchanged(pack)) + (pack.size is None)  # Sizes are compared first.
            if pack.root.exchange is not None
            else 1 + len(set(map(dtype_copied, self.gathered_dtypes(pack))))
            for pack in self.packs
        )

    def exchanged(self, pack: Pack) -> Sequence[Collective]:
        """Returns the collectives of the exchange of a dense pack; none on one host."""
        exchange = pack.root.exchange
        return () if exchange is None else calls_of(exchange, self.spec(pack), self.hosts)

    def gathered_dtypes(self, pack: Pack) -> set[str]:
        """Returns the dtypes of the tensors of a pack that are gathered between hosts."""
        if pack.kind == "rows":
            return {dtypes.SUM_DTYPE.get(pack.dtype, pack.dtype), "int64"}
        return {self.values[part.value].dtype for part in pack.slices}

    def pack_bytes_between_hosts(self, pack: Pack) -> float:
        """Returns the bytes of a dense pack that each host sends to the others."""
        return sum(collective.bytes_sent(self.hosts) for collective in self.exchanged(pack))

    @property
    def bytes_between_hosts(self) -> int:
        """Returns the bytes of dense values that this host sends to the others, but for NCCL's."""
        return round(sum(self.pack_bytes_between_hosts(pack) for pack in self.packs if pack.tree))

    def bytes_by_edge(self) -> dict[tuple[int, int], int]:
        """Returns the bytes of dense values that each node sends to each other one.

        A leaf sends its values; a node with children sends partial sums, which are wider for 16-bit
        floats; results are sent in the dtype of the values.
        """
        totals: collections.Counter[tuple[int, int]] = collections.Counter()
        for pack in self.packs:
            if pack.tree is None or pack.kind in ("rows", "concat"):
                continue
            size = pack.size or 0
            narrow = dtypes.itemsize(pack.dtype)
            wide = dtypes.itemsize(dtypes.SUM_DTYPE.get(pack.dtype, pack.dtype))
            scale = narrow if pack.scaled else 0
            for child, parent in pack.tree.edges:
                sends = child < self.replicas
                adds = any(other < self.replicas for other in pack.tree.children[child])
                encoded = pack.wire and dtypes.itemsize(pack.wire.dtype)
                if sends or adds:
                    totals[child, parent] += size * (encoded or (wide if adds else narrow)) + scale
                if pack.root.update:  # Variables are sent as they are.
                    totals[parent, child] += size * narrow
                elif pack.to is None or child in pack.to:
                    totals[parent, child] += size * (encoded or narrow) + scale
        return {edge: count for edge, count in totals.items() if count}


def plan_of_bytes(num_devices: int, packs: Iterable[tuple[int, CopyTree, int | None]]) -> Plan:
    """Returns the plan of bytes in packs of some sizes, each with its tree and its window."""
    made: list[Pack] = []
    start = 0
    for size, tree, after in packs:
        tensor = FusedTensor((Slice(0, start, start + size),))
        made.append(Pack("sum", (tensor,), "uint8", tree, after=after))
        start += size
    value = ValueSpec("uint8", (start,))
    return Plan(("",) * num_devices, num_devices, 1, (value,), tuple(made))


def in_turn(sizes: Sequence[int], trees: Sequence[CopyTree]) -> Plan:
    """Gives packs of some bytes the trees in turn, so that the roots spread over the devices."""
    packs = ((size, trees[index % len(trees)], None) for index, size in enumerate(sizes))
    return plan_of_bytes(trees[0].num_devices, packs)


def cut(size: int, num_packs: int) -> tuple[int, ...]:
    """Cuts `size` units into at most `num_packs` sizes, none 0, that differ by at most one."""
    count = min(num_packs, size)
    return tuple(size * (index + 1) // count - size * index // count for index in range(count))


def size_class(num_bytes: int) -> int:
    """Returns a size within an eighth of this one, for which all sizes of its class are planned."""
    shift = max(num_bytes.bit_length() - 3, 0)
    return (num_bytes >> shift << shift) + (1 << shift >> 1)


def digest(value: Any) -> str:
    """Returns a short text that is equal for values with equal JSON."""
    return hashlib.sha256(msgspec.json.encode(value, enc_hook=repr)).hexdigest()[:16]
