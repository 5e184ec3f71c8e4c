"""On GPUs, when there are some: copy trees on four parts of the first card, NCCL on all cards."""

import collections
import functools
import itertools
import pathlib
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl import logging
from absl.testing import parameterized
from keras_training import BATCH, TrainingTestCase, dense_data, dense_layers, fitted
from testing_utils import DTYPES, EAGER, FUNCTION, MEAN, SUM

import tfcdo
from tfcdo import log

PARTS = 4
MEGABYTES_PER_PART = 512
CARDS = tf.config.list_physical_devices("GPU")
if CARDS:
    # TF32 rounds to 10 bits, in kernels that depend on the number of rows.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.set_logical_device_configuration(
        CARDS[0], [tf.config.LogicalDeviceConfiguration(MEGABYTES_PER_PART)] * PARTS
    )


def setUpModule() -> None:
    if not CARDS:
        raise unittest.SkipTest("TensorFlow sees no GPU.")


def parts(count: int) -> list[str]:
    return [f"/job:localhost/replica:0/task:0/device:GPU:{index}" for index in range(count)]


def cards() -> list[str]:
    """One device of each card: a part of the first, the others as they are."""
    others = range(PARTS, PARTS + len(CARDS) - 1)
    return [f"/job:localhost/replica:0/task:0/device:GPU:{index}" for index in (0, *others)]


class GpuTest(TrainingTestCase):
    def check(
        self, ops: Any, reduce_op: Any, mode: str, devices: Sequence[str], dtypes: Any = DTYPES
    ) -> None:
        arrays = [  # No sum overflows 8 bits.
            [tu.numbers(shape, dtype, 100 * at + rank, limit=15) for rank in range(len(devices))]
            for at, (dtype, shape) in enumerate(itertools.product(dtypes, ((5,), (3, 2), ())))
        ]
        values = [tu.per_replica(own, devices) for own in arrays]
        for result, own in zip(tu.all_reduce(ops, reduce_op, values, mode), arrays, strict=True):
            dtype = tu.result_dtype(reduce_op, tf.as_dtype(own[0].dtype))
            for value in result.values:
                self.assert_exact(value, tu.oracle(reduce_op, own), dtype)
            self.assert_bitwise_equal(result.values)
            if mode == EAGER:
                self.assertEqual(list(devices), [value.device for value in result.values])

    def check_training(self, ops: Any, devices: Sequence[str]) -> None:
        strategy = tfcdo.MirroredStrategy(devices, ops)
        make = functools.partial(keras.optimizers.SGD, 0.1)
        alone, together = fitted(1, make), fitted(0, make, run_eagerly=False, strategy=strategy)
        self.assert_same_training(alone, together, 1e-4)


class CopyTreesTest(GpuTest):
    @parameterized.product(
        count=(2, 3, 4),
        way=((SUM, FUNCTION), (MEAN, EAGER)),
        make=(
            tfcdo.ReductionToOneDevice,
            lambda: tfcdo.HierarchicalCopyAllReduce(num_packs=3),
            lambda: tfcdo.HierarchicalCopyAllReduce(num_packs=0),
        ),
    )
    def test_all_dtypes(self, count, way, make):
        reduce_op, mode = way
        self.check(make(), reduce_op, mode, parts(count))

    def test_keras(self):
        self.check_training(tfcdo.HierarchicalCopyAllReduce(2), parts(PARTS))

    @parameterized.product(shards=(False, True), jit_compile=(False, True))
    def test_as_on_one_device(self, shards, jit_compile):
        # "auto" would compile one device's step alone, and XLA draws other numbers.
        compiling = {"loss": "mse", "jit_compile": jit_compile}

        def make(_: bool) -> keras.Model:
            noise = [keras.layers.Dropout(0.4), keras.layers.GaussianNoise(0.1)]
            model = keras.Sequential([*dense_layers(), *noise, keras.layers.Dense(2)])
            model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), **compiling)
            return model

        def strategy(count: int, **options: Any) -> tf.distribute.Strategy:
            if count == 1:
                return tf.distribute.get_strategy()
            return tfcdo.MirroredStrategy(parts(count), **options)

        options: dict[str, Any] = {"replicas": 3, "tolerance": 1e-5, "batch_size": BATCH}
        options |= {"strategy": strategy, "sharded": (shards,)}
        self.check_as_on_one_device(make, *dense_data(BATCH + 5), **options)

    def test_a_trace_has_all_copies(self):
        ops, devices = tfcdo.ReductionToOneDevice(), parts(3)
        own = tu.per_replica([tf.ones([60_000])] * 3, devices)
        step = tf.function(lambda: ops.reduce(SUM, own, own).values, autograph=False)
        step()
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "out.json")
        with tfcdo.trace(path) as traced:
            for _ in range(5):
                step()
        recorded: Any = traced.recording
        kinds = collections.Counter(run.kind for run in recorded.runs)
        self.assertEqual(kinds, {"reduce": 10, "add": 5, "broadcast": 10})

    def test_nccl_says_why_it_cannot_run(self):
        status = tfcdo.nccl_status(parts(2))
        self.assertFalse(status.can_run)
        self.assertRegex(str(status), "one physical GPU.*AutoAllReduce|no NcclAllReduce kernel")
        log.warn_once.cache_clear()
        with mock.patch.object(logging, "warning") as warning:
            for mode in EAGER, FUNCTION:
                self.check(tfcdo.NcclAllReduce(), SUM, mode, parts(2), (tf.float32, tf.int32))
        warning.assert_called_once()
        self.assertIn(status.reason, warning.call_args.args[0] % warning.call_args.args[1:])
        with self.assertRaisesRegex(RuntimeError, "require_nccl"):
            self.check(tfcdo.NcclAllReduce(require_nccl=True), SUM, EAGER, parts(2))


class NcclTest(GpuTest):
    """`require_nccl=True`: no test can pass by way of the copy trees."""

    def setUp(self):
        super().setUp()
        if len(CARDS) < 2:
            self.skipTest("NCCL takes each card once, and there is one.")
        status = tfcdo.nccl_status(cards())
        self.assertTrue(status.can_run, str(status))

    @parameterized.parameters((0, SUM, EAGER), (1, MEAN, FUNCTION), (3, SUM, FUNCTION))
    def test_all_dtypes_that_it_takes(self, num_packs, reduce_op, mode):
        ops = tfcdo.NcclAllReduce(num_packs, require_nccl=True)
        dtypes = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
        for _ in range(3):
            self.check(ops, reduce_op, mode, cards(), dtypes)

    def test_a_thousand_steps(self):
        ops = tfcdo.NcclAllReduce(2, require_nccl=True)
        value = tu.per_replica([tf.ones([1000])] * len(CARDS), cards())
        step = tf.function(lambda: ops.reduce(SUM, value, value).values, autograph=False)
        for _ in range(1000):
            results = step()
        self.assertAllEqual(np.full([len(CARDS), 1000], len(CARDS)), results)

    @parameterized.parameters(1, 2)
    def test_keras(self, num_packs):
        self.check_training(tfcdo.NcclAllReduce(num_packs, require_nccl=True), cards())


if __name__ == "__main__":
    tf.test.main()
