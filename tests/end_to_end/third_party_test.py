"""The quick part of `make third-party`: programs of small libraries end as on one device."""

from __future__ import annotations

import sys
from unittest import mock

import tensorflow as tf
import testing_utils as tu
import third_party
import warm_python
from absl.testing import absltest, parameterized

_QUICK = ("sonnet", "tf_keras")


class ThirdPartyTest(parameterized.TestCase):
    @parameterized.parameters(*_QUICK)
    def test_ends_as_on_one_device(self, name: str):
        one = tf.distribute.MirroredStrategy(tu.device_names(1))
        with mock.patch.object(sys, "executable", warm_python.executable()):
            found = third_party.outcome(name, "tfcdo")
        row = third_party.row(found, third_party.PROGRAMS[name](one))
        self.assertEqual(row.mark, "✓", row.text)
        self.assertEqual(third_party.row([[9.0]], [[1.0]]), ("✗", "8e+00"))


if __name__ == "__main__":
    absltest.main()
