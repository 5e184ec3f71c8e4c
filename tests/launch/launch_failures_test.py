"""`tfcdo launch` when a worker fails or somebody ends it: nothing is left behind."""

import io
import os
import signal
import subprocess
from unittest import mock

import psutil
from absl.testing import absltest, parameterized
from launch_testing import LaunchTestCase

from tfcdo.cluster import protocol, worker
from tfcdo.launch import supervisor


class FailureTest(LaunchTestCase):
    def test_all_end_with_the_status_of_the_first_that_failed(self):
        result = self.launch(
            *("--workers", "3", "train.py"),
            PYTHONWARNINGS="error::ResourceWarning",  # A file that is not closed is a line.
            script=f"""
            def end(*_):
                print("failed", os.path.exists(os.environ["{worker.FAILURE_FILE}"]))
                sys.exit(4)  # The others fail too when they are asked to end.
            signal.signal(signal.SIGTERM, end)
            mark(f"worker{{task}}")
            if task == 1:
                while not all(os.path.exists(f"worker{{other}}") for other in range(3)):
                    time.sleep(0.01)
                print("last words", file=sys.stderr)
                sys.exit(3)
            while True: time.sleep(0.1)
            """,
        )
        self.assertEqual(result.returncode, 3)
        said = "worker 1 | last words\ntfcdo: worker 1 failed: exit status 3; ending the others\n"
        self.assertEqual(result.stderr, said)
        lines = ["worker 0 | failed True", "worker 2 | failed True"]
        self.assertCountEqual(result.stdout.splitlines(), lines)
        self.assert_ended("worker0", "worker1", "worker2")

    def test_a_killed_worker_one_that_does_not_listen_and_a_restart(self):
        result = self.launch(
            *("--workers", "2", "--grace", "0.2", "--max-restarts", "1", "train.py"),
            script=f"""
            count = os.environ["{worker.RESTART_COUNT}"]
            print(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mark(f"worker{{task}}-{{count}}")
            if task == 1:
                while not os.path.exists(f"worker0-{{count}}"): time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            while True: time.sleep(0.1)
            """,
        )
        self.assertEqual(result.returncode, 128 + signal.SIGKILL)
        ends = [
            "tfcdo: worker 1 failed: exit status 137 (SIGKILL); ending the others",
            "tfcdo: killing worker 0",
        ]
        again = "tfcdo: starting all workers again (restart 1 of 1)"
        self.assertEqual(result.stderr.splitlines(), [*ends, again, *ends])
        self.assertLen({*result.stdout.splitlines()}, 4)  # The workers of each run have new ports.
        self.assert_ended("worker0-0", "worker1-0", "worker0-1", "worker1-1")

    def test_a_worker_that_ends_because_of_another_one_is_not_blamed(self):
        result = self.launch(
            *("--workers", "2", "train.py"),
            script="""
            from tfcdo.cluster import worker
            if task:
                sys.exit(worker.tell_that_another_has_failed() or 1)
            time.sleep(1.0)  # The chief leaves last.
            sys.exit(3)
            """,
        )
        self.assertEqual(result.returncode, 3)
        self.assertEqual(result.stderr, "tfcdo: worker 0 failed: exit status 3\n")

    def test_a_worker_ended_when_its_guard_says_and_not_when_that_is_heard(self):
        process = mock.Mock(_number=1, _end=io.BytesIO(b"3 12.5\n"))
        process._failure_file.exists.return_value = False
        supervisor.Process._wait(process)
        process._events.put.assert_called_once_with(protocol.End(1, 3, 12.5))

    def test_workers_that_ask_for_it_are_started_again_but_not_without_end(self):
        result = self.launch(
            *("--workers", "2", "train.py"),
            before="from tfcdo.launch import supervisor; supervisor._SHORTEST_RUN_SECONDS = 2.0",
            script=f"""
            if os.environ["{worker.RESTART_COUNT}"] == "0":
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
                mark(f"worker{{task}}")
                while not os.path.exists(f"worker{{1 - task}}"): time.sleep(0.01)
                # Worker 0 is not asked to end, but left to make its backup.
                time.sleep(2.0 if task else 2.5)
            sys.exit({protocol.RESTART_STATUS})  # Earlier the second time: that is a failure.
            """,
        )
        self.assertEqual(result.returncode, protocol.RESTART_STATUS)
        asks = "asks to be started again, after a backup; waiting for the others\n"
        again = f"{asks}tfcdo: starting all workers again, as asked after a backup\ntfcdo: worker"
        # On a busy machine, the second run is not short.
        self.assertRegex(result.stderr, f"^tfcdo: worker 1 ({again} [01] ){{1,4}}{asks}$")


