"""Hosts that train alone and exchange their parameters in turn, compared with a simulation.

The simulation is two trainings on one device each, whose parameters are averaged by numpy.
"""

from __future__ import annotations

import pathlib
import tempfile

import clusters
import host_diloco
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from host_diloco import BATCH, EPOCHS, STEPS

from tfcdo.exchange import DiLoCo

_TIMEOUT = 900.0
# The matrix of 40 x 40 values is a fragment, and the one of 6 x 40 values; all others are the last.
_SHARES = (6, 4)  # Four replicas have 3, 3, 2 and 2 of 10 examples.
_FRAGMENTS = (1, 2, 0, 2, 2, 2)


class _Outer:
    """SGD(0.7, momentum=0.9, nesterov=True), in 64 bits."""

    def __init__(self, parameters):
        self.common = [one.astype(np.float64) for one in parameters]
        self._velocity = [np.zeros_like(one) for one in self.common]

    def update(self, at, of_hosts):
        mean = np.average([one.astype(np.float64) for one in of_hosts], axis=0, weights=_SHARES)
        gradient = self.common[at] - mean
        self._velocity[at] = 0.9 * self._velocity[at] - 0.7 * gradient
        self.common[at] += 0.9 * self._velocity[at] - 0.7 * gradient


def _simulate(every, make=host_diloco.adam, fragments=(0,) * 6, updates_every=1):
    """Returns the common parameters after each epoch, and in the end."""
    hosts = [host_diloco.model_with(make()) for _ in range(2)]
    inputs, targets = host_diloco.data()
    outer = _Outer(hosts[0].get_weights())
    count = max(fragments) + 1
    period, done, after_epochs = every * updates_every, 0, []
    last = [0] * count  # The step of each fragment's last exchange.

    def exchange(fragment, begun):
        """Exchanges the parameters with which the last step began; what it changed is kept."""
        values = [model.get_weights() for model in hosts]
        for at, own in enumerate(fragments):
            if own == fragment:
                outer.update(at, [value[at] for value in begun])
                for value, before in zip(values, begun, strict=True):
                    value[at] = np.float32(outer.common[at] + (value[at] - before[at]))
        for model, value in zip(hosts, values, strict=True):
            model.set_weights(value)

    for _ in range(EPOCHS):
        for batch in range(STEPS):
            begun = [model.get_weights() for model in hosts]
            for model, begin, end in zip(hosts, (0, 6), (6, 10), strict=True):
                rows = slice(batch * BATCH + begin, batch * BATCH + end)
                model.train_on_batch(inputs[rows], targets[rows])
            done += 1
            for fragment in range(count):
                # Fragments are exchanged while the next step is computed.
                at = done - (fragment + 1) * period // count - (count > 1)
                if at % period == 0 and (count == 1 or done > 1):
                    now = [model.get_weights() for model in hosts]
                    exchange(fragment, begun if count > 1 else now)
                    last[fragment] = done - (count > 1)
        after_epochs.append([one.copy() for one in outer.common])
    for fragment in range(count):
        if last[fragment] < done:
            exchange(fragment, [model.get_weights() for model in hosts])
    return after_epochs, outer.common


