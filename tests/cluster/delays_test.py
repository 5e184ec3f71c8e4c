"""Delays of hosts, from made-up times of their collectives."""

from __future__ import annotations

from unittest import mock

import numpy as np
from absl import logging
from absl.testing import absltest, parameterized

from tfcdo.cluster import config, progress, protocol, watch

_TASKS = tuple(
    config.ClusterTask("worker", host, f"{'abcd'[host]}:{host + 1}") for host in range(4)
)


def made_kind(name, times, begun=None):
    """A kind whose uses entered and left collectives then: `[use, collective, 2]`."""
    times = np.asarray(times, np.float64)
    uses, collectives, _ = times.shape
    kept = np.zeros(progress.events_kept(collectives)).reshape(-1, collectives, 2)
    for use in range(max(0, uses - len(kept)), uses):
        kept[use % len(kept)] = times[use]
    marks = mock.Mock()
    marks.times.return_value = kept.ravel()
    count = 2 * uses * collectives if begun is None else begun
    marks.count.return_value = count
    description = {"what": "all-reduce", "collectives": collectives, "plan": "f" * 64}
    return progress.Kind(name, description, marks, count)


def steps_of(host_waits, step=0.5, first=1000.0):
    """Times of steps with one collective, in which a host waits so long."""
    waits = np.asarray(host_waits)
    left = first + step * np.arange(1, len(waits) + 1)
    return np.stack([left - waits, left], -1)[:, np.newaxis]


class MeasureTest(parameterized.TestCase):
    # With many steps, the first times are overwritten; an unfinished collective does not count.
    @parameterized.parameters((50, 0), (2500, 0), (16, 1))
    def test_the_waits_of_the_last_steps(self, steps, unfinished):
        waits = np.random.default_rng(1).uniform(0.0, 0.4, steps)
        result = watch.measure([made_kind("k", steps_of(waits), begun=2 * steps - unfinished)])["k"]
        whole = steps - unfinished
        self.assertEqual(whole - 1, result.last)
        np.testing.assert_allclose(result.seconds, waits[1:whole][-20:], atol=2e-6)
        self.assertAlmostEqual(0.5, result.step_seconds, places=6)

    def test_steps_of_which_collectives_are_forgotten_do_not_count(self):
        often = steps_of(np.full(2100, 0.1))
        seldom = steps_of(np.zeros(2100))[69::70] + 0.2
        result = watch.measure([made_kind("often", often), made_kind("seldom", seldom)])
        np.testing.assert_allclose(result["seldom"].seconds, np.full(14, 7.0), atol=2e-6)

    def test_a_step_has_the_waits_of_all_its_collectives(self):
        # Twice a step, 0.1 and 0.02; and 3 packs, once a step, each 0.01.
        often = np.stack([steps_of(np.full(30, 0.1)), steps_of(np.full(30, 0.02)) + 0.11], 1)
        once = [steps_of(np.full(30, 0.01)) + shift for shift in (0.2, 0.22, 0.24)]
        kinds = {"often": often.reshape(60, 1, 2), "once": np.concatenate(once, 1)}
        result = watch.measure([made_kind(*kind) for kind in kinds.items()])["once"]
        np.testing.assert_allclose(result.seconds, np.full(20, 0.15), atol=2e-6)
        self.assertAlmostEqual(0.5, result.step_seconds, places=6)

    def test_nothing_from_few_steps(self):
        for steps in (0, 1, 10):
            self.assertEmpty(watch.measure([made_kind("k", steps_of(np.full(steps, 0.1)))]))


