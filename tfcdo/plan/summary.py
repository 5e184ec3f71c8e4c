"""Facts about a plan: its schedule, bytes, collectives, and the name of its rounding errors."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from tfcdo import dtypes
from tfcdo.exchange.protocol import Collective, identity
from tfcdo.plan.plan import Plan, PlannedPack, digest
from tfcdo.plan.schedule import Pack, Schedule


def schedule(plan: Plan) -> Schedule | None:
    """Returns the packs in bytes, as the simulator takes them; None if a size is not known."""
    packs: list[Pack] = []
    for pack in plan.packs:
        if pack.tree is None or not pack.num_sent_bytes:
            return None
        start = packs[-1].stop if packs else 0
        stop = start + pack.num_sent_bytes
        packs.append(Pack(start, stop, pack.tree, pack.after, _bytes_between_hosts(plan, pack)))
    return Schedule(len(plan.nodes), packs[-1].stop if packs else 0, tuple(packs))


def residual_key(plan: Plan) -> str:
    """Returns a text that names the state of a plan, such as rounding errors, in checkpoints.

    It depends on nothing but the nodes, the values, and the content, trees and codecs of the packs;
    and on the exchange and the number of hosts, where an exchange keeps state.
    """
    packs = [
        [
            pack.tree.parents if pack.tree else None,
            _wire_key(pack),
            pack.tensors,
            *(
                [identity(pack.root.exchange), plan.hosts]
                if stateful and pack.root.exchange
                else ()
            ),
        ]
        for pack, stateful in zip(plan.packs, plan.stateful, strict=True)
    ]
    return f"2-{digest([plan.nodes, plan.values, packs])}"


def _wire_key(pack: PlannedPack) -> dict[str, Any]:
    wire = pack.wire
    feedback = wire is not None and wire.error_feedback
    return {"dtype": wire and wire.dtype, "scale": pack.scaled, "feedback": feedback}


def num_collectives(plan: Plan, copied_dtypes: Callable[[set[str]], int]) -> int:
    """Returns the number of collectives between hosts.

    `copied_dtypes` gives, for the dtypes of a pack, the number of dtypes that gather them.
    """
    return sum(
        len(exchanged(plan, pack))
        if pack.root.exchange is not None
        else 1 + copied_dtypes(gathered_dtypes(plan, pack))
        for pack in plan.packs
    )


def exchanged(plan: Plan, pack: PlannedPack) -> Sequence[Collective]:
    """Returns the collectives of the exchange of a dense pack; none on one host."""
    exchange = pack.root.exchange
    return () if exchange is None else tuple(exchange.cost(plan.spec(pack), plan.hosts))


def gathered_dtypes(plan: Plan, pack: PlannedPack) -> set[str]:
    """Returns the dtypes of the tensors of a pack that are gathered between hosts."""
    if pack.kind == "rows":
        return {dtypes.SUM_DTYPE.get(pack.dtype, pack.dtype), "int64"}
    return {plan.values[part.value].dtype for part in pack.slices}


def bytes_by_edge(plan: Plan) -> dict[tuple[int, int], int]:
    """Returns the bytes of dense values that each node sends to each other one.

    A leaf sends its values; a node with children sends partial sums, which are wider for 16-bit
    floats; results are sent in the dtype of the values.
    """
    totals: collections.Counter[tuple[int, int]] = collections.Counter()
    for pack in plan.packs:
        if pack.tree is None or pack.kind in ("rows", "concat"):
            continue
        size = pack.size or 0
        narrow = dtypes.itemsize(pack.dtype)
        wide = dtypes.itemsize(dtypes.SUM_DTYPE.get(pack.dtype, pack.dtype))
        scale = narrow if pack.scaled else 0
        for child, parent in pack.tree.edges:
            sends = child < plan.replicas
            adds = any(other < plan.replicas for other in pack.tree.children[child])
            encoded = pack.wire and dtypes.itemsize(pack.wire.dtype)
            if sends or adds:
                totals[child, parent] += size * (encoded or (wide if adds else narrow)) + scale
            if pack.root.update:  # Variables are sent as they are.
                totals[parent, child] += size * narrow
            elif pack.to is None or child in pack.to:
                totals[parent, child] += size * (encoded or narrow) + scale
    return {edge: count for edge, count in totals.items() if count}


def bytes_between_hosts(plan: Plan) -> int:
    """Returns the bytes of dense values that this host sends to the others, but for NCCL's."""
    return round(
        sum(_bytes_between_hosts(plan, pack) for pack in plan.packs if pack.tree is not None)
    )


def _bytes_between_hosts(plan: Plan, pack: PlannedPack) -> float:
    return sum(collective.bytes_sent(plan.hosts) for collective in exchanged(plan, pack))
