"""The contract: where results are, and what an instance shares with others."""

from __future__ import annotations

import copy

import contract
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import EAGER, FUNCTION, MEAN, SUM

from tfcdo import tf_internals
from tfcdo.plan import decide


class InstancesContract(contract.Contract):
    """Tests of what is promised of each class, in every setting, whatever the values are."""

    def test_variables_are_not_changed(self):
        variables = []
        for rank in range(3):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([5.0]))
        ops = self.make()
        value = tu.per_replica([[1.0], [2.0], [3.0]])
        mirrored = tf_internals.mirrored(variables)
        (result,) = tu.call(EAGER, lambda: ops.reduce(SUM, value, mirrored))
        self.assert_on(result, tu.device_names(3))
        self.assertAllEqual([[6.0]] * 3, result.values)
        (result,) = tu.call(EAGER, lambda: ops.broadcast(tf.constant([7.0]), mirrored))
        self.assert_on(result, tu.device_names(3))
        self.assertAllEqual([[5.0]] * 3, variables)

    # Isolation and determinism.

    def test_results_do_not_follow_what_is_written_later(self):
        variables = []
        for rank in range(3):
            with tf.device(tu.device_name(rank)):
                variables.append(tf.Variable([1.0, 2.0]))
        value = tf_internals.per_replica(variables)
        single = tf_internals.per_replica(variables[:1])
        results = tu.all_reduce(self.make(), SUM, [value, value])
        results += tu.all_reduce(self.make(), SUM, [single])
        for variable in variables:
            variable.assign([8.0, 8.0])
        for result, expected in zip(results, ([3, 6], [3, 6], [1, 2]), strict=True):
            self.assertAllEqual(expected, result.value)

    @parameterized.parameters(EAGER, FUNCTION)
    def test_repeats_bit_for_bit(self, mode):
        generator = np.random.default_rng(0)
        values = [
            tu.per_replica([generator.normal(size=shape).astype(dtype) for _ in range(7)])
            for shape in ((), (9,), (64, 5))
            for dtype in (np.float32, np.float64, np.float16)
        ]
        runs = [tu.all_reduce(self.make(), MEAN, values, mode) for _ in range(2)]
        for own in zip(*runs, strict=True):
            self.assert_bitwise_equal([component for result in own for component in result.values])

    def test_deep_copies_give_the_same_bits(self):
        ops = self.make()
        arrays = contract.batch(3, dtypes=(tf.float32,))
        values = [tu.per_replica(own) for own in arrays]
        results = [tu.all_reduce(one, SUM, values) for one in (ops, copy.deepcopy(ops))]
        for own in zip(*results, strict=True):
            self.assert_bitwise_equal([result.value for result in own])

    def test_six_threads_share_one_instance(self):
        ops = self.make()

        def work(thread: int) -> None:
            for step in range(3):
                arrays = contract.batch(2 + thread, seed=1000 * thread + step, dtypes=(tf.float32,))
                values = [tu.per_replica(own) for own in arrays]
                results = tu.all_reduce(ops, SUM, values, EAGER if step else FUNCTION)
                for result, own in zip(results, arrays, strict=True):
                    np.testing.assert_array_equal(tu.oracle(SUM, own), result.value)

        tu.call_in_six_threads(work)

    def test_plans_are_computed_once(self):
        ops = self.make()

        def reduce(seed: int) -> None:
            arrays = contract.batch(7, seed=seed, dtypes=(tf.float32,))
            tu.all_reduce(ops, SUM, [tu.per_replica(own) for own in arrays])

        reduce(0)
        computed = decide.decide.cache_info().misses
        for seed in range(1, 4):
            reduce(seed)
        self.assertEqual(computed, decide.decide.cache_info().misses)

    # Gradients.

    def test_gradient(self):
        count = 3
        own = [tf.constant(tu.numbers((5,), tf.float32, rank)) for rank in range(count)]
        weights = [tu.numbers((5,), tf.float32, 50 + rank) for rank in range(count)]
        ops = self.make()

        def loss() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(own)
                value = tu.per_replica(own)
                results = ops.reduce(MEAN, value, value).values
                total = tf.add_n(
                    [tf.reduce_sum(w * one) for w, one in zip(weights, results, strict=True)]
                )
            return tape.gradient(total, own)

        for gradients in loss(), tf.function(loss, autograph=False)():
            for gradient in gradients:
                self.assertAllClose(np.sum(weights, axis=0) / count, gradient, rtol=1e-6)