class CompareTest(parameterized.TestCase):
    def compared(self, waits, step=0.5):
        """Compares hosts that wait so long, `[host, step]`, and whose clocks differ."""
        times = [steps_of(own, step, first=7e6 * host) for host, own in enumerate(waits)]
        return watch.compare([watch.measure([made_kind("k", own)]) for own in times])

    @parameterized.parameters(2, 3, 4)
    def test_the_host_that_waits_least(self, hosts):
        noise = np.random.default_rng(3).uniform(0.0, 0.005, (hosts, 30))
        noise[np.arange(hosts) != 1] += 0.18
        result = self.compared(noise)
        self.assertEqual(list(range(hosts)), [one.host for one in result])
        self.assertEqual([host == 1 for host in range(hosts)], [one.is_slow for one in result])
        self.assertAlmostEqual(0.18, result[1].seconds, delta=0.005)
        self.assertEqual((20, 20), (result[1].late_steps, result[1].steps))
        self.assertAlmostEqual(0.36, result[1].share, delta=0.01)

    @parameterized.parameters(
        ([0.2, 0.0, 0.2, 0.0], 0.5, 0.2, [0, 20, 0, 20]),
        ([0.2, 0.0, 0.001, 0.002], 0.5, 0.002, [0] * 4),  # One that is faster makes none slow.
        ([0.009, 0.0], 0.01, 0.009, [0, 0]),  # Too short.
        ([0.04, 0.0], 0.5, 0.04, [0, 0]),  # A long step.
    )
    def test_late_steps(self, waits, step, seconds, late):
        result = self.compared(np.outer(waits, np.ones(30)), step)
        self.assertAlmostEqual(seconds, result[1].seconds, places=5)
        self.assertEqual(late, [one.late_steps for one in result])

    def test_late_by_turns_is_not_slow(self):
        turns = np.tile([0.2, 0.0], 15)
        self.assertFalse(any(one.is_slow for one in self.compared([turns, turns[::-1]])))

    def test_only_steps_that_all_have(self):
        waits = np.random.default_rng(4).uniform(0.0, 0.4, (2, 40))
        result = self.compared([waits[0], waits[1, :33]])
        self.assertEqual(13, result[0].steps)
        expected = np.maximum(0.0, waits[1, 20:33] - waits[0, 20:33])
        self.assertAlmostEqual(np.median(expected), result[0].seconds, places=5)
        self.assertEmpty(self.compared([waits[0], waits[1, :29]]))

    def test_the_kind_of_which_each_use_is_late(self):
        """Not one that a step uses twice, and not one that is used in every tenth step."""

        def published(wait):
            often = np.stack([steps_of(np.full(300, wait)), steps_of(np.zeros(300)) + 0.1], 1)
            once = steps_of(np.zeros(300)) + 0.2
            seldom = once[9::10] + 0.1
            kinds = {"often": often.reshape(600, 1, 2), "once": once, "seldom": seldom}
            return watch.measure([made_kind(*kind) for kind in kinds.items()])

        _, slow = watch.compare([published(0.2), published(0.0)])
        self.assertEqual(20, slow.late_steps)
        self.assertAlmostEqual(0.5, slow.step_seconds, places=5)


class ComparisonTest(absltest.TestCase):
    """Four hosts with a store that is a dictionary."""

    def setUp(self):
        super().setUp()
        self.values: dict[str, str] = {}
        self.now = 0.0
        store = mock.Mock(spec=protocol.Store)
        store.set = self.values.__setitem__
        store.get = lambda key, timeout: self.values.get(key)
        store.delete = self.values.__delitem__
        clock = mock.Mock(monotonic=lambda: self.now)
        self.enter_context(mock.patch.object(watch, "time", clock))
        ends = mock.Mock(side_effect=AssertionError)  # Nobody waits, and nothing is ended.
        self.hosts = [
            watch.Watch(config.Cluster(_TASKS, h), store, ends, ends, 600.0) for h in range(4)
        ]

    def look(self, steps, slow):
        for host in (1, 2, 3, 0):
            kind = made_kind("k", steps_of(np.full(steps, 0.0 if host == slow else 0.2)))
            kind.since = self.now
            self.hosts[host]._watched = {"k": kind}
            self.hosts[host].look()

    def logged(self, steps_at, slow):
        """Returns the warnings of two minutes, at each time of which so many steps were made."""
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            logging.warning("first")  # Else nothing may be logged.
            for second in range(0, 130, 5):
                self.now = second
                self.look(steps_at(second), slow)
        return logs.output[1:]

    def test_the_chief_says_so_once_a_minute(self):
        lines = self.logged(lambda second: 20 + second, slow=2)
        self.assertLen(lines, 3)
        self.assertRegex(
            lines[0],
            r"host 2 \(/job:worker/task:2 at c:3\) enters 200 ms after the others in 19 of 19 "
            r"steps: 40 % of a step of 500 ms",
        )

    def test_silent_without_a_slow_host_and_without_new_steps(self):
        self.assertEmpty(self.logged(lambda second: 20 + second, slow=None))
        self.assertLen(self.logged(lambda _: 300, slow=2), 1)

    def test_a_host_that_waits_is_compared_and_one_that_has_not_published_is_not(self):
        self.look(20, slow=2)
        waiting = made_kind("w", steps_of([0.1]), begun=1)
        waiting.since, self.now = self.now, 12.0
        self.hosts[1]._watched["w"] = waiting
        self.hosts[1]._judge = lambda *_: None
        self.hosts[1].look()
        self.assertIn('"waiting":["w",1]', self.values["status/1"])
        self.assertLen(self.hosts[0].host_delays(), 4)
        del self.values["status/1"]
        self.assertEmpty(self.hosts[0].host_delays())


if __name__ == "__main__":
    absltest.main()
