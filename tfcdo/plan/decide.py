"""Decides how a batch is reduced: the only place where a plan is made.

`decide` is a pure function: hosts with the same batch, choices and machine get the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

from tfcdo import log
from tfcdo.exchange import dtypes
from tfcdo.exchange.casts import Cast, check_exchange
from tfcdo.exchange.protocol import SUM, Exchange
from tfcdo.plan import algorithms, copy_tree, simulator
from tfcdo.plan.algorithms import PackingOptions
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.plan import (
    Batch,
    FusedTensor,
    Pack,
    Plan,
    Request,
    RootStep,
    Slice,
    ValueSpec,
    size_class,
)
from tfcdo.topology.measurement import Measured
from tfcdo.topology.topology import Topology

# Smaller packs are summed exactly between hosts: a second collective would cost more than the bytes
# that it saves, and counts keep their digits.
MIN_EXCHANGED_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class BetweenHosts:
    """How packs cross the network between hosts."""

    # The most bytes of a pack where the caller does not say: enough to fill a network, and so few
    # that the first packs are sent while the backward pass still computes others.
    bytes_per_pack: int = 4 << 20
    flat: bool = False  # Whether one NCCL collective reduces over all devices of all hosts.
    # How the roots of hosts add up their sums; or a function to an exchange from the path of a
    # value's variable, None if it has none, and the value's spec.
    exchange: Exchange | Callable[[str | None, ValueSpec], Exchange] = SUM

    def exchange_of(self, path: str | None, value: ValueSpec) -> Exchange:
        """Returns the exchange of the gradient of a variable."""
        if isinstance(self.exchange, Exchange):
            return self.exchange
        result = self.exchange(path, value)
        return check_exchange(f"the result of exchange({path!r}, {value})", result)


@dataclasses.dataclass(frozen=True)
class Options:
    """A class's choices: how it reduces whatever it is given."""

    algorithm: algorithms.Algorithm = "auto"  # Gives the copy trees.
    packing: PackingOptions = dataclasses.field(default_factory=PackingOptions)
    measured: Measured | None = None  # The machine; None for the detected one.
    nccl: Literal["never", "always", "auto"] = "never"  # "auto" takes it where it is faster.
    require_nccl: bool = False  # Whether to raise where NCCL was requested and cannot run.
    one_device: bool = False  # Whether batches have a root, on which everything is reduced.
    sparse_as_dense: bool = False  # Whether `tf.IndexedSlices` become tables first.
    sum_equal_rows: bool = False  # Whether rows of one index are added.
    wire: Cast | None = None  # How float32 and float64 gradients are sent; None for as they are.
    saved: Evaluation | None = None  # The file whose plan `algorithm` is.
    between: BetweenHosts | None = None  # None for one host.

    @property
    def topology(self) -> Topology | None:
        """Returns the machine; None for the detected one."""
        return self.measured.topology if self.measured else None


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts about a machine that a decision depends on."""

    topology: Topology
    origin: str = "was detected"  # Where the topology comes from, for readers.
    # For each dtype that NCCL might add, the reason why it cannot, or None. Empty where NCCL
    # is not asked for.
    nccl: tuple[tuple[str, str | None], ...] = ()
    nccl_hosts: str | None = None  # The reason why NCCL does not run between hosts.


# Plans are small and pure; the bound only keeps a process that draws ever new shapes from growing.
@functools.lru_cache(maxsize=512)
def decide(batch: Batch, options: Options, machine: Machine) -> Plan:
    """Decides how a batch is reduced: the values and destinations, by choices and facts."""
    _check_machine(batch, options, machine.topology)
    if batch.op == "gather":
        packs, algorithm, why = _gathered(batch, options, machine), "gather", ""
    elif batch.root is not None or not batch.is_all_reduce:
        packs, algorithm, why = _on_one_device(batch, options, machine)
    elif batch.stays_rows:
        packs, algorithm = _rows(batch, options, machine), "rows"
        why = "values are tf.IndexedSlices"
    else:
        packs, algorithm, why = _all_reduced(batch, options, machine)
    values = tuple(request.value for request in batch.requests)
    return Plan(batch.nodes, batch.replicas, batch.hosts, values, packs, algorithm, why)


def _check_machine(batch: Batch, options: Options, topology: Topology) -> None:
    """Raises `ValueError` unless the topology and plan that were given are for these devices."""
    if not batch.is_all_reduce:
        return
    if options.topology is not None and topology.num_devices != batch.replicas:
        raise ValueError(
            "topology must have as many devices as the values have replicas, "
            f"{batch.replicas}; {topology.name!r} has {topology.num_devices}"
        )
    if options.saved and (reason := options.saved.why_not_on(topology)):
        remedy = f"make one here with `tfcdo plan -t here:{batch.replicas} --save FILE`"
        if options.saved.topology.num_devices == batch.replicas:
            remedy += ", or pass the plan's own machine as topology= to use it all the same"
        raise ValueError(f"plan must be for this machine: {reason}; {remedy}")


def packed_dtype(batch: Batch, request: Request) -> str:
    """Returns the dtype that a value is added in: floats for a mean of integers."""
    dtype = request.value.dtype
    # An accumulation_fn gets tensors as they are; rows are always added.
    if batch.divide is None or (batch.user and not request.value.rows):
        return dtype
    return dtypes.MEAN_DTYPE.get(dtype, dtype)


def nccl_dtypes(batch: Batch, options: Options) -> set[str]:
    """Returns the dtypes for which `decide` asks whether NCCL can add them."""
    if options.nccl == "never" or batch.op == "gather" or not batch.is_all_reduce:
        return set()
    if batch.replicas == 1 or batch.has_owners or batch.stays_rows:
        return set()
    return {
        wire.dtype if wire else packed_dtype(batch, request)
        for request in batch.requests
        for wire in [_wire(batch, request, options)]
    }


def _is_cast(request: Request) -> bool:
    """Returns whether a wire dtype applies to a value."""
    value = request.value
    return not request.exact and not value.rows and value.dtype in dtypes.CAST


def _wire(batch: Batch, request: Request, options: Options) -> Cast | None:
    """Returns how a value is cast where it is copied to another device; None for as it is."""
    wire = options.wire
    if wire is None or not _is_cast(request):
        return None
    holders = {batch.nodes[node] for node in range(batch.replicas)}
    devices = holders | {batch.nodes[node] for node in request.to}
    if wire.error_feedback and holders == {""} and len(devices) > 2:
        return None  # All replicas share one argument: no device could keep its errors.
    # Values of unknown devices are taken to be on different ones.
    if len(devices) == 1 and (devices != {""} or batch.replicas == 1):
        return None
    return wire if batch.is_all_reduce else Cast(wire.dtype)


def _exchange(batch: Batch, request: Request) -> Exchange:
    """Returns how hosts add a value up, where its pack is large enough."""
    if request.exchange is None or not batch.is_all_reduce or not _is_cast(request):
        return SUM
    return request.exchange


def _root_step(batch: Batch, pack: Pack, exchange: Exchange, owner: int | None = None) -> RootStep:
    """Returns the root step of a pack of dense values, which hosts add up by an exchange."""
    small = pack.num_bytes < MIN_EXCHANGED_BYTES  # Or of unknown size.
    between = None if batch.hosts == 1 else SUM if small else exchange
    return RootStep(between, batch.divide, update=owner is not None)


class _Group(NamedTuple):
    """Dense values that are packed together, as they are sent and added in the same way."""

    wire: Cast | None
    scaled: bool  # Whether they are scaled before they are cast.
    exchange: Exchange
    nccl: str | None  # Why NCCL adds them, for readers; None if it does not.
    owner: int | None


def _all_reduced(
    batch: Batch, options: Options, machine: Machine
) -> tuple[tuple[Pack, ...], str, str]:
    """Packs dense values; values with the same encoding are planned together."""
    packs: list[Pack] = []
    reasons: list[tuple[int, str, str]] = []
    for group, values in _groups(batch, options, machine).items():
        made, reason = _packed(batch, group, values, options, machine)
        reasons.append(reason)
        offset = len(packs)
        packs += [
            dataclasses.replace(
                pack,
                wire=group.wire,
                root=_root_step(batch, pack, group.exchange, group.owner),
                after=None if pack.after is None else pack.after + offset,
            )
            for pack in made
        ]
    if not reasons:
        return (), "nothing", "the batch is empty"
    _, name, why = max(reasons)
    return tuple(packs), name, why


def _groups(batch: Batch, options: Options, machine: Machine) -> dict[_Group, dict[int, ValueSpec]]:
    """Groups dense values, by their index and in the dtypes that they are packed in."""
    groups: dict[_Group, dict[int, ValueSpec]] = {}
    for index, request in enumerate(batch.requests):
        dtype = packed_dtype(batch, request)
        wire, owner = _wire(batch, request, options), request.owner
        scaled = wire is not None and dtypes.needs_scale(wire.dtype, dtype)
        nccl = None if owner is not None else _why_nccl(batch, dtype, options, machine, wire)
        group = _Group(wire, scaled, _exchange(batch, request), nccl, owner)
        groups.setdefault(group, {})[index] = dataclasses.replace(request.value, dtype=dtype)
    return groups


def _packed(
    batch: Batch, group: _Group, values: dict[int, ValueSpec], options: Options, machine: Machine
) -> tuple[list[Pack], tuple[int, str, str]]:
    """Packs a group for an owner, NCCL, or trees; also returns its bytes, a name and the reason."""
    cast = group.wire.dtype if group.wire else None
    num_bytes = sum((one.size or 0) * dtypes.itemsize(cast or one.dtype) for one in values.values())
    how, topology = _packing(options, group.exchange), machine.topology
    algorithm: algorithms.Algorithm | None
    if group.owner is not None:
        reason = "with shard_optimizer_state each sum is formed on one device, along a copy tree"
        if options.require_nccl:
            raise RuntimeError(f"NCCL cannot run (require_nccl=True): {reason}")
        if options.nccl == "always":
            log.warn_once(f"NCCL was requested but is not used; using copy trees: {reason}")
        # An owner has one tree, whose root it is.
        how = dataclasses.replace(how, num_packs=0 if how.num_packs == 0 else 1)
        algorithm = (_owner_tree(options, topology, group.owner, batch.num_bytes),)
        name = "owners"
        why = "each device updates its share of the variables (shard_optimizer_state)"
    elif group.nccl is not None:
        how = dataclasses.replace(how, num_packs=1 if how.num_packs is None else how.num_packs)
        algorithm, name, why = None, "NCCL", group.nccl  # Without trees.
    else:
        if cast is not None:
            # They are added in more bytes than they are sent in.
            added = next(iter(values.values())).dtype
            slower = topology.addition_bandwidth * dtypes.itemsize(cast) / dtypes.itemsize(added)
            topology = dataclasses.replace(topology, addition_bandwidth=slower)
        algorithm = _algorithm(options, topology, num_bytes)
        name, why = _reason(batch, options, machine, algorithm, topology, num_bytes)
    packs = algorithms.pack(values, how, algorithm, topology, cast)
    return packs, (num_bytes, name, why)


def _why_nccl(
    batch: Batch, dtype: str, options: Options, machine: Machine, wire: Cast | None
) -> str | None:
    """Returns why NCCL adds values of a dtype; None, and logs the reason, if it does not."""
    between = options.between
    if between is not None and between.flat:
        return "it runs between hosts, over all devices of all of them"
    if options.nccl == "never" or batch.replicas == 1:
        return None
    # NCCL adds encoded values in 16 bits, so only a user who asks for NCCL gets that.
    if between is None and options.nccl == "auto" and wire is not None:
        return None
    problem = machine.nccl_hosts if between else dict(machine.nccl)[wire.dtype if wire else dtype]
    if problem and options.require_nccl:
        raise RuntimeError(f"NCCL cannot run (require_nccl=True): {problem}")
    if between is not None:
        return None
    if options.nccl == "always":
        if not problem:
            return "an NcclAllReduce kernel is registered for these devices"
        log.warn_once(f"NCCL was requested but is not available; using copy trees: {problem}")
        return None
    if problem:
        log.info_once(f"auto takes copy trees, because NCCL cannot run: {problem.split('; ')[0]}")
        return None
    about = size_class(batch.num_bytes)
    beat, reason = _compare_with_nccl(options.measured, about)
    log.info_once(
        f"auto takes {'copy trees' if beat else 'NCCL'} for about {log.format_bytes(about)} "
        f"on each of {batch.replicas} devices: {reason}"
    )
    return None if beat else reason


@functools.lru_cache(maxsize=256)
def _compare_with_nccl(measured: Measured | None, num_bytes: int) -> tuple[bool, str]:
    by_nccl = measured.nccl_seconds(num_bytes) if measured else None
    if measured is None or by_nccl is None:
        return False, "it can run, and topology= has no measurement of it"
    plan = algorithms.make_plan("auto", measured.topology, num_bytes)
    trees = simulator.robust_seconds(plan, measured.topology)
    return trees < by_nccl, (
        f"as measured on {measured.date}, NCCL takes {log.format_seconds(by_nccl)} and copy trees "
        f"{log.format_seconds(trees)}"
    )


def _reason(
    batch: Batch,
    options: Options,
    machine: Machine,
    algorithm: algorithms.Algorithm,
    topology: Topology,
    num_bytes: int,
) -> tuple[str, str]:
    """Returns, for readers, the name of the algorithm of copy trees and the reason for it."""
    place = f"the topology {topology.name!r} {machine.origin}"
    if saved := options.saved:
        packed = saved.resolved == "packed_trees"
        trees = f"packed trees for {saved.topology.name}" if packed else "the algorithm's own trees"
        return saved.resolved, f"the plan was given: {trees}; {place}"
    if not isinstance(algorithm, str):
        return "copy trees", f"they were given; {place}"
    if options.nccl == "always" and batch.replicas > 1:
        problems = [*(problem for _, problem in machine.nccl), machine.nccl_hosts]
        return algorithm, f"NCCL cannot run: {next(filter(None, problems))}"
    if options.algorithm != "auto":
        return algorithm, f"it was asked for; {place}"
    if options.between is not None:
        return algorithm, f"auto found it fastest for packs between hosts; {place}"
    name = algorithms.fastest_algorithm(topology, num_bytes, options.packing.num_packs or None)
    return name, f"auto found it fastest for {num_bytes:,} bytes in the simulator; {place}"


def _algorithm(options: Options, topology: Topology, num_bytes: int) -> algorithms.Algorithm:
    """Returns the algorithm; across a network, the roots of its trees are all devices in turn."""
    if options.between is None or options.algorithm != "auto":
        return options.algorithm
    # Each network interface then sends a share.
    name = algorithms.fastest_algorithm(topology, num_bytes, topology.num_devices)
    return "shuffle" if name == "one_device" else name


def _packing(options: Options, exchange: Exchange) -> PackingOptions:
    """Returns how values are packed; across a network, in packs that begin to leave early."""
    if options.between is None:
        return options.packing
    return dataclasses.replace(
        options.packing,
        num_packs=1 if options.packing.num_packs is None else options.packing.num_packs,
        bytes_per_pack=options.packing.bytes_per_pack or options.between.bytes_per_pack,
        # The backward pass makes the gradients of the last variables first: these leave first.
        last_first=True,
        whole_values=exchange.whole_values,
    )


def _on_one_device(
    batch: Batch, options: Options, machine: Machine
) -> tuple[tuple[Pack, ...], str, str]:
    """Reduces on one node: all values in one pack where it is a replica's, else each on its own."""
    root = batch.requests[0].to[0] if batch.root is None else batch.root
    tree = copy_tree.star(len(batch.nodes), root)
    what = "accumulation_fn is called" if batch.user else "everything is summed"
    why = f"{what} on {batch.nodes[root]}"
    if batch.is_all_reduce and root < batch.replicas and not batch.user and not batch.stays_rows:
        options = dataclasses.replace(
            options, algorithm=(tree,), packing=PackingOptions(1), nccl="never"
        )
        packs, _, _ = _all_reduced(batch, options, machine)
        return packs, "one_device", why
    if batch.stays_rows:
        return _rows(batch, options, machine, tree), "one_device", why
    alone = []
    for index, request in enumerate(batch.requests):
        pack = Pack(
            "user" if batch.user else "sum",
            (_whole(index, request.value.size),),
            packed_dtype(batch, request),
            tree,
            _wire(batch, request, options),
            to=tuple(sorted(set(request.to))),
        )
        root_step = _root_step(batch, pack, _exchange(batch, request))
        alone.append(dataclasses.replace(pack, root=root_step))
    return tuple(alone), "one_device", why


