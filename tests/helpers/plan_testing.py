"""What tests of planning share: they neither read nor write what earlier runs have found."""

from __future__ import annotations

import contextlib
import os
import tempfile
from unittest import mock

from absl.testing import parameterized

from tfcdo.plan import search


class PlanTestCase(parameterized.TestCase):
    """A test with a cache directory of its own and short searches.

    Attributes:
      cache: the cache directory.
    """

    # How good a search is, is one test's business; all others need not wait for it.
    tasks_per_search = 2_000

    def setUp(self) -> None:
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.cache = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, {"TFCDO_CACHE_DIR": self.cache}))
        stack.enter_context(mock.patch.object(search, "_TASKS_PER_SEARCH", self.tasks_per_search))
