"""Shared by tests of planning: they do not use earlier plans, and plan in less time."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from unittest import mock

from absl.testing import parameterized

from tfcdo.plan import algorithms, packed_trees, simulator


def forget() -> None:
    """Clears this process's earlier plans, as if it had just begun."""
    for remembers in (algorithms._make_plan, algorithms._decide, packed_trees._search):
        remembers.cache_clear()


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


class PlanTestCase(parameterized.TestCase):
    """A test that remembers no plans, with short searches."""

    # One test is about how good a search is; all others need not wait for it.
    tasks_per_search = 2_000

    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(packed_trees, "_TASKS", self.tasks_per_search)
        patch.start()
        self.addCleanup(patch.stop)
        forget()
        self.addCleanup(forget)
