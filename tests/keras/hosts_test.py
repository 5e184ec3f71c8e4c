"""Tests of what tfcdo.keras adds, on two hosts of two devices each, compared with one device."""

from __future__ import annotations

import pathlib
import tempfile

import clusters
import host_keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

_TIMEOUT = 400.0


class HostsTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with tempfile.TemporaryDirectory() as folder:
            names = [
                "mended_keras",
                "sharded_state",
                "mixed_float16",
                "jit",
                "in_sync",
                "other_weights",
            ]
            for outcome in clusters.run(2, "host", ["2", folder, *names], _TIMEOUT):
                assert outcome.returncode == 0, outcome.output
            cls.results = {
                name: [dict(np.load(pathlib.Path(folder, f"{name}-{host}.npz"))) for host in (0, 1)]
                for name in names
            }

    # Sums of gradients over the examples of a replica are rounded in float16; a step that one
    # replica alone takes or leaves out makes a difference of some hundredths.
    @parameterized.parameters(
        ("mended_keras", 2e-6), ("sharded_state", 2e-5), ("mixed_float16", 5e-3), ("jit", 3e-5)
    )
    def test_as_on_one_device(self, name, tolerance):
        for key, expected in getattr(host_keras, name)(None).items():
            for host in self.results[name]:
                with self.subTest(key):
                    actual = host[key]
                    if key.startswith("replica"):
                        first = self.results[name][0][key][0]
                        self.assertLen(actual, 2)
                        for replica in actual:
                            self.assertEqual(first.tobytes(), replica.tobytes())
                        expected, actual = expected[:1], actual[:1]
                    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)

    def test_statistics(self):
        first, second = self.results["in_sync"]
        own = np.concatenate([first["before"], second["before"]])
        self.assertLen(np.unique(own, axis=0), 4)
        for host in first, second:
            self.assertAllClose(own.mean(0, np.float64), host["mean"], rtol=1e-6)
        after = np.concatenate([host["synchronized"] for host in (first, second)])
        self.assertLen(np.unique(after, axis=0), 1)

    def test_a_break_is_found_on_all_hosts(self):
        for host in self.results["in_sync"]:
            self.assertRegex(
                str(host["message"]),
                r"^after step 2, replica 3 \(host 1\) holds other numbers of \S*kernel than "
                r"replica 0, by 0\.5\S* at most; of \d+ variables 1 differ somewhere$",
            )

    def test_other_weights_are_found_at_once(self):
        for host in self.results["other_weights"]:
            self.assertRegex(
                str(host["message"]),
                r"^after execution 1 of the train step, replica 2 \(host 1\) holds other numbers "
                r"of \S*kernel than replica 0, by 0\.\S* at most; .*check_in_sync=False",
            )


if __name__ == "__main__":
    tf.test.main()
