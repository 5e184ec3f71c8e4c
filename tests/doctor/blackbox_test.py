"""`tfcdo doctor --blackbox`: black boxes of made-up hosts, files that are none, and signals."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from unittest import mock

import msgspec
import numpy as np
import warm_python
from absl import logging
from absl.testing import absltest, parameterized
from cli_testing import CommandTestCase, run_tfcdo

from tfcdo import cache_folder
from tfcdo.cluster import config, progress, worker
from tfcdo.doctor import blackbox as black_boxes

_TASKS = tuple(config.ClusterTask("worker", host, f"{'abc'[host]}:{host + 1}") for host in range(3))
_CLUSTER = config.Cluster(_TASKS, 0)
_HOSTS = [_CLUSTER.name(host) for host in range(3)]
_KIND = progress.KindOfCollectives("all-reduce of 2 values (f[2], f[3])", "0123456789abcdef", 3)


def made_box(host, *entries, reason="time-out", hosts=_HOSTS):
    """A box of one kind: entries are (number, entered, left)."""
    listed = [progress.Entry("k", *entry) for entry in entries]
    return progress.Box(host, hosts, reason, 100.0, {"k": _KIND}, listed)


class BlackBoxTest(CommandTestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.dict(os.environ, TFCDO_CACHE_DIR=str(self.folder)))

    def write(self, name, box):
        path = self.folder / name
        path.write_bytes(msgspec.json.encode(box))
        return str(path)

    def test_a_host_that_stopped_one_that_waits_and_one_without_a_file(self):
        files = [
            self.write("1", made_box(1, (6, 50.0, 51.0), (7, 52.0, None))),
            self.write("0", made_box(0, (5, 40.0, 41.0), (6, 50.5, 51.5), reason="SIGUSR1")),
        ]
        output = self.output_of("doctor", "--blackbox", *files)
        place = "of 3, time 3, of the all-reduce of 2 values (f[2], f[3]), plan 01234567"
        self.assertEqual(
            [
                f"{_HOSTS[0]}: in no collective for 48.5 s, after pack 1 {place} (written because "
                "of: SIGUSR1)",
                f"{_HOSTS[1]}: in pack 2 {place}, for 48.0 s (written because of: time-out)",
                f"{_HOSTS[2]}: no file: it was killed, or not given",
                f"Host 1 waited in pack 2 {place}: Hosts 0 and 2 stopped before it.",
            ],
            output.splitlines(),
        )

    def test_hosts_that_wait_in_other_collectives_in_one_and_in_none(self):
        entries = ((8, 52.0, None), (7, 52.0, None), (9, 1.0, 2.0))
        *_, zero, one = black_boxes.compare([*map(made_box, range(3), entries)])
        self.assertRegex(zero, r"^Host 0 waited in pack 3 .*: Host 1 stopped before it\.$")
        self.assertRegex(one, r"^Host 1 waited in pack 2 .*: all hosts are in it or have left")
        lines = black_boxes.compare([made_box(0, (8, 52.0, 53.0)), made_box(1)])
        self.assertStartsWith(lines[1], f"{_HOSTS[1]}: in no collective yet")
        self.assertEqual("No host waits for another one in a collective.", lines[-1])
        *_, line = black_boxes.compare([made_box(host, (8, 52.0, None)) for host in range(3)])
        self.assertRegex(line, "^Hosts 0 and 1 and 2 waited in pack 3 .*: all hosts are in it or")

    def test_files_that_are_refused(self):
        good = self.write("good", made_box(0))
        elsewhere = made_box(1, hosts=["x", "y"])
        edited = msgspec.to_builtins(made_box(0, (8, 52.0, None)))
        for files, message in (
            ([self.write("bad", {"host": 1})], "is not a black box of tfcdo: .*missing"),
            ([self.write("host", {**edited, "host": 3})], "host is not a black .* not list"),
            ([self.write("kind", {**edited, "kinds": {}})], "kind is not a black .* not list"),
            ([self.write("number", {**edited, "entries": [["k", -1, 5.0, 6.0]]})], ">= 0"),
            ([good, self.write("again", made_box(0))], "good and .*again are both of host 0"),
            ([good, self.write("other", elsewhere)], "must be of one job; .*other has the hosts"),
            ([str(self.folder / "none")], f"^tfcdo: {self.folder}/none: No such file"),
            ([], "--blackbox requires files; see tfcdo doctor --help"),
        ):
            with self.subTest(message):
                result = run_tfcdo("doctor", "--blackbox", *files)
                self.assertNotEqual(0, result.status)
                self.assertRegex(result.errors, message)

    def test_the_last_thousand_of_all_kinds_by_time(self):
        numbers, known = np.arange(200, 1200), progress.KindOfCollectives("gathering", "", 4)
        kinds = []
        for name, entered in (("a", numbers + 0.0), ("b", numbers + 0.5)):
            left = np.where(entered == 1199.5, np.nan, entered + 0.25)  # The last one waits.
            kind = progress.Kind(name, known, mock.Mock(), 1)
            last = progress.Collectives(numbers, entered, left)
            self.enter_context(mock.patch.object(kind, "last", return_value=last))
            kinds.append(kind)
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            progress.write_box(_CLUSTER, kinds, "a reason")
        path = self.folder / "blackbox" / f"host0-{os.getpid()}.json"
        self.assertIn(f"the last 1000 collectives are in {path}", logs.output[0])
        box = progress.read_box(path)
        expected = [
            progress.Entry("ab"[half], number, number + half / 2, number + half / 2 + 0.25)
            for number in range(700, 1200)
            for half in (0, 1)
        ]
        expected[-1] = progress.Entry("b", 1199, 1199.5, None)
        self.assertTrue(expected == box.entries)  # The difference of long lists takes minutes.
        self.assertEqual((0, _HOSTS, "a reason"), (box.host, box.hosts, box.reason))
        self.assertEqual({"a": known, "b": known}, box.kinds)

    @parameterized.parameters(
        ("", "{}", "tfcdo"), ("", "", "home/.cache/tfcdo"), ("", "relative", "home/.cache/tfcdo"),
        ("{}", "/elsewhere", "."), ("~/mine", "/elsewhere", "home/mine"),
    )  # fmt: skip
    def test_where(self, own, xdg, folder):
        own, xdg = own.format(self.folder), xdg.format(self.folder)
        home = str(self.folder / "home")
        with mock.patch.dict(os.environ, TFCDO_CACHE_DIR=own, XDG_CACHE_HOME=xdg, HOME=home):
            self.assertEqual(self.folder / folder, cache_folder.cache_folder())

    def test_a_folder_that_cannot_be_written(self):
        (self.folder / "blackbox").write_text("a file")
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            progress.write_box(_CLUSTER, [], "a reason")
        self.assertIn("the black box could not be written", logs.output[0])


# Stuck for ever in a lock of the C library, as in a collective: no signal interrupts it.
_SCRIPT = """
import ctypes, threading
from tfcdo.cluster import progress
from tfcdo.keras import preemption
progress.listen()
preemption.Preemption().start()
lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
threading.Timer(0.5, print, ["stuck"], {"flush": True}).start()  # Once it waits for the lock.
library.pthread_mutex_lock(lock)
"""


class SignalTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(progress, "_asked", None))
        self.addCleanup(signal.signal, signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
        self.addCleanup(signal.set_wakeup_fd, signal.set_wakeup_fd(-1))

    def test_asks_once_and_other_users_of_signals_stay(self):
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer)
        progress.listen()
        progress.listen()
        self.assertFalse(progress.is_asked())
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        self.assertEqual(bytes([signal.SIGUSR1]), os.read(reader, 10))
        self.assertTrue(progress.is_asked())
        self.assertFalse(progress.is_asked())

    def test_a_handler_of_the_user_stays(self):
        handler = mock.Mock()
        signal.signal(signal.SIGUSR1, handler)
        progress.listen()
        self.assertIs(handler, signal.getsignal(signal.SIGUSR1))
        self.assertFalse(progress.is_asked())

    def test_another_thread_leaves_signals_alone(self):
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(progress.listen).result()  # Its error, if it has one.
        self.assertEqual(signal.SIG_DFL, signal.getsignal(signal.SIGUSR1))

    def test_a_failed_run_ends_a_worker_that_listens_for_the_black_box_too(self):
        failed = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "failed")
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [warm_python.executable(), "-c", _SCRIPT],
            stdout=subprocess.PIPE,
            env={**os.environ, **variables, worker.FAILURE_FILE: str(failed)},
        )
        self.addCleanup(process.kill)
        assert process.stdout
        with process.stdout:
            self.assertEqual(b"stuck\n", process.stdout.readline())
        failed.touch()
        process.send_signal(signal.SIGTERM)
        self.assertEqual(128 + signal.SIGTERM, process.wait(60.0))


if __name__ == "__main__":
    absltest.main()
