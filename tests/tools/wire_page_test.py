"""docs/wire.md: what it is made of, on small trainings."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import testing_utils  # noqa: F401  Configures the devices.
import wire_page
import wire_trainings


class TrainingsTest(tf.test.TestCase):
    def test_accuracy_is_that_of_float32(self):
        wires = ("float32", "float16, error feedback")
        liked = [wire_trainings.recommender_accuracy(wire, 2, 8_000, 40, 30) for wire in wires]
        self.assertGreater(liked[0], 0.65)
        # Of so few steps it is still rising.
        self.assertAllClose(liked, [liked[0]] * 2, atol=0.015)

    def test_error_feedback_descends_where_rounding_stops(self):
        losses = {
            wire: wire_trainings.badly_scaled_losses(wire, 400)
            for wire in ("bfloat16", "bfloat16, error feedback")
        }
        without, fed_back = (own[-1] for own in losses.values())
        self.assertLess(fed_back, without / 5)
        self.assertLen(wire_page.draw(losses).axes[0].lines, 2)
        self.assertIn("| bfloat16 |", wire_page.final_table(losses))

    def test_a_table_has_the_differences_in_points(self):
        rows = wire_page.table({"float32": {"a": 0.9}, "bfloat16": {"a": 0.895}}).splitlines()
        self.assertEqual("| bfloat16 | 89.50% (-0.50) |", rows[-1])

    def test_the_plotted_wires_are_compared(self):
        self.assertContainsSubset(wire_page._STYLES, wire_trainings.WIRES)
        self.assertTrue(np.all(wire_trainings.badly_scaled_losses("float32", 3) > 0))


if __name__ == "__main__":
    tf.test.main()
