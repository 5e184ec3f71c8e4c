from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import warm_python
from absl.testing import absltest
from launch_testing import is_running

from tfcdo.bench import worker_pool

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
            "import os, signal\n"
            "from tfcdo.bench import worker_pool\n"
            f"with worker_pool.start_workers({_COMMAND!r}, {_VARIABLES!r}) as pool:\n"
            "    answers = pool.call('twice', 60, number=1)\n"
            "    print(*(answer['pid'] for answer in answers), flush=True)\n"
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
