"""Agreement, watch and delays, with hosts that are threads, and made-up times of collectives."""

import functools
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any
from unittest import mock

import numpy as np
from absl import logging
from absl.testing import absltest, parameterized

from tfcdo.cluster import config, progress, protocol, session, watch, worker

TASKS = tuple(config.ClusterTask("worker", host, f"{'abcd'[host]}:{host + 1}") for host in range(4))
_Unavailable = type("UnavailableError", (Exception,), {})


class Store:
    """A key-value store in which a key is written once."""

    delay = 0.0  # Of an answer, on a busy machine or from far away.

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            if key in self._values:
                raise ValueError(f"{key} is there")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> str | None:
        with self._changed:
            if timeout > 0.2:  # A shorter one is for a look at what is there.
                self._changed.wait_for(lambda: key in self._values, timeout)
            return self._values.get(key) if timeout >= self.delay else None

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def check_hosts(self, jobs: Mapping[str, int]) -> None:
        """Finds no task that has ended."""


def kind(*values: str, what: str = "all-reduce") -> dict[str, Any]:
    return {"what": what, "values": list(values), "collectives": 2}


def make_session(store: Store, host: int, timeout: float, hosts: int = 3) -> session.Session:
    return session.Session(config.Cluster(TASKS[:hosts], host), store, lambda *_: None, timeout)


def on_all_hosts(
    program: Callable[[int, session.Session], Any], timeout: float, store: Store | None = None
) -> list[Any]:
    """Runs a program on each host; returns what it returned or raised."""
    store = store or Store()

    def run(host: int) -> Any:
        try:
            return program(host, make_session(store, host, timeout))
        except RuntimeError as error:
            return error

    return list(futures.ThreadPoolExecutor(3).map(run, range(3), timeout=20.0))


class AgreementTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(protocol, "GRACE", 0.5))
        self.enter_context(mock.patch.object(session, "_POLL", 0.25))

    @parameterized.parameters((0, {"worker": 3}), (1, {}))
    def test_a_host_does_not_wait_for_one_that_has_ended(self, host, jobs):
        with mock.patch.object(Store, "check_hosts", side_effect=_Unavailable("is gone")) as asked:
            own = make_session(Store(), host, 20.0)
            self.assertRaisesRegex(_Unavailable, "is gone", own.number, kind("a"), 1)
            own.fail("it has said why")
            self.assertRaisesRegex(RuntimeError, "it has said why", own.number, kind("a"), 1)
        asked.assert_called_once_with(jobs)

    def test_equal_numbers_for_late_hosts_and_threads_in_any_order(self):
        # A busy machine holds a thread up for half a second.
        self.enter_context(mock.patch.object(protocol, "GRACE", 10.0))

        def program(host, own):
            pool, asked = futures.ThreadPoolExecutor(3), {}
            for value in "zyx" if host == 1 else "xyz":
                asked[value] = pool.submit(own.number, kind(value), 2)
                time.sleep(0.05 * (host + 1))
            numbers = [asked[value].result(10.0) for value in "xyz"]
            return numbers, [own.number(kind("x", what=one), 2) for one in ("all-reduce", "gather")]

        first, *others = on_all_hosts(program, 10.0)
        self.assertEqual([first, first], others)
        numbers, again = first
        self.assertCountEqual([0, 2, 4], numbers)
        self.assertEqual([numbers[0], 6], again)

    def test_one_thread_at_a_time_may_call(self):
        def program(host, own):
            with own.calling(kind(what="fit")), futures.ThreadPoolExecutor(1) as pool:
                with own.calling(kind(what="evaluate")):  # In a callback.
                    pass
                other = own.calling(kind(what="predict"))
                error = str(pool.submit(other.__enter__).exception(10.0))
                self.assertRegex(error, r"may call fit, .*_0 calls predict while \S+ is in fit")
            self.assertIn("one thread at a time", own.failure())

        self.assertEqual([None] * 3, on_all_hosts(program, 10.0))

    def test_another_collective(self):
        def program(host, own):
            own.number(kind("f[2]"), 2)
            own.number(kind("f[4]", what="gather") if host == 2 else kind("f[4]", "i[]"), 2)

        for end in on_all_hosts(program, 10.0):
            self.assertIsInstance(end, protocol.DisagreementError)
            self.assertRegex(str(end), r"differ: host \d comes .*gather of 1 value \(f\[4\]\)")

    def test_all_get_the_text_of_the_chief(self):
        texts = iter("12")
        self.enter_context(mock.patch.object(Store, "delay", 0.22))

        def program(host, own):
            # Only the chief makes texts, each once; the others would fail.
            make = functools.partial(next, texts) if host == 0 else self.fail
            told = [own.text_of_chief(kind(name), make) for name in "aba"]
            return told, own.next_keys(kind("c"), 2)

        self.assertEqual([(["1", "2", "1"], [0, 64])] * 3, on_all_hosts(program, 10.0))

    def test_the_last_collective_that_a_host_waits_in_is_compared(self):
        store = Store()
        hosts = [make_session(store, host, 0.0) for host in range(2)]
        for host, value in ((0, "a"), (0, "b"), (1, "c")):
            self.assertRaises(RuntimeError, hosts[host].number, kind(value), 2)
        message = "differ: values, element 0 of 1: b on host 0, c on host 1$"
        self.assertRegex(hosts[0].find_mismatch() or "", message)

    def test_a_host_that_does_not_come(self):
        self.enter_context(mock.patch.object(protocol, "LOG_AFTER", 0.3))
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            ends = on_all_hosts(lambda h, own: None if h == 1 else own.number(kind("f[4]"), 2), 1.5)
        self.assertIsNone(ends[1])
        for end in (ends[0], ends[2]):
            self.assertIsInstance(end, protocol.LateHostError)
            self.assertRegex(str(end), r"timed out: host 0 .* s for host 1 \(.*b:2\) to come to")
        self.assertRegex(" ".join(logs.output), "s for a host that host 0 .* waits for to come to")

    def test_hosts_that_give_up_at_the_same_time(self):
        """Each waits in another collective, and none has seen another's reason."""
        self.enter_context(mock.patch.object(protocol, "GRACE", 60.0))
        self.enter_context(mock.patch.object(protocol, "PATIENCE", 0.0))
        all_fail = threading.Barrier(3)

        class Racing(Store):
            def set(self, key: str, value: str) -> None:
                if key == "failed":
                    all_fail.wait(10.0)
                super().set(key, value)

        store = Racing()
        ends = on_all_hosts(lambda host, own: own.number(kind(f"f[{host}]"), 2), 0.5, store)
        for host, end in enumerate(ends):
            self.assertIsInstance(end, protocol.LateHostError)
            self.assertRegex(str(end), rf"^timed out: host {host} .*\(f\[{host}\]\); all hosts ")
        self.assertIn(store.get("failed", 0.0), map(str, ends))  # One reason, whosever it is.

    @parameterized.parameters(
        (None, "has come to the end of its program before others: all hosts must make the same"),
        (ValueError("no files"), "has ended with ValueError: no files$"),
        (ValueError("many " * 1000), "has ended with ValueError: (many ){100}$"),
        (ValueError("a\udc80"), r"has ended with ValueError: a\\udc80$"),
    )
    def test_a_host_whose_program_ends(self, error, message):
        def program(host, own):
            try:
                if host > 0:
                    own.number(kind("f[4]"), 2)
            finally:
                own.leave(error if host == 0 else None)
                left[host] = True
                # The chief, whose store they all read, stays until the others have left.
                self.assertTrue(host > 0 or (left[1] and left[2]))

        left = [False] * 3
        self.enter_context(mock.patch.object(Store, "delay", 0.15))
        first, *others = on_all_hosts(program, 10.0)
        self.assertIsNone(first)
        for end in others:
            self.assertIsInstance(end, protocol.DisagreementError)
            self.assertRegex(str(end), rf"^host 0 \(.*a:1\) {message}")

    @parameterized.parameters(
        (None, "the reason", []),
        (None, "the reason", [], True),
        (_Unavailable(), None, []),
        (_Unavailable(), "the reason", ["tfcdo: the reason"]),
        (protocol.DisagreementError("the reason"), "the reason", []),
        (protocol.DisagreementError("its own"), "its own", []),
    )
    def test_a_host_that_ends_because_of_another(self, error, reason, said, is_busy=False):
        self.enter_context(mock.patch.object(Store, "delay", 0.15))
        own = make_session(store := Store(), 0, 10.0)
        if reason:
            (own if reason == "its own" else make_session(store, 1, 10.0)).fail(reason)
        answers = {"return_value": None} if is_busy else {"wraps": store.get}
        with (
            mock.patch.object(worker, "tell_that_another_has_failed") as tell,
            mock.patch.object(store, "get", **answers) as get,
            mock.patch.object(logging, "error") as log,
        ):
            own.leave(error)
        # It waits for nobody: the others know, and one of them may never leave.
        self.assertNotIn("left/", " ".join(call.args[0] for call in get.call_args_list))
        self.assertEqual(reason, own.failure())
        self.assertEqual(reason != "its own", tell.called)
        # TensorFlow's error has no name.
        self.assertEqual(said, [call.args[0] % call.args[1:] for call in log.call_args_list])

    def test_the_chief_does_not_wait_for_ever(self):
        self.enter_context(mock.patch.object(protocol, "LAST_SECONDS", 0.3))
        make_session(Store(), 0, 10.0).leave(None)
        with mock.patch.object(Store, "get", side_effect=RuntimeError("the chief is gone")):
            make_session(Store(), 1, 10.0).leave(None)

    def test_keys_differ_within_many_uses(self):
        own = make_session(Store(), 0, 10.0, hosts=1)
        kinds = [kind("f[2]"), kind("f[3]")]
        keys = [key for _ in range(32) for one in kinds for key in own.next_keys(one, 2)]
        self.assertLen(set(keys), 128)
        for _ in range(100):
            keys += own.next_keys(kinds[0], 2)
        self.assertLess(max(keys), session.NUM_KEYS)
        # They come back, so what TensorFlow keeps of each is bounded.
        self.assertLen(set(keys), 2 * 64 + 2 * 32)
        with self.assertRaisesRegex(RuntimeError, "at most 262,144 different collectives"):
            own.next_keys(kind("f[4]"), session.NUM_KEYS // 64)


class WatchTest(parameterized.TestCase):
    """A clock and counters that the test moves."""

    def setUp(self):
        super().setUp()
        self.store = Store()
        self.now = 0.0
        self.counts = [0, 0, 0]
        self.aborts: list[tuple[int, bool, str]] = []
        clock = mock.Mock(monotonic=lambda: self.now)
        self.enter_context(mock.patch.object(watch, "time", clock))
        self.agreements = [make_session(self.store, h, 600.0) for h in range(3)]
        self.watches = []
        for host, own in enumerate(self.agreements):
            abort = lambda late, reason, host=host: self.aborts.append((host, late, reason))  # noqa: E731
            looks = watch.Watch(own.cluster, self.store, own.judge, abort, 600.0)
            marks = mock.Mock(count=lambda host=host: self.counts[host])
            marks.times.return_value = np.zeros(progress.events_kept(2))
            looks.add(kind("f[4]"), marks)
            self.watches.append(looks)

    def look(self, *hosts, until, step=2.0):
        while self.now < until:
            self.now += step
            for host in hosts:
                self.watches[host].look()

    @parameterized.parameters(
        # Third step; hosts 0 and 1 wait in its second pack.
        ([11, 11, 10], 2, 2, r"host 2 \(/job:worker/task:2 at c:3\), which is busy or stopped"),
        ([11, 9, 11], 3, 2, r"host 1 \(.*\), which waits in pack 1 of 2, time 3, of .*"),
        ([9, 11, 10], 2, 1, r"host 2 \([^()]*\), which is busy or stopped"),  # Host 1 is ahead.
        ([9, 11, 9], 3, 1, "all hosts at once: is the network down\\?"),
    )
    def test_says_who_is_waited_for(self, counts, lines, pack, waited_for):
        self.counts = counts
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            self.look(0, 1, 2, until=70.0)
        self.assertLen(logs.output, lines)
        said = rf"pack {pack} of 2, time 3, of the all-reduce of 1 value \(f\[4\]\) has waited "
        said += rf"6\d s on host 0 \([^()]*\) for {waited_for}$"
        self.assertRegex(logs.output[0], said)
        self.assertIsNotNone(self.store.get("status/2", 0.0))  # So a look at it does not wait.
        self.assertEmpty(self.aborts)

    def test_each_wait_is_told_of_after_a_minute(self):
        for count in (11, 13):
            self.counts = [count, count, 10]
            with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
                self.look(0, until=self.now + 70.0)
            self.assertLen(logs.output, 1)

    def test_silent_while_all_goes_on(self):
        with self.assertNoLogs(logging.get_absl_logger(), "WARNING"):
            for count in range(20):
                self.counts = [count] * 3
                self.look(0, 1, 2, until=self.now + 8.0)
            self.counts = [20] * 3
            self.look(0, 1, 2, until=self.now + 1000.0)
        self.assertEmpty(self.aborts)

    def test_ends_what_waits_too_long(self):
        self.counts = [11, 10, 10]
        self.look(0, until=610.0, step=30.0)
        [(host, late, reason)] = self.aborts[:1]
        self.assertEqual((0, True), (host, late))
        self.assertRegex(reason, r"timed out: pack 2 of 2.*waited 6\d\d s.*for host 1 .*, host 2 ")
        self.assertEndsWith(reason, protocol.SAME_CALLS)
        self.assertEqual(reason, self.agreements[1].failure())

    def test_another_host_has_given_up(self):
        self.counts = [11, 10, 11]
        self.agreements[1].fail("the reason")
        self.look(0, 2, until=2.0)
        self.assertEmpty(self.aborts)  # It may have failed in the next step; this one goes on.
        self.look(0, 2, until=6.0)
        self.assertEqual([(0, False, "the reason"), (2, False, "the reason")], self.aborts[:2])

    def test_a_host_that_has_come_to_something_else(self):
        self.counts = [11, 10, 10]
        self.store.set("announced/2/0", json.dumps(kind("g[1]")))
        self.look(0, until=14.0)
        [(host, late, reason)] = self.aborts[:1]
        self.assertEqual((0, False), (host, late))
        self.assertRegex(reason, r"host 2 .* has come to the all-reduce of 1 value \(g\[1\]\)")


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
    about = progress.KindOfCollectives("all-reduce", "f" * 64, collectives)
    return progress.Kind(name, about, marks, count)


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

    @parameterized.parameters(
        ([0.2, 0.0, 0.2, 0.0], 0.5, 0.2, [0, 20, 0, 20]),
        ([0.3, 0.0, 0.18], 0.5, 0.18, [0, 20, 0]),
        ([0.2, 0.0, 0.001, 0.002], 0.5, 0.002, [0] * 4),  # One that is faster makes none slow.
        ([0.009, 0.0], 0.01, 0.009, [0, 0]),  # Too short.
        ([0.04, 0.0], 0.5, 0.04, [0, 0]),  # A long step.
    )
    def test_late_steps(self, waits, step, seconds, late):
        result = self.compared(np.outer(waits, np.ones(30)), step)
        self.assertAlmostEqual(seconds, result[1].seconds, places=5)
        self.assertAlmostEqual(seconds / step, result[1].share, places=4)
        expected = [(host, 20, count, count == 20) for host, count in enumerate(late)]
        found = [(one.host, one.steps, one.late_steps, one.is_slow) for one in result]
        self.assertEqual(expected, found)

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
    """Four hosts that only look at what is there."""

    def setUp(self):
        super().setUp()
        store = Store()
        self.values, self.now = store._values, 0.0
        clock = mock.Mock(monotonic=lambda: self.now)
        self.enter_context(mock.patch.object(watch, "time", clock))
        ends = mock.Mock(side_effect=AssertionError)  # Nobody waits, and nothing is ended.
        self.hosts = [
            watch.Watch(config.Cluster(TASKS, h), store, ends, ends, 600.0) for h in range(4)
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
        said = r"host 2 \(/job:worker/task:2 at c:3\) enters 200 ms after the others in 19 of 19 "
        said += r"steps: 40 % of a step of 500 ms"
        self.assertRegex(lines[0], said)

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
