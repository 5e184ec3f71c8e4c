"""`tfcdo launch` with small scripts, none of which needs TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator

import psutil
from absl.testing import absltest
from absl.testing import parameterized

from tfcdo import environment
from tfcdo.launch import cluster
from tfcdo.launch import output

# No test takes as long, unless the launcher hangs.
_SECONDS = 30
# What every script may use.
_PREAMBLE = """
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def mark(name): pathlib.Path(name).write_text(str(os.getpid()))
"""


class _LaunchTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.script = self.folder / "train.py"
        self.addCleanup(self._end_marked)

    def start(self, *arguments: str, script: str = "") -> subprocess.Popen[str]:
        """Starts `tfcdo launch` in a folder that has the script, without waiting for it."""
        if script:
            self.script.write_text(_PREAMBLE + textwrap.dedent(script))
        process = subprocess.Popen(
            [sys.executable, "-m", "tfcdo.cli.main", "launch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.addCleanup(process.kill)
        return process

    def launch(self, *arguments: str, script: str = "") -> subprocess.CompletedProcess[str]:
        """Runs `tfcdo launch` to its end."""
        return self.finish(self.start(*arguments, script=script))

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, error = process.communicate(timeout=_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def read_pid(self, name: str) -> int:
        """Returns the process that has marked itself, as soon as it has."""
        self.wait_until(lambda: (self.folder / name).exists() and self._text(name) != "")
        return int(self._text(name))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def assert_ended(self, *names: str) -> None:
        """Asserts that processes that have marked themselves are gone, or soon are."""
        for name in names:
            pid = self.read_pid(name)
            self.wait_until(lambda pid=pid: not _is_running(pid))  # type: ignore[misc]

    def _end_marked(self) -> None:
        """Ends what a failed test has left."""
        for path in self.folder.iterdir():
            if path != self.script and path.is_file() and path.read_text().strip().isdigit():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text()


def _is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class WorkersTest(_LaunchTestCase):
    def test_each_worker_knows_the_cluster_and_its_arguments(self):
        result = self.launch(
            *("--workers", "3", "--devices-per-worker", "2"),
            *("--", "train.py", "--workers", "--", "x"),
            script=f"""
            print(json.dumps([
                json.loads(os.environ["TF_CONFIG"]),
                os.environ["{environment.DEVICES_PER_WORKER}"],
                os.environ["{environment.RESTART_COUNT}"],
                sys.argv[1:],
                sys.stdin.read(),
            ]))
            """,
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        lines = dict(line.split(" | ", 1) for line in result.stdout.splitlines())
        self.assertCountEqual(lines, ["worker 0", "worker 1", "worker 2"])
        clusters = set()
        for index in range(3):
            config, devices, restart, arguments, read = json.loads(lines[f"worker {index}"])
            self.assertEqual(config["task"], {"type": "worker", "index": index})
            self.assertEqual((devices, restart, read), ("2", "0", ""))
            self.assertEqual(arguments, ["--workers", "--", "x"])
            clusters.add(tuple(config["cluster"]["worker"]))
        (addresses,) = clusters
        self.assertLen(set(addresses), 3)
        for address in addresses:
            self.assertRegex(address, r"^127\.0\.0\.1:\d+$")

    def test_a_worker_can_listen_at_its_port_and_nobody_else_is_given_it(self):
        result = self.launch(
            *("--workers", "2", "train.py"),
            script="""
            import socket
            addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", int(addresses[task].rpartition(":")[2])))
                server.listen()
            with socket.socket() as other:
                try:
                    other.bind(("127.0.0.1", int(addresses[task].rpartition(":")[2])))
                except OSError as error:
                    print(error.strerror)
            """,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("Address already in use"), 2)

    def test_one_of_several_hosts(self):
        with cluster.reserved_ports(2) as addresses:
            pass
        result = self.launch(
            *("--hosts", ",".join(addresses), "--index", "1", "train.py"),
            script=f"""
            print(os.environ["TF_CONFIG"], "{environment.DEVICES_PER_WORKER}" in os.environ)
            """,
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(result.stdout, f"worker 1 | {cluster.tf_config(addresses, 1)} False\n")

    def test_a_module(self):
        result = self.launch(
            "--workers", "1", "-m", "train", "a", script="print(__name__, sys.argv[1:])"
        )
        self.assertEqual(result.stdout, "worker 0 | __main__ ['a']\n")


class OutputTest(_LaunchTestCase):
    def test_lines_stay_whole_and_in_order_on_their_own_stream(self):
        result = self.launch(
            *("--workers", "3", "train.py"),
            script="""
            for number in range(300):
                os.write(1, b"out ")
                os.write(1, b"%d\\n" % number)
                os.write(2, b"error %d\\n" % number)
            os.write(1, b"no end")
            """,
        )
        self.assertEqual(result.returncode, 0)
        for worker in range(3):
            prefix = f"worker {worker} | "
            for text, word in ((result.stdout, "out"), (result.stderr, "error")):
                own = [line for line in text.splitlines() if line.startswith(prefix)]
                expected = [f"{prefix}{word} {number}" for number in range(300)]
                self.assertEqual(own, expected + [f"{prefix}no end"] * (word == "out"))

    def test_letters_of_any_encoding_reach_a_terminal_that_is_told_to_be_ascii(self):
        self.enter_context(_variable("PYTHONIOENCODING", "ascii"))
        result = self.launch(
            "--workers", "1", "train.py", script="os.write(1, 'Grüße\\n'.encode())"
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(result.stdout, "worker 0 | Grüße\n")

    def test_prefixes_have_colours_where_a_terminal_has(self):
        self.enter_context(_variable("FORCE_COLOR", "1"))
        self.enter_context(_variable("TERM", "xterm"))
        result = self.launch("--workers", "2", "train.py", script="print('text')")
        lines = sorted(result.stdout.splitlines())
        self.assertLen(lines, 2)
        for line in lines:
            self.assertRegex(line, r"^\x1b\[\d+mworker \d \| \x1b\[0mtext$")
        self.assertNotEqual(lines[0][:5], lines[1][:5])

    def test_output_that_nobody_takes_ends_the_job(self):
        process = self.start(
            *("--workers", "2", "train.py"),
            script="""
            mark(f"worker{task}")
            while True: print("line"); time.sleep(0.01)
            """,
        )
        assert process.stdout
        process.stdout.readline()
        self.read_pid("worker0")
        self.read_pid("worker1")
        process.stdout.close()
        assert process.stderr
        error = process.stderr.read()
        self.assertEqual(process.wait(_SECONDS), 1)
        # As of other commands: `tfcdo launch ... | head -1` says nothing about it.
        self.assertEqual(error, "")
        self.assert_ended("worker0", "worker1")

    @parameterized.parameters(
        ([b"a\nb", b"c\n"], [b"a", b"bc"]),
        ([b"a\r\nb\r", b"\nc"], [b"a", b"b", b"c"]),
        ([b"10%\r20%\r", b"30%\n"], [b"10%", b"20%", b"30%"]),
        ([b"\n\n"], [b"", b""]),
        ([b"end\r"], [b"end"]),
        ([b"x" * 65_536, b"y", b"z\n"], [b"x" * 65_536 + b"y", b"z"]),
    )
    def test_splitter(self, chunks: list[bytes], expected: list[bytes]):
        splitter = output.LineSplitter()
        lines = [line for chunk in chunks for line in splitter.feed(chunk)]
        self.assertEqual([*lines, *splitter.flush()], expected)


class FailureTest(_LaunchTestCase):
    def test_all_end_with_the_status_of_the_first_that_failed(self):
        result = self.launch(
            *("--workers", "3", "train.py"),
            script="""
            mark(f"worker{task}")
            if task == 1:
                while not all(os.path.exists(f"worker{other}") for other in range(3)):
                    time.sleep(0.01)
                print("last words", file=sys.stderr)
                sys.exit(3)
            # The others fail too when they are asked to end.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
            while True: time.sleep(0.1)
            """,
        )
        self.assertEqual(result.returncode, 3)
        self.assertEqual(
            result.stderr,
            "worker 1 | last words\ntfcdo: worker 1 failed: exit status 3; ending the others\n",
        )
        self.assert_ended("worker0", "worker1", "worker2")

    def test_one_that_ends_well_ends_nobody(self):
        result = self.launch(
            "--workers", "2", "train.py", script="time.sleep(0.5 * task); print('done')"
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(result.stdout, "worker 0 | done\nworker 1 | done\n")

    def test_a_killed_worker_and_one_that_does_not_listen(self):
        result = self.launch(
            *("--workers", "2", "--grace", "0.2", "train.py"),
            script="""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mark(f"worker{task}")
            if task == 1:
                while not os.path.exists("worker0"): time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            while True: time.sleep(0.1)
            """,
        )
        self.assertEqual(result.returncode, 128 + signal.SIGKILL)
        self.assertEqual(
            result.stderr.splitlines(),
            [
                "tfcdo: worker 1 failed: exit status 137 (SIGKILL); ending the others",
                "tfcdo: killing worker 0",
            ],
        )
        self.assert_ended("worker0", "worker1")

    def test_restarts_have_new_ports_and_count(self):
        script = f"""
        count = int(os.environ["{environment.RESTART_COUNT}"])
        print(count, json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
        if task == 1: sys.exit(5 if count < 2 else 0)
        if count < 2: time.sleep(60)
        """
        result = self.launch("--workers", "2", "--max-restarts", "2", "train.py", script=script)
        self.assertEqual(result.returncode, 0)
        counts = re.findall(r"worker 1 \| (\d)", result.stdout)
        self.assertEqual(counts, ["0", "1", "2"])
        self.assertIn("starting all workers again (restart 2 of 2)", result.stderr)

        result = self.launch("--workers", "2", "--max-restarts", "1", "train.py", script=script)
        self.assertEqual(result.returncode, 5)
        self.assertEqual(re.findall(r"worker 1 \| (\d)", result.stdout), ["0", "1"])


# A worker and a child of each kind: its own, and one in another session whose parent has ended.
_FAMILY = """
child = "echo $$ > {}; exec sleep 600"
subprocess.Popen(child.format(f"child{task}"), shell=True)
subprocess.run(f"setsid sh -c '{child.format(f'orphan{task}')}' &", shell=True)
while not (os.path.exists(f"child{task}") and os.path.exists(f"orphan{task}")): time.sleep(0.01)
mark(f"worker{task}")
"""
_MEMBERS = [f"{kind}{task}" for kind in ("worker", "child", "orphan") for task in (0, 1)]


class NothingLeftTest(_LaunchTestCase):
    def start_family(self, *arguments: str, then: str) -> subprocess.Popen[str]:
        process = self.start("--workers", "2", *arguments, "train.py", script=_FAMILY + then)
        for name in _MEMBERS:
            self.read_pid(name)
        return process

    @parameterized.parameters("SIGINT", "SIGTERM", "SIGHUP")
    def test_signals_reach_the_workers_and_end_the_job(self, name: str):
        process = self.start_family(
            then=f"""
got = []
signal.signal(signal.{name}, lambda *_: got.append(1))
mark(f"ready{{task}}")
while not got: time.sleep(0.02)
print("tidied up")
"""
        )
        self.read_pid("ready0")
        self.read_pid("ready1")
        process.send_signal(getattr(signal, name))
        result = self.finish(process)
        self.assertEqual(result.returncode, 128 + getattr(signal, name))
        self.assertCountEqual(
            result.stdout.splitlines(), ["worker 0 | tidied up", "worker 1 | tidied up"]
        )
        self.assertEqual(result.stderr, f"tfcdo: got {name}: passing it on to the workers\n")
        self.assert_ended(*_MEMBERS)

    def test_who_asks_twice_does_not_wait(self):
        process = self.start_family(
            *("--grace", "600"),
            then="""
signal.signal(signal.SIGINT, lambda *_: mark(f"asked{task}"))
mark(f"ready{task}")
while True: time.sleep(0.02)
""",
        )
        for name in ("ready0", "ready1"):
            self.read_pid(name)
        process.send_signal(signal.SIGINT)
        for name in ("asked0", "asked1"):
            self.read_pid(name)
        process.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(process).returncode, 128 + signal.SIGINT)
        self.assert_ended(*_MEMBERS)

    def test_a_user_signal_is_only_passed_on(self):
        process = self.start(
            *("--workers", "2", "train.py"),
            script="""
            got = []
            signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
            mark(f"worker{task}")
            while not got: time.sleep(0.02)
            """,
        )
        self.read_pid("worker0")
        self.read_pid("worker1")
        process.send_signal(signal.SIGUSR1)
        self.assertEqual(self.finish(process).returncode, 0)

    def test_a_worker_that_ends_well_takes_its_children_along(self):
        process = self.start_family(then="")
        self.assertEqual(self.finish(process).returncode, 0)
        self.assert_ended(*_MEMBERS)

    def test_a_stopped_worker_is_ended_too(self):
        process = self.start_family(then="while True: time.sleep(0.1)")
        os.kill(self.read_pid("worker1"), signal.SIGSTOP)
        os.kill(self.read_pid("worker0"), signal.SIGKILL)
        self.assertEqual(self.finish(process).returncode, 128 + signal.SIGKILL)
        self.assert_ended(*_MEMBERS)

    def test_the_launcher_is_killed(self):
        process = self.start_family(then="while True: time.sleep(0.1)")
        process.kill()
        process.wait(_SECONDS)
        self.assert_ended(*_MEMBERS)

    def test_a_guard_is_killed(self):
        process = self.start_family(then="while True: time.sleep(0.1)")
        psutil.Process(self.read_pid("worker0")).parent().kill()  # type: ignore[union-attr]
        result = self.finish(process)
        self.assertEqual(result.returncode, 128 + signal.SIGKILL)
        self.assert_ended(*_MEMBERS)


class ArgumentsTest(_LaunchTestCase):
    @parameterized.parameters(
        (["train.py"], "either --workers N"),
        (["--workers", "2", "--hosts", "a:1,b:1", "train.py"], "either --workers N"),
        (["--workers", "0", "train.py"], "--workers"),
        (["--workers", "2"], "SCRIPT"),
        (["--workers", "2", "missing.py"], "'missing.py': there is no such script"),
        (["--workers", "2", "--index", "0", "train.py"], "--index needs --hosts"),
        (["--workers", "2", "--devices-per-worker", "0", "train.py"], "--devices-per-worker"),
        (["--workers", "2", "--no-such-option", "train.py"], "--no-such-option"),
        (["--hosts", "a:1,b:1", "train.py"], "--hosts needs --index: which of the 2"),
        (["--hosts", "a:1,b:1", "--index", "2", "train.py"], "less than the number of hosts, 2"),
        (["--hosts", "a,b:1", "--index", "0", "train.py"], "NAME:PORT"),
        (["--hosts", "a:70000", "--index", "0", "train.py"], "a:70000"),
        (["--hosts", "a:1,a:1", "--index", "0", "train.py"], "'a:1' twice"),
        (["--hosts", "", "--index", "0", "train.py"], "NAME:PORT"),
    )  # fmt: skip
    def test_a_wrong_argument_gets_one_line(self, arguments: list[str], named: str):
        result = self.launch(*arguments, script="mark('started')")
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        (line,) = result.stderr.splitlines()
        self.assertStartsWith(line, "tfcdo: ")
        self.assertIn(named, line)
        self.assertFalse((self.folder / "started").exists())

    def test_a_port_in_use_is_named_before_anything_starts(self):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            address = f"localhost:{server.getsockname()[1]}"
            result = self.launch(
                "--hosts", f"{address},b:1", "--index", "0", "train.py", script="mark('started')"
            )
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        (line,) = result.stderr.splitlines()
        self.assertIn(f"--hosts {address}: ", line)
        self.assertIn("Address already in use", line)
        self.assertFalse((self.folder / "started").exists())

    def test_tensorflow_is_not_imported(self):
        code = (
            "import sys; from tfcdo.cli import launch; "
            "sys.exit(any(name in sys.modules for name in ('tensorflow', 'numpy', 'keras')))"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=_SECONDS)


class EnvironmentTest(parameterized.TestCase):
    @parameterized.parameters((None, None), ("", None), ("3", 3), (" 12 ", 12))
    def test_devices_per_worker(self, text: str | None, expected: int | None):
        with _variable(environment.DEVICES_PER_WORKER, text):
            self.assertEqual(environment.devices_per_worker(), expected)

    @parameterized.parameters("0", "-1", "two", "1.5", "²")
    def test_bad_devices_per_worker(self, text: str):
        with (
            _variable(environment.DEVICES_PER_WORKER, text),
            self.assertRaisesRegex(ValueError, f"_PER_WORKER must be a positive .*{text}"),
        ):
            environment.devices_per_worker()


@contextlib.contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


if __name__ == "__main__":
    absltest.main()