# A worker and a child of each kind: its own, and one in another session whose parent has ended.
_FAMILY = """
child = "echo $$ > {}; exec sleep 600"
subprocess.Popen(child.format(f"child{task}"), shell=True)
subprocess.run(f"setsid sh -c '{child.format(f'orphan{task}')}' &", shell=True)
while not (os.path.exists(f"child{task}") and os.path.exists(f"orphan{task}")): time.sleep(0.01)
mark(f"worker{task}")
"""
_MEMBERS = [f"{kind}{task}" for kind in ("worker", "child", "orphan") for task in (0, 1)]


class NothingLeftTest(LaunchTestCase):
    def start_family(self, *given: str, then: str, **more: str) -> subprocess.Popen[str]:
        process = self.start("--workers", "2", *given, "train.py", script=_FAMILY + then, **more)
        for name in _MEMBERS:
            self.read_pid(name)
        return process

    def send_after(self, step: str, process: subprocess.Popen[str], number: int) -> None:
        """Sends the launcher a signal as soon as both workers have marked a step."""
        for task in (0, 1):
            self.read_pid(f"{step}{task}")
        process.send_signal(number)

    def check_end(self, process: subprocess.Popen[str], status: int, output: str = "") -> str:
        """Asserts that all have ended; returns what the launcher has said."""
        result = self.finish(process)
        self.assertEqual(result.returncode, status)
        self.assertEqual(sorted(result.stdout.splitlines()), output.splitlines())
        self.assert_ended(*_MEMBERS)
        return result.stderr

    def test_signals_reach_the_workers_and_end_the_job(self):
        process = self.start_family(
            *("--max-restarts", "2"),
            before="import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
            then=f"""
import psutil
got, _ = [], subprocess.run("true &", shell=True)
signal.signal(signal.SIGHUP, lambda *_: got.append(1))
signal.signal(signal.SIGUSR1, lambda *_: mark(f"told{{task}}"))
mark(f"ready{{task}}")
while not got: time.sleep(0.02)
near = {{one.status() for one in psutil.Process().parent().children(recursive=True)}}
print("tidied up", os.path.exists(os.environ["{worker.FAILURE_FILE}"]), *near & {{"zombie"}})
""",
        )
        self.send_after("ready", process, signal.SIGINT)  # Is ignored, as by `nohup`.
        psutil.Process(self.read_pid("worker0")).parent().terminate()  # type: ignore[union-attr]
        self.send_after("ready", process, signal.SIGUSR1)  # Is only passed on.
        self.send_after("told", process, signal.SIGHUP)
        output = "worker 0 | tidied up False\nworker 1 | tidied up False"
        said = self.check_end(process, 128 + signal.SIGHUP, output)
        self.assertEqual(said, "tfcdo: got SIGHUP: passing it on to the workers\n")

    def test_a_stopped_worker_is_ended_too(self):
        process = self.start_family(
            *("--grace", "600"),
            then="""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("tidied up")))
mark(f"ready{task}")
while True: time.sleep(0.1)
""",
        )
        self.read_pid("ready1")
        stopped = psutil.Process(self.read_pid("worker1"))
        for process_of_worker in stopped, stopped.parent():  # As by `pkill -STOP -f train.py`.
            process_of_worker.suspend()  # type: ignore[union-attr]
        os.kill(self.read_pid("worker0"), signal.SIGKILL)
        self.check_end(process, 128 + signal.SIGKILL, "worker 1 | tidied up")

    @parameterized.parameters("launcher", "guard")
    def test_the_launcher_or_a_guard_is_killed(self, victim: str):
        process = self.start_family(then="while True: time.sleep(0.1)", TMPDIR=str(self.folder))
        if victim == "launcher":
            process.kill()
        else:
            psutil.Process(self.read_pid("worker0")).parent().kill()  # type: ignore[union-attr]
        self.check_end(process, -signal.SIGKILL if victim == "launcher" else 128 + signal.SIGKILL)
        self.wait_until(lambda: not [*self.folder.glob("tfcdo-launch-*")])


if __name__ == "__main__":
    absltest.main()
