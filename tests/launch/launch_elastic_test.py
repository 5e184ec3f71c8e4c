"""`tfcdo launch --workers MIN:MAX`: workers that fail, leave and join, without TensorFlow."""

from __future__ import annotations

import re
import signal
import time
from unittest import mock

from absl.testing import absltest, parameterized
from launch_testing import LaunchTestCase

from tfcdo import environment
from tfcdo.launch import cluster, member, worker

# Like a training: it leaves with status 75 when it is told to, and ends once two have come back.
_TRAINING = f"""
count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
run = int(os.environ["{environment.RESTART_COUNT}"])
print("task", task, "of", count, "run", run, flush=True)
mark(f"run{{run}}-task{{task}}")
if run == 0 and task == 1: time.sleep(0.3); os.kill(os.getpid(), 9)
if run == 0: time.sleep(60)
while count == 1:
    if os.path.exists(os.environ["{environment.RESIZE_FILE}"]): sys.exit(75)
    time.sleep(0.02)
"""


class OneMachineTest(LaunchTestCase):
    def test_two_one_two(self):
        result = self.launch(
            *("--workers", "1:2", "--rejoin-after", "0.5", "--grace", "1", "train.py"),
            script=_TRAINING,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        runs = sorted(re.findall(r"task \d of \d run \d", result.stdout), key=lambda t: (t[-1], t))
        self.assertEqual(
            runs,
            [
                *("task 0 of 2 run 0", "task 1 of 2 run 0", "task 0 of 1 run 1"),
                *("task 0 of 2 run 2", "task 1 of 2 run 2"),
            ],
        )
        for line in ("going on without worker 1", "starting with 1 of 2 workers", "one more"):
            self.assertIn(line, result.stderr)

    @parameterized.parameters(("2:3", 1, 4), ("1:2", 0, 2), ("1:1", 0, 1), ("1:2", 1, 4))
    def test_too_few(self, workers: str, restarts: int, runs: int):
        result = self.launch(
            *("--workers", workers, "--max-restarts", str(restarts), "--grace", "1", "train.py"),
            script="""
            if task: time.sleep(60)
            sys.exit(3)
            """,
        )
        self.assertEqual(result.returncode, 3)
        self.assertEqual(result.stderr.count("failed: exit status 3"), runs)
        if workers != "1:1":
            self.assertRegex(result.stderr, r"at least \d workers, and there are \d: ending\n$")

    @parameterized.parameters("0:2", "3:2", "1:2:3", "a", "1:257", "")
    def test_wrong_numbers(self, workers: str):
        self.assert_refused("expected N or MIN:MAX", "--workers", workers, "train.py")


class SeveralMachinesTest(LaunchTestCase):
    def setUp(self):
        super().setUp()
        with cluster.reserved_ports(4) as addresses:
            self._hosts, self._meet = ",".join(addresses[:3]), addresses[3]

    def start_host(self, index: int, *arguments: str, script: str = ""):
        where = ("--hosts", self._hosts, "--meet", self._meet, "--index", str(index))
        return self.start(
            *("--workers", "2:3", *where, "--grace", "1", *arguments, "train.py"), script=script
        )

    def test_starts_with_two_goes_on_after_a_loss_and_takes_new_ones_in(self):
        script = f"""
        count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
        mark(f"{{count}}-workers-task{{task}}")
        if count == 3: sys.exit(0)
        while not os.path.exists(os.environ["{environment.RESIZE_FILE}"]): time.sleep(0.02)
        sys.exit(75)
        """
        first = self.start_host(0, "--join-timeout", "12", script=script)
        lost = self.start_host(2)
        self.read_pid("2-workers-task1")
        # Its machine is gone; then there is only one, which waits for the third host.
        lost.kill()
        lost.communicate()
        (self.folder / "2-workers-task1").unlink()
        second = self.start_host(1)
        self.read_pid("2-workers-task1")
        third = self.start_host(2)
        results = [self.finish(process) for process in (first, second, third)]
        self.assertEqual([result.returncode for result in results], [0, 0, 0], results)
        self.assertIn("worker 2 failed: exit status 137", results[0].stderr)
        self.assertIn("there is one more worker", results[0].stderr)

    def test_a_job_that_cannot_reach_its_least_number(self):
        result = self.finish(self.start_host(0, "--join-timeout", "0.5", script="pass"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("needs at least 2 workers, and there are 1 after 0.5 s", result.stderr)

    def test_a_launcher_that_finds_nobody(self):
        result = self.finish(self.start_host(1, "--join-timeout", "0.5", script="pass"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("cannot be reached", result.stderr)

    def test_a_machine_that_will_be_taken_away_leaves_first(self):
        script = """
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))
        mark(f"task{task}")
        while True: time.sleep(0.05)
        """
        first = self.start_host(0, "--join-timeout", "8", script=script)
        second = self.start_host(1)
        self.read_pid("task1")
        second.send_signal(signal.SIGTERM)
        result = self.finish(second)
        self.assertEqual(result.returncode, 128 + signal.SIGTERM, result.stderr)
        first.send_signal(signal.SIGTERM)
        self.finish(first)
        self.assert_ended("task0", "task1")

    @parameterized.parameters((1.0, 130.0), (60.0, 160.0))
    def test_how_long_a_worker_may_take_to_leave(self, grace: float, deadline: float):
        spec = worker.WorkerSpec("worker 1", b"", b"", {}, 1)
        launcher = member.Member((), spec, ("", 0), "", 0.0, grace)
        launcher._process = launcher._connection = mock.Mock()
        with mock.patch.object(time, "monotonic", return_value=100.0):
            self.assertIsNone(launcher._handle_signal(signal.SIGTERM))
        self.assertEqual(deadline, launcher._deadline)


if __name__ == "__main__":
    absltest.main()
