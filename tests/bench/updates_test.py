"""Steps of all-reduce plus update take turns."""

from __future__ import annotations

from unittest import mock

import tensorflow as tf
from bench_testing import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from cli_testing import run_tfcdo

from tfcdo.bench import devices, hosts, results

_NAMES = (
    "tf.distribute.MirroredStrategy",
    "tfcdo.MirroredStrategy",
    "shard_optimizer_state=True",
)


class UpdatesTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        # Halves for two devices.
        self.enter_context(mock.patch.object(hosts, "_SHAPES", ((40, 50), (2000,))))

    def test_steps_take_turns(self):
        with mock.patch.object(results, "take_turns", wraps=results.take_turns) as take_turns:
            found = hosts.run_updates("adam", devices.choose_devices(2), iterations=2, warmup=1)
        self.assertEqual(list(take_turns.call_args.args[0]), [*_NAMES])
        self.assertEqual([one.name for one in found], [*_NAMES])
        self.assertEqual([one.kind for one in found], ["tf", "tfcdo", "tfcdo"])
        for one in found:
            self.assertEqual((one.size, one.num_devices), (16_000, 2))
            # Tracing takes longer than a step.
            self.assertGreater(one.first_call or 0.0, one.seconds)
        # Two slots of 16 kB on each of two devices, or half of them on each; and some counters.
        states = [one.state_bytes or 0 for one in found]
        self.assertAllClose(states, [64_000, 64_000, 32_000], atol=100)

    def test_command(self):
        status, output, errors = run_tfcdo("bench", "--optimizer", "adam", "-g", "2", "-n", "1")
        self.assertEqual(status, 0, errors)
        self.assertIn("2 devices, all-reduce and adam update of 16.0 kB", output)
        for name in _NAMES:
            self.assertIn(name, output)


if __name__ == "__main__":
    tf.test.main()
