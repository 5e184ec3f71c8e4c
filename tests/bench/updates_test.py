"""Steps of all-reduce plus update take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from absl.testing import absltest
from click.testing import CliRunner

from tfcdo.bench import updates, worker_pool
from tfcdo.cli import bench as bench_cli

_SECONDS = {"tf": 0.4, "tfcdo": 0.3, "sharded": 0.1}


class _FakePool:
    """Answers as a worker would."""

    def __init__(self, kind: str, steps: list[str]) -> None:
        self._kind, self._steps = kind, steps

    def call(self, method: str, timeout: float) -> list[Any]:
        """Answers one call."""
        del timeout
        if method == "report":
            return [{"state_bytes": 8, "peak_memory": 10**9}]
        self._steps.append(self._kind)
        # The first step traces.
        return [_SECONDS[self._kind] * (10 if self._steps.count(self._kind) == 1 else 1)]


class UpdatesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.steps: list[str] = []

        @contextlib.contextmanager
        def start_workers(command: Sequence[str], variables: Any) -> Iterator[_FakePool]:
            del variables
            yield _FakePool(command[3], self.steps)

        self.enter_context(mock.patch.object(worker_pool, "start_workers", start_workers))

    def test_steps_take_turns(self):
        results = updates.run("adam", 4, iterations=3, warmup=1)
        self.assertEqual(self.steps, ["tf", "tfcdo", "sharded"] * 5)
        self.assertEqual([one.seconds for one in results], [0.4, 0.3, 0.1])
        self.assertEqual([one.first_call for one in results], [4.0, 3.0, 1.0])
        self.assertEqual({one.peak_memory for one in results}, {10**9})

    def test_command(self):
        outcome = CliRunner().invoke(bench_cli.bench, ["--optimizer", "adam", "-g", "2", "-n", "2"])
        self.assertEqual(outcome.exit_code, 0, outcome.output)
        self.assertRegex(outcome.output, r"2 devices, all-reduce and adam update of 69.\d MB")
        self.assertRegex(outcome.output, r"shard_optimizer_state=True +100 .* 0.25 +0.33")


if __name__ == "__main__":
    absltest.main()
