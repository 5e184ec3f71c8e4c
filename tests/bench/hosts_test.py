from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import warm_python
from absl.testing import absltest

from tfcdo.bench import hosts, link, worker_pool


class _FakePool:
    """Answers as two workers would: the second is always slower, and both send."""

    def __init__(self, sent: list[int]) -> None:
        self.sent = sent
        self.steps: list[str] = []

    def request(self, content: dict[str, Any], timeout: float) -> list[Any]:
        """Answers one request."""
        if content["do"] == "count bytes":
            return [1000] * 2
        if content["do"] == "count wrong":
            return [0, 3] if content["name"] == "tf" else [0, 0]
        self.steps.append(content["name"])
        kind, number = content["name"], len(self.steps)
        sent = {"tf": 3000, "tfcdo": 2000, "tfcdo bfloat16": 1000, "computing alone": 10}
        seconds = {"tf": 0.4, "tfcdo": 0.3, "tfcdo bfloat16": 0.25, "computing alone": 0.2}
        self.sent[0] += sent[kind]
        return [0.1, seconds[kind] + number * 1e-6]


class HostsTest(absltest.TestCase):
    def test_steps_take_turns_and_each_is_counted(self):
        sent = [0]
        pool = _FakePool(sent)

        @contextlib.contextmanager
        def start_workers(*arguments: Any) -> Iterator[_FakePool]:
            del arguments
            yield pool

        opened = mock.Mock(command=(), rate=link.parse_rate("1mbit"))
        opened.count_bytes.side_effect = lambda: sent[0]
        with mock.patch.object(worker_pool, "start_workers", start_workers):
            results = hosts.run(hosts.HostsSettings(2, 3, iterations=4, warmup=1), opened)
        self.assertEqual(pool.steps, ["tfcdo", "tfcdo bfloat16", "tf", "computing alone"] * 5)
        ours, cast, theirs, alone = results
        # A step ends when the slowest worker's does; the first round is warm-up.
        self.assertAlmostEqual(ours.seconds, 0.3, places=4)
        self.assertAlmostEqual(cast.seconds, 0.25, places=4)
        self.assertAlmostEqual(theirs.seconds, 0.4, places=4)
        self.assertAlmostEqual(alone.seconds, 0.2, places=4)
        self.assertEqual([one.bytes_sent for one in results], [2000, 1000, 3000, 10])
        self.assertEqual([one.wrong for one in results], [0, 0, 3, None])
        self.assertEqual((ours.num_workers, ours.num_devices, ours.rate), (2, 3, "1mbit"))

    def test_both_strategies_sum_right_and_tfcdo_sends_less(self):
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(link.open_link(None))
            except link.LinkError:
                opened = link.shared_link()  # As the command does, which says so.
            stack.enter_context(mock.patch.object(sys, "executable", warm_python.executable()))
            results = hosts.run(
                hosts.HostsSettings(2, 2, iterations=1, warmup=1, num_blocks=1), opened
            )
        ours, cast, theirs, alone = results
        for one in (ours, cast, theirs):
            self.assertEqual(one.wrong, 0, one.name)
        if not opened.is_own:
            return  # Other programs' bytes are counted, too.
        # A ring over 4 devices of 2 hosts sends 3 times the gradients, one over 2 hosts twice.
        self.assertAlmostEqual(theirs.bytes_sent / theirs.gradient_bytes, 3.0, delta=0.1)
        self.assertAlmostEqual(ours.bytes_sent / ours.gradient_bytes, 2.0, delta=0.1)
        self.assertAlmostEqual(cast.bytes_sent / ours.gradient_bytes, 1.0, delta=0.1)
        self.assertLess(alone.bytes_sent, 0.05 * ours.bytes_sent)

    def test_least_bytes_are_what_a_ring_sends(self):
        for workers, size in itertools.product((2, 3, 8), (24, 240)):
            # Each sends 2 (N - 1) parts of a N-th.
            expected = workers * 2 * (workers - 1) * size // workers
            self.assertEqual(hosts.least_bytes(workers, size), expected)


if __name__ == "__main__":
    absltest.main()