def _whole(index: int, size: int | None) -> FusedTensor:
    return FusedTensor((Slice(index, 0, size),))


def _rows(
    batch: Batch, options: Options, machine: Machine, tree: CopyTree | None = None
) -> tuple[Pack, ...]:
    """Packs the rows of each dtype: their number differs between devices and steps."""
    groups: dict[tuple[str, tuple[int, ...], int | None], list[int]] = {}
    for index, request in enumerate(batch.requests):
        to = () if tree is None else request.to
        key = (packed_dtype(batch, request), to, request.owner)
        groups.setdefault(key, []).append(index)
    if batch.has_owners:
        roots = [owner or 0 for _, _, owner in groups]
        trees = tuple(_owner_tree(options, machine.topology, root, 0) for root in roots)
    elif tree is not None:
        trees = (tree,) * len(groups)
    else:
        trees = _trees(options, machine.topology, len(groups))
    root = RootStep(divide=batch.divide, update=batch.has_owners)
    return tuple(
        Pack(
            "rows",
            tuple(_whole(index, None) for index in members),
            dtype,
            own,
            root=root,
            to=tuple(sorted(set(to))) or None,
            sum_equal_rows=options.sum_equal_rows,
        )
        for ((dtype, to, _), members), own in zip(groups.items(), trees, strict=True)
    )


