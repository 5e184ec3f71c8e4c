"""Tests of what tfcdo.keras adds, on two hosts of two devices each, compared with one device."""

from __future__ import annotations

import pathlib
import tempfile

import clusters
import host_keras
import numpy as np
import tensorflow as tf

_TIMEOUT = 400.0


class HostsTest(tf.test.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with tempfile.TemporaryDirectory() as folder:
            names = ["mended_keras", "in_sync"]
            for outcome in clusters.run(2, "host", ["2", folder, *names], _TIMEOUT):
                assert outcome.returncode == 0, outcome.output
            cls.results = {
                name: [dict(np.load(pathlib.Path(folder, f"{name}-{host}.npz"))) for host in (0, 1)]
                for name in names
            }

    def test_as_on_one_device(self):
        for key, expected in host_keras.mended_keras(None).items():
            for host in self.results["mended_keras"]:
                with self.subTest(key):
                    actual = host[key]
                    if key.startswith("replica"):
                        first = self.results["mended_keras"][0][key][0]
                        self.assertLen(actual, 2)
                        for replica in actual:
                            self.assertEqual(first.tobytes(), replica.tobytes())
                        expected, actual = expected[:1], actual[:1]
                    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)

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


if __name__ == "__main__":
    tf.test.main()
