"""Training on several hosts, processes of this machine, compared with training on one device."""

from __future__ import annotations

import pathlib
import tempfile

import clusters
import host_scenarios
import host_wire
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from wire_bounds import block_error_bound, error_bound

from tfcdo.exchange import rounding

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
        (3, 1, ("values", "exchanges")),
    )
    def test_as_one_device(self, hosts, devices, names):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = clusters.run(hosts, "host", [str(devices), folder, *names], _TIMEOUT)
            for outcome in outcomes:
                self.assertEqual(0, outcome.returncode, outcome.output)
            if "flat" in names:
                with self.subTest("flat"):
                    self.check_flat(folder, hosts, devices)
            if "exchanges" in names:
                self.check_wire(folder, hosts, devices)
            for name in TRAINING.keys() & set(names):
                results = [
                    dict(np.load(pathlib.Path(folder, f"{name}-{host}.npz")))
                    for host in range(hosts)
                ]
                with self.subTest(name):
                    self.check(name, results, devices, TRAINING[name])

    def check_flat(self, folder, hosts, devices):
        """Asserts right sums, of the same bits on all replicas of all hosts."""
        sums = [np.load(pathlib.Path(folder, f"flat-{host}.npz"))["sums"] for host in range(hosts)]
        replicas = np.concatenate(sums)
        self.assertLen(replicas, hosts * devices)
        self.assertLen({replica.tobytes() for replica in replicas}, 1)
        numbers = [host_scenarios.flat_numbers(r) for r in range(hosts * devices)]
        self.assertAllClose(np.sum(numbers, 0, np.float64), replicas[0], rtol=0, atol=1e-5)

    def check_wire(self, folder, hosts, devices):
        """Asserts the error's bound, and the same bits on all replicas of all hosts."""
        files = [np.load(pathlib.Path(folder, f"exchanges-{host}.npz")) for host in range(hosts)]
        results = {}
        for key in files[0]:
            replicas = [replica for file in files for replica in file[key]]
            self.assertLen(replicas, hosts * devices)
            self.assertLen({replica.tobytes() for replica in replicas}, 1, key)
            results[key] = replicas[0]
        for name in host_wire.WIRE_DTYPES:
            for case in host_wire.CASES:
                with self.subTest(f"{name} {case}"):
                    self.check_cast(name, case, hosts, hosts * devices, results)
            # None of these is cast: a small pack, other dtypes, integers even as they are averaged,
            # and a value that is reduced alone.
            for case in ("small", "int32", "float16", "mean of int32", "alone"):
                self.assertAllEqual(results[f"uncast {case}"], results[f"{name} {case}"])
            # Each sends all other hosts their shares, and its sums; float16 with a scale for each,
            # and int8 with one for each block of a share.
            row = 2 * 4800 // hosts + (4 if name == "float16" else 0)
            if name == "int8":
                blocks = -(-4800 // (256 * hosts))
                row = blocks * (2 * -(-4800 // (2 * hosts * blocks)) + 4)
                self.assertLess(results["int8 bytes"], 0.27 * 2 * (hosts - 1) / hosts * 4 * 4800)
            self.assertEqual(2 * (hosts - 1) * row, results[f"{name} bytes"])
            gradient = sum(range(1, hosts * devices + 1))
            self.assertAllEqual(np.full(1100, gradient, np.float32), results[f"{name} gradient"])
            self.check_feedback(name, hosts, hosts * devices, results)

    def check_feedback(self, name, num_hosts, num_replicas, results):
        """Asserts that over several steps no more is lost than what is kept for the next one."""
        values = np.stack([host_wire.numbers("float32", r) for r in range(num_replicas)])
        steps = host_wire.FEEDBACK_STEPS
        exact = steps * values.sum(0, np.float64)
        largest = np.abs(values).reshape(num_hosts, -1, values.shape[1]).sum(1).max(1).sum()
        roundoff = rounding.ROUNDOFF[name]
        bound = (2 * roundoff / (1 - roundoff) ** 2 + steps * 2.0**-21) * largest
        self.assertLess(np.abs(results[f"{name} feedback"] - exact).max(), bound)
        without = steps * results[f"{name} float32"].astype(np.float64)
        self.assertGreater(np.abs(without - exact).max(), bound)

    def check_cast(self, name, case, num_hosts, num_replicas, results):
        actual = results[f"{name} {case}"].astype(np.float64)
        terms = np.stack([host_wire.numbers(case, r) for r in range(num_replicas)])
        dtype = tf.as_dtype(terms.dtype)
        terms = terms.astype(np.float64)
        with np.errstate(invalid="ignore"):
            expected = terms.sum(axis=0)
        finite = np.isfinite(expected)
        if name == "int8":  # All of a block is NaN where one of its numbers is not finite.
            self.assertAllEqual(np.isnan(actual[~finite]), np.ones(np.sum(~finite)))
            finite &= ~np.isnan(actual)
            self.assertAllEqual(np.isfinite(actual[256:]), np.ones(len(actual[256:])))
        else:
            self.assertAllEqual(expected[~finite], actual[~finite])
        # A sum of 257 inside a host is rounded before it travels.
        exact = case == "exact" or (case == "not swallowed" and num_hosts == num_replicas)
        if exact and name != "int8":
            self.assertAllEqual(expected, actual)
        if dtype in (tf.float32, tf.float64):
            magnitudes = np.abs(terms[:, finite])
            if name == "int8":
                by_host = magnitudes.reshape(num_hosts, -1, magnitudes.shape[1]).sum(axis=1)
                bound = block_error_bound(by_host, num_replicas)
            else:
                bound = error_bound(magnitudes.sum(axis=0), 1, num_replicas, name, dtype)
            error = np.abs(actual - expected)[finite]
            self.assertTrue(np.all(error <= bound), (error / bound).max())
            if case in ("float32", "float64"):
                # It has been cast, and what is needed of the bound is not a small part.
                self.assertGreater((error / bound).max(), 0.1)

    def check(self, name, results, devices, tolerance):
        for key, expected in getattr(host_scenarios, name)(None).items():
            for host in results:
                actual = host[key]
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