def _gathered(batch: Batch, options: Options, machine: Machine) -> tuple[Pack, ...]:
    """Gathers all values together, along one tree."""
    if batch.is_all_reduce and batch.root is None:
        [tree] = _trees(options, machine.topology, 1)
        to = None
    else:
        root = batch.requests[0].to[0] if batch.root is None else batch.root
        tree = copy_tree.star(len(batch.nodes), root)
        to = tuple(sorted({node for request in batch.requests for node in request.to}))
    sizes = enumerate(request.value.size for request in batch.requests)
    tensors = tuple(_whole(index, size) for index, size in sizes)
    return (Pack("concat", tensors, "", tree, to=to),)


def _trees(options: Options, topology: Topology, count: int) -> tuple[CopyTree, ...]:
    """Returns the algorithm's trees in turn; sizes are not known, so the trees for tiny values."""
    return algorithms.make_plan(_algorithm(options, topology, 0), topology, count, count).trees


def _owner_tree(options: Options, topology: Topology, owner: int, num_bytes: int) -> CopyTree:
    """Returns the algorithm's tree with this root, or another tree's edges with this root."""
    count, algorithm = topology.num_devices, _algorithm(options, topology, num_bytes)
    if algorithm == "auto":
        algorithm = algorithms.fastest_algorithm(topology, num_bytes, count)
    if algorithm == "one_device":
        return copy_tree.star(count, owner)
    trees = algorithms.make_plan(algorithm, topology, max(num_bytes, count), count).trees
    for tree in trees:
        if tree.root == owner:
            return tree
    return copy_tree.rooted(trees[owner % len(trees)].edges, owner)
