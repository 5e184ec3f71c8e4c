"""Exchanges on several hosts, which are processes: as rehearsed, and casts within their bounds."""

from __future__ import annotations

import clusters
import host
import host_wire
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from exchange_cases import CASES, SHAPES, STEPS, given, numbers, shapes_for
from wire_bounds import block_error_bound, error_bound

from tfcdo.exchange import Rehearsal

_TIMEOUT = 600.0


class HostsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        # Hosts that have disagreed are not meant to go on: nothing comes after "unlike".
        (2, 2, ("contract", "by_path", "unlike")),
        (3, 1, ("contract", "exchanges")),
    )
    def test_hosts(self, hosts, devices, names):
        results, _ = clusters.run_scenarios(hosts, host.__file__, devices, names, _TIMEOUT)
        for name in names:
            if name != "unlike":
                with self.subTest(name):
                    getattr(self, f"check_{name}")(results[name], hosts, devices)

    def alike(self, of_hosts, hosts, devices):
        """Asserts that all replicas of all hosts have the same bits; returns the first one's."""
        results = {}
        for key in of_hosts[0]:
            replicas = [replica for own in of_hosts for replica in own[key]]
            self.assertLen(replicas, hosts * devices)
            self.assertLen({replica.tobytes() for replica in replicas}, 1, key)
            results[key] = replicas[0]
        return results

    def check_by_path(self, weights, hosts, devices):
        """Asserts that only the weights of one path are rounded."""
        del hosts, devices
        for key in weights[0]:
            self.assertAllEqual(weights[0][key], weights[1][key])

    def check_contract(self, of_hosts, hosts, devices):
        results = self.alike(of_hosts, hosts, devices)
        for name in {key.rsplit(" ", 2)[0] for key in results if key.split()[-2].isdigit()}:
            with self.subTest(name):
                self.check_as_rehearsed(name, results, hosts, devices)
                explained, sent = results[f"{name} bytes"]
                if name != "PowerSGD late":  # Whose first steps send more.
                    self.assertEqual(explained, round(sent))

    def check_as_rehearsed(self, name, results, hosts, devices):
        exchange = CASES[name].exchange
        order = results[f"{name} order"]
        rehearsal = Rehearsal(exchange, shapes_for(exchange, order), hosts)
        for step in range(STEPS):
            # A host's sum of two is the same bits in any order.
            by_host = [
                [
                    np.sum(each, 0)
                    for each in zip(
                        *(numbers(host * devices + one, step) for one in range(devices)),
                        strict=True,
                    )
                ]
                for host in range(hosts)
            ]
            sums = rehearsal.step([given(exchange, values, order) for values in by_host])
            if not exchange.whole_values:
                cuts = np.cumsum([np.prod(SHAPES[index]) for index in order])[:-1]
                sums = np.split(sums[0], cuts)
            for index, wanted in zip(order, sums, strict=True):
                found = results[f"{name} {step} {index}"]
                self.assertAllClose(np.reshape(wanted, SHAPES[index]), found, rtol=0, atol=1e-4)

    def check_exchanges(self, of_hosts, hosts, devices):
        """Asserts the error's bound, and the same bits on all replicas of all hosts."""
        results = self.alike(of_hosts, hosts, devices)
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
        if case == "exact" and name != "int8":
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


if __name__ == "__main__":
    tf.test.main()
