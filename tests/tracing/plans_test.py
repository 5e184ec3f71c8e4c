"""Which plan a trace shows, of several all-reduces with one scope."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import testing_utils as tu
import tracing_testing

import tfcdo
from tfcdo.execute.interpreter import recently_planned
from tfcdo.plan import copy_tree
from tfcdo.tracing import edges, recording


class OtherPlansTest(tf.test.TestCase):
    """Of several plans with one scope, the one that ran is shown."""

    def trace_of(self, devices: Sequence[int], *, between: Any) -> Any:
        """Records a step on some devices, after something else was done."""
        ops = tfcdo.AllReduceCrossDeviceOps([copy_tree.chain(3, 0)])
        step = tracing_testing.step_on(ops, devices)
        step()
        between()
        profiler = recording.Profiler()
        profiler.start()
        step()
        step()
        return profiler.stop()

    def check(self, found: Any, devices: Sequence[int]) -> None:
        (runs,) = found.runs_of_step().values()
        plan: Any = edges.plan_of(runs, found.planned)
        self.assertEqual(tuple(map(tu.device_name, devices)), plan.devices)
        copies = {run.way for run in runs if run.kind == edges.REDUCE}
        self.assertEqual({"1→0", "2→1"}, copies)
        lanes = {run.lane for run in found.planned_runs(runs)}
        self.assertContainsSubset(copies, lanes)

    def test_the_same_devices_in_another_order(self):
        for devices, other in (((0, 1, 2), (2, 0, 1)), ((1, 0, 2), (1, 2, 0))):
            star = tfcdo.AllReduceCrossDeviceOps([copy_tree.chain(3, 0)])
            found = self.trace_of(devices, between=tracing_testing.step_on(star, other))
            self.check(found, devices)

    def test_explaining_is_no_plan(self):
        ops = tfcdo.AllReduceCrossDeviceOps([copy_tree.chain(3, 0)])
        before = recently_planned()
        told = ops.explain([(60_000,)], devices=tu.device_names(3)[::-1])
        self.assertEqual(before, recently_planned())
        self.assertLen(told.packs, 1)
        devices = (0, 1, 2)
        explain = functools.partial(ops.explain, [(60_000,)], devices=tu.device_names(3)[::-1])
        self.check(self.trace_of(devices, between=explain), devices)

    def test_two_orders_in_one_profile(self):
        star = tfcdo.AllReduceCrossDeviceOps([copy_tree.chain(3, 0)])
        steps = [tracing_testing.step_on(star, order) for order in ((0, 1, 2), (2, 0, 1))]
        for step in steps:
            step()
        profiler = recording.Profiler()
        profiler.start()
        for step in steps:
            step()
        runs = profiler.stop().runs
        copies = [run.way for run in runs if run.kind == edges.REDUCE]
        self.assertCountEqual(["1→0", "2→1"] * 2, copies)


if __name__ == "__main__":
    tf.test.main()
