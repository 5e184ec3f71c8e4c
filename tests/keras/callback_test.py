"""tfcdo.keras beside another Keras."""

from __future__ import annotations

import tempfile

import tensorflow as tf
from absl.testing import parameterized

import tfcdo.keras


class CallbackTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        lambda: tfcdo.keras.BackupAndRestore(tempfile.gettempdir()),
        tfcdo.keras.CheckInSync,
        tfcdo.keras.SynchronizeStatistics,
        tfcdo.keras.TraceSummary,
    )
    def test_needs_keras_3(self, make):
        callback = make()
        name = type(callback).__name__
        with self.assertRaisesRegex(TypeError, f"^tfcdo.keras.{name} needs Keras 3.*; got <object"):
            callback.set_model(object())


if __name__ == "__main__":
    tf.test.main()
