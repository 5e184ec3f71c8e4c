"""Training on several hosts, processes of this machine, compared with training on one device."""

from __future__ import annotations

import clusters
import host
import host_scenarios
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

_TIMEOUT = 240.0
_UNLIKE = ("unlike_correct", "unlike_refused")
# (scenario, how far from one device): near float32 rounding, but for layers that compute in 16
# bits, whose gradients are rounded on each replica.
TRAINING = {"fit": 2e-6, "own_loop": 2e-2, "end_of_data": 2e-6}


class TrainingTest(tf.test.TestCase, parameterized.TestCase):
    """Hosts x devices of each: its scenarios in one set of processes."""

    # Other numbers of hosts or devices change who sends what, which values and sums show, and not
    # what a training asks for.
    @parameterized.parameters(
        (
            *(2, 2),
            (
                *_UNLIKE,
                "explained",
                "fit",
                "own_loop",
                "end_of_data",
                "values",
                "functions_end",
                "requires_nccl",
                "flat",
            ),
        ),
        (3, 1, ("values",)),
    )
    def test_as_one_device(self, hosts, devices, names):
        results, _ = clusters.run_scenarios(hosts, host.__file__, devices, names, _TIMEOUT)
        if "flat" in names:
            with self.subTest("flat"):
                self.check_flat(np.concatenate([own["sums"] for own in results["flat"]]))
        for name in TRAINING.keys() & set(names):
            with self.subTest(name):
                self.check(name, results[name], devices, TRAINING[name])

    def check_flat(self, replicas):
        """Asserts correct sums, of the same bits on all replicas of all hosts."""
        self.assertLen(replicas, 4)
        self.assertLen({replica.tobytes() for replica in replicas}, 1)
        numbers = [host_scenarios.flat_numbers(r) for r in range(4)]
        self.assertAllClose(np.sum(numbers, 0, np.float64), replicas[0], rtol=0, atol=1e-5)

    def check(self, name, results, devices, tolerance):
        for key, expected in getattr(host_scenarios, name)(None).items():
            for own in results:
                actual = own[key]
                if key.startswith("replica"):
                    self.assertLen(actual, devices)
                    for replica in actual:
                        self.assertEqual(results[0][key][0].tobytes(), replica.tobytes(), key)
                    actual, expected_here = actual[0], expected[0]
                else:
                    expected_here = expected
                np.testing.assert_allclose(
                    actual, expected_here, rtol=tolerance, atol=tolerance, err_msg=key
                )


if __name__ == "__main__":
    tf.test.main()
