import json
import subprocess
from typing import Any

import warm_python
from absl.testing import absltest, parameterized

from tfcdo.virtual_devices import configure_virtual_cpus

# TensorFlow starts once in a process, so each story has a process of its own.
_PREAMBLE = """
import json
import tensorflow as tf
from tfcdo.virtual_devices import configure_virtual_cpus
def names(): return [device.name for device in tf.config.list_logical_devices("CPU")]
def refusal(count):
    try: configure_virtual_cpus(count)
    except RuntimeError as error: return str(error)
"""
_GROWING = """
returned = {count: configure_virtual_cpus(count) for count in (2, 3, 1)}
seen = names()
told = [returned, seen, configure_virtual_cpus(3), refusal(4)]
"""
_THREADS = """
import os
from tfcdo.topology.detection import num_cores
from tfcdo.virtual_devices import configure_threads
threading = tf.config.threading
def of(cores, devices):
    os.cpu_count, os.sched_getaffinity = lambda: 64, lambda process: range(cores)
    configure_threads(devices, num_cores())
    return threading.get_inter_op_parallelism_threads()
told = [of(64, 4), of(2, 4), of(2, 8)]
threading.set_inter_op_parallelism_threads(0)
os.environ["TF_NUM_INTEROP_THREADS"] = "3"
told.append(of(2, 4))
"""


def _told(story: str) -> Any:
    code = f"{_PREAMBLE}{story}print(json.dumps(told))"
    return json.loads(subprocess.check_output([warm_python.executable(), "-c", code], text=True))


class ConfigureVirtualCpusTest(parameterized.TestCase):
    def test_the_largest_number_before_the_start_counts(self):
        *told, refused = _told(_GROWING)
        three = ["CPU:0", "CPU:1", "CPU:2"]
        returned = {"1": three[:1], "2": three[:2], "3": three}
        self.assertEqual(told, [returned, [f"/device:{name}" for name in three], three])
        self.assertStartsWith(
            refused, "4 virtual CPU devices are needed, but TensorFlow has already started with 3:"
        )

    @parameterized.parameters(
        (0, "at least 1; got 0"), (-1, "at least 1; got -1"), (True, "an int; got"), ("2", "an int")
    )
    def test_the_number_is_checked(self, count: Any, message: str):
        with self.assertRaisesRegex((ValueError, TypeError), f"count must be {message}"):
            configure_virtual_cpus(count)

    def test_more_threads_than_cores_unless_somebody_has_chosen(self):
        # On many cores, on few, where tfcdo has chosen, and where the variable has.
        self.assertEqual([0, 16, 16, 0], _told(_THREADS))


if __name__ == "__main__":
    absltest.main()