class DiLoCoTest(tf.test.TestCase, parameterized.TestCase):
    def test_two_hosts(self):
        """One test, as each of pytest's processes would start hosts of its own."""
        with tempfile.TemporaryDirectory() as folder:
            outcomes = clusters.run(2, host_diloco.__file__, [folder], _TIMEOUT)
            for outcome in outcomes:
                self.assertEqual(outcome.returncode, 0, outcome.output)
            results = {
                scenario.__name__: [
                    dict(np.load(pathlib.Path(folder, f"{scenario.__name__}-{host}.npz")))
                    for host in (0, 1)
                ]
                for scenario in host_diloco.SCENARIOS
            }
            saved = []
            for epoch in range(EPOCHS):
                model = host_diloco.model_with("sgd")
                model.load_weights(pathlib.Path(folder, f"saved-{epoch}.weights.h5"))
                saved.append(model.get_weights())
        for name, hosts in results.items():
            with self.subTest(f"all replicas hold the same: {name}"):
                self.check_same(hosts)
        with self.subTest("averages of each step are synchronous training"):
            self.check_synchronous(results["synchronous"][0])
            self.check_synchronous(results["one_device"][0])
        after_epochs, expected = _simulate(3)
        with self.subTest("what is read and saved in between is what all hosts have"):
            for epoch, common in enumerate(after_epochs):
                read = [results["alone"][1][f"read_{epoch}_{at}"] for at in range(len(common))]
                self.assertAllClose(common, read, atol=1e-6)
                self.assertAllClose(common, saved[epoch], atol=1e-6)
        with self.subTest("other data is tried with what all hosts have"):
            model = host_diloco.model_with("sgd")
            model.set_weights(after_epochs[0])
            loss, _ = model.evaluate(*host_diloco.data(), verbose=0)
            self.assertNear(loss, results["alone"][1]["val_loss"][0], 1e-5)
        for name in ("alone", "executions", "sharded", "scaled", "own_loop"):
            with self.subTest(name):
                self.check_weights(expected, results[name][0], 1e-6)
        with self.subTest("fragments"):
            _, in_turn = _simulate(6, fragments=_FRAGMENTS)
            self.check_weights(in_turn, results["fragments"][0], 1e-6)
        with self.subTest("accumulated gradients"):
            _, accumulated = _simulate(2, host_diloco.accumulating, updates_every=2)
            self.check_weights(accumulated, results["accumulated"][0], 1e-6)
        with self.subTest("int8"):
            self.check_weights(expected, results["int8"][0], 2e-2)
            far = [
                np.abs(one - results["int8"][0][f"weight_{at}"][0]).max()
                for at, one in enumerate(expected)
            ]
            self.assertGreater(max(far), 1e-4)
        with self.subTest("resumed"):
            for host in (0, 1):
                for name, value in results["resumed"][host].items():
                    self.assertEqual(value.tobytes(), results["int8"][host][name].tobytes(), name)
        with self.subTest("other weights are found"):
            for found in results["other_weights"]:
                self.assertRegex(
                    str(found["message"]),
                    r"^after execution 1 of the train step, replica 2 \(host 1\) holds other "
                    r"numbers of \S*outer\S* than replica 0, by 1 at most",
                )

    def check_same(self, hosts):
        """Asserts that hosts report the same, and all their replicas have the same weights."""
        self.assertEqual(hosts[0].keys(), hosts[1].keys())
        for name, value in hosts[0].items():
            self.assertEqual(value.tobytes(), hosts[1][name].tobytes(), name)
            if name.startswith("weight"):
                for replica in value:
                    self.assertEqual(value[0].tobytes(), replica.tobytes(), name)

    def check_weights(self, expected, result, tolerance):
        for at, one in enumerate(expected):
            self.assertAllClose(one, result[f"weight_{at}"][0], atol=tolerance, rtol=0)

    def check_synchronous(self, result):
        model = host_diloco.model_with(host_diloco.sgd())
        inputs, targets = host_diloco.data(host_diloco.UNEVEN)
        history = model.fit(inputs, targets, BATCH, EPOCHS, shuffle=False, verbose=0)
        self.check_weights(model.get_weights(), result, 1e-6)
        self.assertAllClose(history.history["loss"], result["loss"], atol=1e-6)


class ArgumentsTest(tf.test.TestCase):
    def test_are_checked(self):
        with self.assertRaisesRegex(ValueError, "every must be at least 1; got 0"):
            DiLoCo(0)
        with self.assertRaisesRegex(ValueError, "fragments must divide every, 50; got fragments=4"):
            DiLoCo(50, fragments=4)
        with self.assertRaisesRegex(TypeError, "optimizer must be a function that makes a Keras"):
            DiLoCo(50, 0.7)  # type: ignore[arg-type]


if __name__ == "__main__":
    tf.test.main()
