import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from unittest import mock

import psutil
import warm_python
from absl.testing import absltest
from launch_testing import is_running

from tfcdo.bench import hosts, worker_pool

# Sends 2 MB through the loopback interface of the process and prints how many arrived.
_SENDER = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
def send():
    with socket.create_connection(server.getsockname()) as client:
        client.sendall(bytes(2_000_000))
threading.Thread(target=send).start()
connection, _ = server.accept()
received = 0
while chunk := connection.recv(1 << 20):
    received += len(chunk)
print(received)
"""


@contextlib.contextmanager
def _open(test: absltest.TestCase, rate: float | None = None) -> Iterator[hosts.Loopback]:
    """Opens a link, or the shared one where this user may not and the refusal says what helps."""
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(hosts.open_link(rate))
        except hosts.LinkError as error:
            test.assertRegex(str(error), "run it as root|is not installed: it comes with")
            opened = hosts.Loopback()
        yield opened


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class HostsTest(absltest.TestCase):
    def test_steps_take_turns_and_each_is_counted(self):
        def call(method: str, timeout: float, name: str = "") -> list[float]:
            return [1000] * 2 if method == "gradient_bytes" else [0.1, 0.3]

        pool = mock.Mock(call=mock.Mock(side_effect=call))
        opened = mock.Mock(command=(), count_bytes=itertools.count(0, 500).__next__)
        started = contextlib.nullcontext(pool)
        with mock.patch.object(worker_pool, "start_workers", return_value=started):
            results = hosts.run(opened, 2, 3, 4, 1, lambda rounds, **_: rounds)
        steps = [one.kwargs["name"] for one in pool.call.call_args_list[1:]]
        self.assertEqual(steps, 5 * [one.kind for one in results])
        self.assertLen(results, 5)
        for one in results:
            # A step ends when the slowest worker's does.
            self.assertEqual((one.seconds, one.bytes_sent), (0.3, 500))
            self.assertEqual((one.size, one.num_devices), (1000, 3))

    def test_tfcdo_sends_less(self):
        with mock.patch.object(sys, "executable", warm_python.executable()), _open(self) as opened:
            results = hosts.run(opened, 2, 2, 3, 1, lambda rounds, **_: rounds, num_blocks=0)
        if not opened.command:
            return  # Other programs' bytes are counted, too.
        # A ring over 4 devices of 2 hosts sends 3 times the gradients, one over 2 hosts twice.
        for one, times in zip(results, (2.0, 1.0, 0.51, 3.0, 0.0), strict=True):
            self.assertAlmostEqual((one.bytes_sent or 0.0) / one.size, times, delta=0.1)


class LinkTest(absltest.TestCase):
    def test_has_a_rate_and_counts_what_its_own_programs_send(self):
        show, send = ("tc", "qdisc", "show", "dev", "lo"), (sys.executable, "-c", _SENDER)
        with _open(self, 12.5e6) as opened:
            before = opened.count_bytes()
            if not opened.command:
                return
            self.assertRegex(_output_of(*opened.command, *show), "tbf.* rate 100Mbit")
            self.assertEqual(_output_of(*send), "2000000\n")
            self.assertEqual(opened.count_bytes(), before)
            self.assertEqual(_output_of(*opened.command, *send), "2000000\n")
            self.assertBetween(opened.count_bytes() - before, 2_000_000, 2_100_000)
        self.assertNotIn("tbf", _output_of(*show))
        self.assertGreaterEqual(hosts.Loopback().count_bytes(), 2_000_000)

    def test_a_refusal_names_the_reason_and_a_remedy(self):
        with tempfile.TemporaryDirectory() as folder:
            for program in ("ip", "tc", "nsenter"):
                pathlib.Path(folder, program).symlink_to(shutil.which(program) or "/bin/false")
            pathlib.Path(folder, "unshare").write_text("#!/bin/sh\necho Denied >&2; exit 1\n")
            pathlib.Path(folder, "unshare").chmod(0o755)
            path = f"{folder}:{os.environ['PATH']}"
            self.check_refused(path, r"refused \(Denied\): run it as root")
        self.check_refused("", "unshare is not installed")

    def check_refused(self, path: str, message: str) -> None:
        with (
            mock.patch.dict(os.environ, PATH=path),
            self.assertRaisesRegex(hosts.LinkError, message),
            hosts.open_link(None),
        ):
            pass


_WORKER = """
import os
from tfcdo.bench import worker_pool

class Served:
    def twice(self, number, end=None):
        if end == os.environ["NAME"]:
            raise SystemExit("no more")
        print("noise")
        return {"name": os.environ["NAME"], "twice": 2 * number, "pid": os.getpid()}

worker_pool.serve(Served)
"""
_COMMAND = (sys.executable, "-c", _WORKER)
_VARIABLES = ({"NAME": "a"}, {"NAME": "b"})


class WorkerPoolTest(absltest.TestCase):
    def test_all_workers_answer_each_request(self):
        with worker_pool.start_workers(_COMMAND, _VARIABLES) as pool:
            for number in (1, 2):
                answers = pool.call("twice", 60, number=number)
                self.assertEqual([answer["name"] for answer in answers], ["a", "b"])
                self.assertEqual([answer["twice"] for answer in answers], [2 * number] * 2)
                # The second worker's answer is not taken for the next call's.
                with self.assertRaisesRegex(worker_pool.WorkerError, "^AttributeError: .*'thrice'"):
                    pool.call("thrice", 60)
            message = "worker 1 ended with status 1:\n(.*\n)*no more"
            with self.assertRaisesRegex(worker_pool.WorkerLostError, message):
                pool.call("twice", 60, number=1, end="b")
        self.assertFalse(any(psutil.pid_exists(answer["pid"]) for answer in answers))

    def test_a_worker_that_does_not_answer_is_ended(self):
        with worker_pool.start_workers(_COMMAND, _VARIABLES[:1]) as pool:
            (answer,) = pool.call("twice", 60, number=1)
            os.kill(answer["pid"], signal.SIGSTOP)
            with self.assertRaisesRegex(worker_pool.WorkerError, "worker 0 did not answer in time"):
                pool.call("twice", 0.2, number=1)
        self.assertFalse(psutil.pid_exists(answer["pid"]))

    def test_workers_end_with_the_process_that_started_them(self):
        script = (
            "import os, signal; from tfcdo.bench import worker_pool\n"
            f"with worker_pool.start_workers({_COMMAND!r}, {_VARIABLES!r}) as pool:\n"
            "    print(*(one['pid'] for one in pool.call('twice', 60, number=1)), flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        pids = [int(pid) for pid in warm_python.run_cold("-c", script).stdout.split()]
        self.assertLen(pids, 2)
        deadline = time.monotonic() + 60
        while any(map(is_running, pids)):
            self.assertLess(time.monotonic(), deadline, "workers are left")
            time.sleep(0.05)


if __name__ == "__main__":
    absltest.main()
