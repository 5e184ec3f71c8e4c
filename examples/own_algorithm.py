"""Makes an all-reduce algorithm, simulates and executes it: `python examples/own_algorithm.py`.

An algorithm is a list of copy trees, one for each pack. This one is a ring along the NVLinks of a
DGX-1. The algorithm `ring` follows the device numbers, and some neighbours there have no NVLink.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

import tfcdo
from tfcdo import plan
from tfcdo.plan import CopyTree, path
from tfcdo.topology import preset

ALONG_NVLINKS = (0, 1, 2, 3, 7, 6, 5, 4)


def ring_in_order(order: Sequence[int]) -> tuple[CopyTree, ...]:
    """Returns one path for each device, each beginning, at its root, one device further."""
    # A tree that does not span all devices raises an error.
    return tuple(path((*order[i:], *order[:i]), root=order[i]) for i in range(len(order)))


def milliseconds(algorithm: str | Sequence[CopyTree], num_bytes: int) -> float:
    """Returns the simulated time of an all-reduce on a DGX-1."""
    machine = preset("dgx1")
    made = plan.make_plan(algorithm, machine, num_bytes)
    return 1e3 * plan.robust_seconds(made, machine)


def all_reduce(trees: Sequence[CopyTree], devices: Sequence[str]) -> list[tf.Tensor]:
    """Executes it: sums the replicas' values; returns the sum on each device."""
    strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tfcdo.AllReduceCrossDeviceOps(trees)
    )

    def on_each_replica() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return context.all_reduce("SUM", rank * tf.range(100.0))

    totals = tf.function(lambda: strategy.run(on_each_replica))()
    return list(strategy.experimental_local_results(totals))


def main() -> None:
    """Shows the first tree, the time and the sums of the algorithm."""
    trees = ring_in_order(ALONG_NVLINKS)
    print("the first tree's parents:", trees[0].parents)
    for name, algorithm in ("ring", "ring"), ("along NVLinks", trees):
        print(f"100 MB on a DGX-1, {name}: {milliseconds(algorithm, 10**8):.1f} ms")
    totals = all_reduce(trees, tfcdo.configure_virtual_cpus(8))
    print("the last element of the sum on each device:", {float(total[-1]) for total in totals})


if __name__ == "__main__":
    main()
