"""The plan of an all-reduce: one immutable value that says everything that will happen.

A plan is a list of packs. Each pack is reduced up a copy tree, takes the root step, and is
broadcast down. `tfcdo.plan.decide` makes plans, `tfcdo.execute.interpreter` turns them into ops.
Everything else about an all-reduce (explanation, fingerprint, number of collectives, keys of
residuals, simulated time) is computed from this value.

Devices are known by index: a node. Nodes `0..replicas - 1` are the replicas; later ones are
destinations without a value.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from typing import Any, Literal

import msgspec

from tfcdo.plan import dtypes
from tfcdo.plan.copy_tree import CopyTree

VERSION = 1
# Shares are a multiple of this many values, 64 bytes: TensorFlow takes a tensor apart without
# copying it where the parts are aligned.
SHARE_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class ValueSpec:
    """One value, as far as it is known while a function is traced.

    Attributes:
      dtype: the name of its dtype.
      shape: its dimensions, None for an unknown one; None if not even their number is known. The
        number of rows is left out: it differs between replicas and steps.
      rows: whether it is a `tf.IndexedSlices` that stays one.
      table: whether it is a `tf.IndexedSlices` that becomes the table that it stands for first.
    """

    dtype: str
    shape: tuple[int | None, ...] | None
    rows: bool = False
    table: bool = False

    @functools.cached_property
    def size(self) -> int | None:
        """Returns the number of elements; None if it is not known until the step runs."""
        if self.shape is None or None in self.shape:
            return None
        return math.prod(self.shape)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.shape is None:
            return f"{'rows of ' * self.rows}{self.dtype}[...]"
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{'rows of ' * self.rows}{self.dtype}[{sizes}]"


@dataclasses.dataclass(frozen=True)
class Request:
    """One value to reduce, and where to.

    Attributes:
      value: the value.
      to: the nodes that get the result, in the caller's order.
      exact: whether it is never rounded: only gradients are.
      owner: the node that updates its variable with the sum; None if the sum itself is sent.
    """

    value: ValueSpec
    to: tuple[int, ...]
    exact: bool = False
    owner: int | None = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """A caller's question: values that are reduced together.

    Attributes:
      op: "sum", "mean" or "gather".
      replicas: the number of replicas on this host.
      hosts: the number of hosts.
      nodes: the names of the devices, such as "GPU:0"; "" for a device that is not known.
      requests: the values and destinations; either all dense (or to become so), or all rows.
      root: the node that everything is reduced on; None to choose.
      user: whether an accumulation_fn combines the values.
    """

    op: Literal["sum", "mean", "gather"]
    replicas: int
    hosts: int
    nodes: tuple[str, ...]
    requests: tuple[Request, ...]
    root: int | None = None
    user: bool = False

    @property
    def stays_rows(self) -> bool:
        """Returns whether the values are `tf.IndexedSlices` that stay ones."""
        return bool(self.requests) and self.requests[0].value.rows

    @property
    def has_owners(self) -> bool:
        """Returns whether the variables of the values have owners, which update them."""
        return any(request.owner is not None for request in self.requests)

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
    """A range of the elements of one flattened value.

    Attributes:
      value: the value's index.
      start: the first element.
      stop: one past the last element; None for a whole value of unknown size.
    """

    value: int
    start: int
    stop: int | None

    @property
    def size(self) -> int:
        """Returns the number of elements; 0 if it is not known."""
        return 0 if self.stop is None else self.stop - self.start


@dataclasses.dataclass(frozen=True)
class FusedTensor:
    """Slices that are sent as one tensor.

    Attributes:
      slices: the slices, in the order in which they are laid; a single one is sent as it is.
      stacked: whether they are whole values of one shape, stacked along a new first axis. Otherwise
        they are flattened and concatenated.
    """

    slices: tuple[Slice, ...]
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class Codec:
    """How values are encoded where they are copied.

    Attributes:
      dtype: the dtype that they are cast to; None to send them as they are.
      scale: whether they are multiplied by a scale first, as the dtype's range is smaller.
      feedback: whether the rounding errors are added to the values of the next step.
      block: the most values that have a scale of their own; None for one scale.
    """

    dtype: str | None = None
    scale: bool = False
    feedback: bool = False
    block: int | None = None

    def share_layout(self, size: Any, hosts: int) -> tuple[Any, Any]:
        """Returns how an encoded share of values is laid out: the number and size of its blocks.

        The blocks are equal, so that a share has few values more than it must have. `size` is the
        number of values of all shares, at least 1; it may be a tensor.
        """
        blocks = 1 if self.block is None else -(-size // (hosts * self.block))
        # Values of 8 bits are sent in pairs.
        unit = SHARE_ALIGNMENT if self.block is None else 2
        return blocks, -(-size // (hosts * blocks * unit)) * unit

    def share_bytes(self, size: int, hosts: int, dtype: str) -> int:
        """Returns the bytes of an encoded share of values of a dtype, with its scales."""
        blocks, block = self.share_layout(size, hosts)
        scales = blocks * dtypes.itemsize(dtype) if self.scale else 0
        return int(blocks * block * dtypes.itemsize(self.dtype or dtype) + scales)


IDENTITY = Codec()


@dataclasses.dataclass(frozen=True)
class RootStep:
    """The root's work on a sum, in this order, before the result is broadcast.

    Attributes:
      hosts: how the sums of other hosts are added: "" for one host, "sum" by one collective,
        "shares" by an all-to-all and a gather of encoded values, "gather" for rows and
        concatenations.
      codec: how values are encoded between hosts, for "shares".
      divide: the number of replicas of all hosts, for a mean; None for a sum.
      update: whether the root updates variables with the sum and the variables are broadcast, in
        their own dtype, instead of the sum.
    """

    hosts: Literal["", "sum", "shares", "gather"] = ""
    codec: Codec = IDENTITY
    divide: int | None = None
    update: bool = False


@dataclasses.dataclass(frozen=True)
class PlannedPack:
    """Values, or parts of values, that are reduced together.

    Attributes:
      kind: how a node combines its children's parts: "sum"; "user" for an accumulation_fn; "rows"
        adds rows by index; "concat" gathers.
      tensors: the content, in order.
      dtype: the dtype that values are packed in; "" for a gather, which mixes them.
      tree: the copy tree over all nodes; None where NCCL reduces, over all devices of all hosts.
      codec: how values are encoded on the edges of the tree, or before NCCL.
      root: the root step.
      to: the nodes that get the result; None for all.
      tables: whether rows are added as tables: "never", or "smaller" where the tables have fewer
        bytes, which is found when the step runs.
      after: the index of an earlier pack with the same tree, whose result a leaf waits for before
        it sends this pack; None for no such window.
    """

    kind: Literal["sum", "user", "rows", "concat"]
    tensors: tuple[FusedTensor, ...]
    dtype: str
    tree: CopyTree | None
    codec: Codec = IDENTITY
    root: RootStep = RootStep()
    to: tuple[int, ...] | None = None
    tables: Literal["never", "smaller"] = "never"
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
        return (self.size or 0) * dtypes.itemsize(self.codec.dtype or self.dtype)

    @property
    def name(self) -> str:
        """Returns the first part of the name of its scope in a graph."""
        return {"rows": "rows", "concat": "gather"}.get(self.kind, "pack")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A whole all-reduce. A plan that misses an element, or packs one twice, cannot be built.

    Attributes:
      nodes: the names of the devices, such as "GPU:0"; "" for a device that is not known.
      replicas: the number of replicas of this host; nodes after them have no value.
      hosts: the number of hosts.
      values: the values.
      packs: the packs, in the order in which they are sent.
      algorithm: the name of the way in which the first values are reduced, for people.
      why: why that is, for people; not part of the fingerprint.

    Raises:
      ValueError: if an element is missing or packed twice, a tree does not span the nodes, or a
        window does not name an earlier pack of the same tree.

    Example:
      >>> from tfcdo.plan.copy_tree import star
      >>> pack = PlannedPack("sum", (FusedTensor((Slice(0, 0, 6),)),), "float32", star(2))
      >>> Plan(("CPU:0", "CPU:1"), 2, 1, (ValueSpec("float32", (3, 2)),), (pack,)).packs[0].size
      6
    """

    nodes: tuple[str, ...]
    replicas: int
    hosts: int
    values: tuple[ValueSpec, ...]
    packs: tuple[PlannedPack, ...]
    algorithm: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        for index, pack in enumerate(self.packs):
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
    def casts(self) -> tuple[str | None, ...]:
        """Returns `casts`; `casts[v]` is the dtype that value `v` is cast to first, if any."""
        found = {part.value: pack.dtype for pack in self.packs for part in pack.slices}
        return tuple(
            None if found[index] in ("", value.dtype) else found[index]
            for index, value in enumerate(self.values)
        )

    @functools.cached_property
    def one_function(self) -> bool:
        """Returns whether its ops wait for each other, so that they must run at the same time."""
        return any(pack.tree is None for pack in self.packs)

    @property
    def over_hosts(self) -> bool:
        """Returns whether NCCL reduces over all devices of all hosts, without copy trees."""
        return self.hosts > 1 and self.one_function

    @functools.cached_property
    def has_feedback(self) -> bool:
        """Returns whether rounding errors are kept for the next step."""
        return any(pack.codec.feedback or pack.root.codec.feedback for pack in self.packs)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a short text that is equal for equal plans, on every host."""
        return digest([VERSION, dataclasses.replace(self, why="", algorithm="")])


def digest(value: Any) -> str:
    """Returns a short text that is equal for values with equal JSON."""
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
