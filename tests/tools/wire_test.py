"""tools/wire.py: what docs/wire.md is made of, on small trainings."""

from __future__ import annotations

import tensorflow as tf
import testing_utils  # noqa: F401  Configures the devices.
import wire


class TrainingsTest(tf.test.TestCase):
    def test_accuracy_is_that_of_float32(self):
        wires = ("float32", "float16, error feedback")
        accuracies = [wire.recommender_accuracy(one, 2, 8_000, 40, 30) for one in wires]
        self.assertGreater(accuracies[0], 0.65)
        # After so few steps it is still rising.
        self.assertAllClose(accuracies, [accuracies[0]] * 2, atol=0.015)

    def test_error_feedback_descends_where_rounding_stops(self):
        names = ("float32", "bfloat16", "bfloat16, error feedback")
        losses = {name: wire.badly_scaled_losses(name, 400) for name in names}
        _, without, fed_back = (descent[-1] for descent in losses.values())
        self.assertLess(fed_back, without / 5)
        self.assertLen(wire.draw(losses).axes[0].lines, 3)


if __name__ == "__main__":
    tf.test.main()
