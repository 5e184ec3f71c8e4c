"""Random programs (model, optimizer, options, replicas, batches) train as on one device.

`make test-nightly` draws 300 of them: TFCDO_PROGRAMS=300 python tests/keras/programs_test.py
"""

from __future__ import annotations

import os
import random

import random_programs
import tensorflow as tf
from absl.testing import parameterized

# Together, all losses and options but XLA, and most pairs of options that meet in a step.
_SEEDS = (434, 6161, 1142, 2736, 32)
_DRAWN = [random.randrange(2**31) for _ in range(int(os.environ.get("TFCDO_PROGRAMS", "0")))]
_PARTS = 4  # Each worker of pytest may take some.


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*range(_PARTS))
    def test_as_on_one_device(self, part):
        largest = 0.0
        for seed in (_DRAWN or _SEEDS)[part::_PARTS]:
            case = random_programs.case(seed)
            outcome = random_programs.compare(case)
            self.assertEmpty(outcome.found, f"random_programs.case({seed}): {case}")
            largest = max(largest, outcome.largest)
        print(f"The largest difference from one device: {largest:.1e}")


if __name__ == "__main__":
    tf.test.main()
