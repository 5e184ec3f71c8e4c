"""Shared by tests of planning: they remember nothing of earlier tests."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from unittest import mock

from absl.testing import parameterized

from tfcdo.plan import algorithms
from tfcdo.plan import annealing
from tfcdo.plan import search
from tfcdo.plan import simulator


def forget() -> None:
    """Clears what this process remembers of earlier plans, as if it had just begun."""
    for remembers in (
        algorithms._make_schedule,
        algorithms._decide,
        search._best_packing,
        search._searched,
        search._trees,
    ):
        remembers.cache_clear()


@contextlib.contextmanager
def counted_work() -> Iterator[collections.Counter[str]]:
    """Counts the searches, the simulated tasks and the tasks of the longest simulation."""
    counts: collections.Counter[str] = collections.Counter()

    def counted(run):
        def run_counted(graph, *arguments):
            counts["tasks"] += len(graph.names)
            counts["longest"] = max(counts["longest"], len(graph.names))
            return run(graph, *arguments)

        return run_counted

    def counted_search(*arguments, original=search.search):
        counts["searches"] += 1
        return original(*arguments)

    with contextlib.ExitStack() as stack:
        for name in ("run_shuffled", "run_longest_path_first"):
            run = counted(getattr(simulator, name))
            stack.enter_context(mock.patch.object(simulator, name, run))
        stack.enter_context(mock.patch.object(search, "search", counted_search))
        yield counts


class PlanTestCase(parameterized.TestCase):
    """A test that remembers no plans, with short searches."""

    # How good a search is, is one test's business; all others need not wait for it.
    tasks_per_search = 2_000

    def setUp(self) -> None:
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(mock.patch.object(annealing, "TASKS_PER_SEARCH", self.tasks_per_search))
        forget()
        self.addCleanup(forget)
