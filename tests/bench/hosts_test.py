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

# In the order in which they take their turns.
_SENT = {
    "tfcdo": 2000,
    "tfcdo bfloat16": 1000,
    "tfcdo int8": 500,
    "tf": 3000,
    "computing alone": 10,
}
_SECONDS = {
    "tfcdo": 0.3,
    "tfcdo bfloat16": 0.25,
    "tfcdo int8": 0.22,
    "tf": 0.4,
    "computing alone": 0.2,
}


class _FakePool:
    """Answers as two workers would: the second is always slower, and both send."""

    def __init__(self) -> None:
        self.sent = 0
        self.steps: list[str] = []

    def call(self, method: str, timeout: float, name: str = "") -> list[Any]:
        """Answers one call."""
        del timeout
        if method == "gradient_bytes":
            return [1000] * 2
        if method == "num_wrong":
            return [0, 3] if name == "tf" else [0, 0]
        self.steps.append(name)
        self.sent += _SENT[name]
        return [0.1, _SECONDS[name] + len(self.steps) * 1e-6]


class HostsTest(absltest.TestCase):
    def test_steps_take_turns_and_each_is_counted(self):
        pool = _FakePool()
        start_workers = mock.patch.object(
            worker_pool, "start_workers", lambda *_: contextlib.nullcontext(pool)
        )
        opened = mock.Mock(command=())
        opened.count_bytes.side_effect = lambda: pool.sent
        with start_workers:
            results = hosts.run(opened, 2, 3, iterations=4, warmup=1)
        self.assertEqual(pool.steps, [*_SENT] * 5)
        # A step ends when the slowest worker's does; the first round is warm-up.
        for one in results:
            self.assertAlmostEqual(one.seconds, _SECONDS[one.kind], places=4)
            self.assertEqual(one.bytes_sent, _SENT[one.kind])
        self.assertEqual([one.wrong for one in results], [0, 0, 0, 3, None])
        self.assertEqual((results[0].size, results[0].num_devices), (1000, 3))

    def test_both_strategies_sum_right_and_tfcdo_sends_less(self):
        with self._open() as opened:
            results = hosts.run(opened, 2, 2, iterations=1, warmup=1, num_blocks=1)
        for one in results[:-1]:
            self.assertEqual(one.wrong, 0, one.name)
        if not opened.is_own:
            return  # Other programs' bytes are counted, too.
        # A ring over 4 devices of 2 hosts sends 3 times the gradients, one over 2 hosts twice.
        for one, times in zip(results, (2.0, 1.0, 0.51, 3.0, 0.0), strict=True):
            self.assertAlmostEqual((one.bytes_sent or 0.0) / one.size, times, delta=0.1)

    @contextlib.contextmanager
    def _open(self) -> Iterator[link.Loopback]:
        with mock.patch.object(sys, "executable", warm_python.executable()):
            try:
                with link.open_link(None) as opened:
                    yield opened
            except link.LinkError:
                yield link.shared_link()  # As the command does, which says so.

    def test_least_bytes_are_what_a_ring_sends(self):
        for workers, size in itertools.product((2, 3, 8), (24, 240)):
            # Each sends 2 (N - 1) parts of a N-th.
            expected = workers * 2 * (workers - 1) * size // workers
            self.assertEqual(hosts.least_bytes(workers, size), expected)


if __name__ == "__main__":
    absltest.main()
