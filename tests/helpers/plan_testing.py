"""Shared by tests of planning: drawn plans, and searches that remember nothing and end soon."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

from absl.testing import parameterized
from drawn_machines import draw_machine
from hypothesis import strategies as st

from tfcdo.plan import algorithms, packed_trees, simulator
from tfcdo.plan.copy_tree import CopyTree, rooted
from tfcdo.plan.plan import Plan, plan_of_bytes
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology


@contextlib.contextmanager
def counted_work() -> Iterator[collections.Counter[str]]:
    """Counts the searches, the simulated tasks and the tasks of the longest simulation."""
    counts: collections.Counter[str] = collections.Counter()

    def counted_run(graph, *arguments, original=simulator.run):
        counts["tasks"] += len(graph.names)
        counts["longest"] = max(counts["longest"], len(graph.names))
        return original(graph, *arguments)

    def counted_trial(*arguments, original=packed_trees._Trial):
        counts["searches"] += 1
        return original(*arguments)

    with (
        mock.patch.object(simulator, "run", counted_run),
        mock.patch.object(packed_trees, "_Trial", counted_trial),
    ):
        yield counts


@st.composite
def any_plans(draw) -> tuple[Plan, Topology]:
    """Draws a few packs on any trees, and a small machine, some of whose links share resources."""
    devices = draw(st.integers(1, 5))
    # Not "shared_memory": where copies take no time, "at the same time" is a matter of taste.
    names = st.sampled_from(["pcie", "nvswitch", "dgx1", "fully_connected"])
    machine = draw(
        st.builds(preset, names, st.just(devices))
        | st.builds(draw_machine, st.just(max(devices, 2)), st.sampled_from(range(9)))
    )
    devices = machine.num_devices
    if draw(st.booleans()):
        adding = {"addition_bandwidth": 2e10, "serial_reduction": draw(st.booleans())}
        machine = dataclasses.replace(machine, **adding)
    packs: list[tuple[int, CopyTree, int | None]] = []
    for index in range(draw(st.integers(1, 5))):
        after = draw(st.none() | st.integers(0, index - 1)) if index else None
        edges = [(device, draw(st.integers(0, device - 1))) for device in range(1, devices)]
        tree = rooted(edges, draw(st.integers(0, devices - 1)))
        size = draw(st.sampled_from([1, 1000, 500_000, 3_000_000]))
        packs.append((size, tree if after is None else packs[after][1], after))
    return plan_of_bytes(devices, packs), machine


class PlanTestCase(parameterized.TestCase):
    """A test that remembers no plans, with short searches."""

    tasks_per_search = 2_000

    def setUp(self) -> None:
        super().setUp()
        self.enter_context(mock.patch.object(packed_trees, "_TASKS", self.tasks_per_search))
        for remembers in (algorithms._make_plan, algorithms._decide, packed_trees._search):
            remembers.cache_clear()
            self.addCleanup(remembers.cache_clear)
