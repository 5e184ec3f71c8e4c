"""Keras trainings on two hosts of two devices each, compared with one device."""

from __future__ import annotations

import clusters
import host
import host_keras
import numpy as np
import tensorflow as tf

_TIMEOUT = 400.0
# Sums of gradients over the examples of a replica are rounded in float16; a step that one replica
# alone takes or leaves out makes a difference of some hundredths.
_TRAININGS = {
    "mended_keras": 2e-6,
    "sharded_state": 2e-5,
    "mixed_float16": 5e-3,
    "jit": 3e-5,
    "callbacks": 1e-5,
    "uneven_loop": 0.0,
}


class HostsTest(tf.test.TestCase):
    def test_two_hosts(self):
        """One test, as each of pytest's processes would start hosts of its own."""
        names = ["shuffled", "unlike_sizes", *_TRAININGS, "in_sync", "other_weights"]
        results, outcomes = clusters.run_scenarios(2, host.__file__, 2, names, _TIMEOUT)
        for name, tolerance in _TRAININGS.items():
            with self.subTest(name):
                self.check_training(name, results[name], tolerance)
        with self.subTest("with a seed, an epoch has each example once; without, hosts warn"):
            for own, outcome in zip(results["shuffled"], outcomes, strict=True):
                self.assertAllClose(np.ones_like(own["seen"]), own["seen"])
                self.assertEqual(outcome.output.count("is shuffled without a seed"), 1)
            # By the host that came last, at least.
            self.assertRegex("".join(o.output for o in outcomes), "with other seeds than on")
        with self.subTest("sizes that change"):
            for own in results["unlike_sizes"]:
                self.assertAllEqual(np.zeros([349, 4]), own["predicted"])
                self.assertAllEqual(np.full(210, 4), own["sums"])
        with self.subTest("callbacks stop before the 20 epochs are over, in smaller steps"):
            rates = results["callbacks"][0]["learning_rate"]
            self.assertLess(len(rates), 20)
            self.assertLess(rates[-1], rates[0])
        with self.subTest("statistics"):
            self.check_statistics(*results["in_sync"])
        with self.subTest("a break is found on all hosts"):
            for own in results["in_sync"]:
                self.assertRegex(
                    str(own["message"]),
                    r"^after execution 3 of the train step, replica 3 \(host 1\) holds other "
                    r"numbers of \S*kernel than replica 0, by 0\.5\S* at most; of \d+ variables 1 ",
                )
        with self.subTest("other weights are found at once"):
            for own in results["other_weights"]:
                self.assertRegex(
                    str(own["message"]),
                    r"^after execution 1 of the train step, replica 2 \(host 1\) holds other "
                    r"numbers of \S*kernel than replica 0, by 0\.\S* at most; "
                    r".*check_in_sync=False",
                )

    def check_training(self, name, results, tolerance):
        for key, expected in getattr(host_keras, name)(None).items():
            for own in results:
                actual = own[key]
                if key.startswith("replica"):
                    self.assertLen(actual, 2)
                    for replica in actual:
                        self.assertEqual(results[0][key][0].tobytes(), replica.tobytes())
                    expected, actual = expected[:1], actual[:1]
                np.testing.assert_allclose(
                    actual, expected, rtol=tolerance, atol=tolerance, err_msg=key
                )

    def check_statistics(self, first, second):
        before = np.concatenate([first["before"], second["before"]])
        self.assertLen(np.unique(before, axis=0), 4)
        for own in first, second:
            self.assertAllClose(before.mean(0, np.float64), own["mean"], rtol=1e-6)
        after = np.concatenate([own["synchronized"] for own in (first, second)])
        self.assertLen(np.unique(after, axis=0), 1)


if __name__ == "__main__":
    tf.test.main()
