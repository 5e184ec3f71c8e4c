"""Random programs (model, optimizer, options, replicas, batches) train as on one device.

`make test-nightly` draws 300 of them: TFCDO_PROGRAMS=300 python tests/keras/programs_test.py
"""

from __future__ import annotations

import os

import hypothesis
import random_programs
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("TFCDO_PROGRAMS", "25"))
DRAWN_ANEW = "TFCDO_PROGRAMS" in os.environ
_PARTS = 5  # Each worker of pytest may take some.


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*range(_PARTS))
    def test_as_on_one_device(self, part):
        largest, count = 0.0, -(-EXAMPLES // _PARTS)

        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            derandomize=not DRAWN_ANEW,
            phases=[hypothesis.Phase.generate],  # A smaller seed is no simpler program.
            database=None,
        )
        @hypothesis.given(st.integers(part * 2**29, (part + 1) * 2**29 - 1))
        def compare(seed: int) -> None:
            nonlocal largest
            case = random_programs.case(seed)
            outcome = random_programs.compare(case)
            self.assertEmpty(outcome.found, f"python tests/helpers/random_programs.py: {case}")
            largest = max(largest, outcome.largest)

        compare()
        print(f"The largest of {count} programs' differences from one device: {largest:.1e}")


if __name__ == "__main__":
    tf.test.main()
