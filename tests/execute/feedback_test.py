"""Error feedback: over many steps nothing is lost, and whose residuals are whose."""

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from testing_utils import MEAN, SUM
from wire_bounds import feedback_error_bound

import tfcdo
from tfcdo.execute import feedback

WIRES = ("bfloat16", "float16")
# More than half of what bfloat16 loses of numbers from 1 to 2, and what float16 does.
TINY = {"bfloat16": 0.3 * 2.0**-7, "float16": 0.3 * 2.0**-10}
# A gradient that bfloat16 rounds to 1 in each step, and what the results of three devices may lack
# over all steps. Without feedback they lack 3 * TINY a step.
ROUNDED = 1 + TINY["bfloat16"]
MOST = 12 * TINY["bfloat16"]


def make_ops(wire_dtype: str = "bfloat16", error_feedback: bool = True) -> Any:
    return tfcdo.HierarchicalCopyAllReduce(wire_dtype=wire_dtype, error_feedback=error_feedback)


def residuals(ops: Any) -> list[tf.Variable]:
    return list(ops._feedback.by_name.values())


class Training:
    def __init__(
        self,
        ops: Any,
        count: int = 3,
        shape: Sequence[int] = (4,),
        reduce_op: Any = SUM,
        function: bool = True,
    ) -> None:
        self.ops, self.reduce_op = ops, reduce_op
        self.gradients = tu.variables(tf.zeros(shape), count)
        self.call = tu.function(self.reduce) if function else self.reduce

    def reduce(self) -> Any:
        value = tu.per_replica(self.gradients)
        return self.ops.batch_reduce(self.reduce_op, [(value, value)])[0].values

    def assign(self, gradients: Any) -> None:
        """Sets one gradient a device, or one for all."""
        arrays = np.broadcast_to(gradients, (len(self.gradients), *self.gradients[0].shape))
        for variable, array in zip(self.gradients, arrays, strict=True):
            variable.assign(array)

    def step(self, gradients: Any) -> np.ndarray:
        self.assign(gradients)
        results = [result.numpy() for result in self.call()]
        for result in results[1:]:
            np.testing.assert_array_equal(results[0], result)
        return results[0]

    def lost(self, steps: int, gradient: float = ROUNDED) -> float:
        """How much less than the values all results are, after so many equal steps."""
        total = sum(self.step(gradient)[0].astype(np.float64) for _ in range(steps))
        return steps * len(self.gradients) * float(np.float32(gradient)) - total


class RunningSumTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (lambda **kw: tfcdo.AllReduceCrossDeviceOps("ring", **kw), 3, SUM, 2, "bfloat16"),
        (tfcdo.HierarchicalCopyAllReduce, 5, MEAN, 2, "float16"),
        (lambda **kw: tfcdo.ReductionToOneDevice("/cpu:7", **kw), 2, SUM, 1, "float16"),
    )
    def test_stays_within_one_rounding(self, make, count, reduce_op, depth, wire_dtype):
        ops = make(wire_dtype=wire_dtype, error_feedback=True)
        training = Training(ops, count, (3,), reduce_op)
        for seed in range(4):
            generator = np.random.default_rng(seed)
            shape = (generator.integers(1, 13), count, 3)
            low, high = np.sort(generator.integers(-99, 98, 2))
            exponents = generator.integers(low, high + 1, shape)
            steps = (generator.uniform(-1, 1, shape) * 2.0**exponents).astype(np.float32)
            if seed % 2:  # Equal steps, each of which loses the same.
                steps = np.repeat(steps[:1], 40, axis=0)
            training.ops.reset_error_feedback()
            results = np.sum([tu.exact(training.step(step)) for step in steps], axis=0)
            exact = np.sum([tu.oracle(reduce_op, list(step)) for step in steps], axis=0)
            magnitudes = [tu.oracle(reduce_op, list(np.abs(step))) for step in steps]
            bound = feedback_error_bound(magnitudes, depth, count, wire_dtype)
            self.assertAllLessEqual(np.abs(results - exact) - bound, 0)

    def test_of_64_bits_and_of_a_value_reduced_alone(self):
        ops = tfcdo.AutoAllReduce(wire_dtype="float16", error_feedback=True)
        number = 1 + TINY["float16"]
        value = tu.per_replica([np.full(4, number)] * 3)
        total = sum(ops.reduce(SUM, value, value).values[0] for _ in range(12))
        self.assertAllClose([36 * number] * 4, total, rtol=0, atol=12 * TINY["float16"])
        self.assertEqual({tf.float64}, {one.dtype for one in residuals(ops)})

    @parameterized.parameters(*WIRES)
    def test_what_was_lost_before_an_overflow_comes_after_it(self, wire_dtype):
        training = Training(make_ops(wire_dtype))
        gradient = 1 + TINY[wire_dtype]
        first = training.step(gradient)[0].astype(np.float64)
        training.step([np.inf, -np.inf, np.nan, np.nan])
        rest = training.step(0.0).astype(np.float64)
        # TINY is not a number of 16 bits, so a little of it is still to come.
        self.assertAllClose([3 * float(np.float32(gradient)) - first] * 4, rest, rtol=0.01)


class CheckpointTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("eager, made before", "function", "function made again")
    def test_training_goes_on_bit_for_bit(self, kind):
        def train(ops: Any) -> Training:
            return Training(ops, 3, (5,), MEAN, function="function" in kind)

        steps = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
        ops = make_ops("float16")
        training = train(ops)
        for step in steps[:2]:
            training.step(step)
        path = tf.train.Checkpoint(ops=ops).save(self.get_temp_dir() + "/saved")
        expected = [training.step(step) for step in steps[2:]]
        del training
        gc.collect()
        again = ops if kind == "function made again" else make_ops("float16")
        later = train(again)
        if "before" in kind:  # The residuals are there already when they are restored.
            later.step(steps[0])
        status = tf.train.Checkpoint(ops=again).restore(path)
        self.assertAllEqual(expected, [later.step(step) for step in steps[2:]])
        status.assert_consumed()
        again.reset_error_feedback()
        self.assertAllEqual([1.0] * 5, later.step(1.0))
        del later
        gc.collect()
        if again is ops:  # What one function has got is no longer for the next one.
            self.assertAllEqual([1.0] * 5, train(ops).step(1.0))


class ScopeTest(tf.test.TestCase):
    def test_an_argument_that_all_replicas_share_is_not_rounded(self):
        strategy = tf.distribute.MirroredStrategy(list(tu.ALL_DEVICES[:3]), make_ops())

        def replica(value: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(SUM, [value, value])[0]

        @tf.function
        def step(value: tf.Tensor) -> Any:
            return strategy.experimental_local_results(strategy.run(replica, (value,)))

        self.assertAllClose([[3 * ROUNDED] * 4] * 3, step(tf.fill([4], ROUNDED)), rtol=1e-6)

    def test_eager_calls_of_ever_new_shapes(self):
        ops = make_ops()
        values = [tu.per_replica([np.ones(size, np.float32)] * 2) for size in (2, 3, 4)]
        with mock.patch.object(feedback, "MAX_STRUCTURES", 2):
            for value in values[:2]:
                tu.all_reduce(ops, SUM, [value])
            with self.assertRaisesRegex(ValueError, "got 3 structures .* in eager calls"):
                tu.all_reduce(ops, SUM, [values[2]])
            tu.all_reduce(ops, SUM, [values[2]], tu.FUNCTION)

    def test_where_there_is_none(self):
        ops = make_ops()

        def reduce(*sizes: Any) -> Any:
            return tu.all_reduce(ops, SUM, [tu.per_replica([tf.ones(sizes)] * 2)])[0].values

        with self.assertRaisesRegex(ValueError, "whose devices are known"):
            tu.all_reduce(ops, SUM, [tu.per_replica([[1.0, 2.0]] * 2)], tu.ARGUMENTS)
        with self.assertRaisesRegex(ValueError, r"whose shapes are known .*got float32\[\?"):
            tf.function(reduce)(tf.constant(3))
        with self.assertRaisesRegex(ValueError, "needs TensorFlow 2"), tf.Graph().as_default():
            reduce(2)
        with self.assertRaisesRegex(ValueError, "error_feedback must be True"):
            make_ops(error_feedback=False).reset_error_feedback()


class OwnersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (0, True, False), (0, True, True), (3, False, False), (3, True, False)
    )
    def test_batches_of_one_structure(self, first, function, of_variables):
        """On some devices, and on these or others; eagerly, only devices tell them apart."""
        ops, steps = make_ops(), (ROUNDED, -3 - 2 * TINY["bfloat16"])
        devices = (tu.ALL_DEVICES[:3], tu.ALL_DEVICES[first : first + 3])
        given = [tf.fill([4], step) for step in steps]
        owned = [tu.variables(one, 3) if of_variables else [one] * 3 for one in given]

        def both() -> Any:
            values = map(tu.per_replica, owned, devices)
            return [ops.batch_reduce(SUM, [(own, own)])[0].values[0][0] for own in values]

        call = tu.function(both) if function else both
        totals = np.sum([call() for _ in range(16)], 0, np.float64)
        self.assertAllClose(48 * np.array(steps), totals, rtol=0, atol=2 * MOST)
        expected = [device for own in devices for device in own]
        self.assertCountEqual(expected, [one.device for one in residuals(ops)])

    @parameterized.parameters("traced again", "made again", "making variables")
    def test_a_function_of_the_same_variables_goes_on(self, kind):
        ops = make_ops()
        training = Training(ops)
        numbers = iter(range(100))
        made: list[tf.Variable] = []
        counters = [tf.Variable(0, trainable=False) for _ in range(9)]

        def reduce(number: int = 0) -> Any:
            counters[number].read_value()  # Only those that are trained tell functions apart.
            if kind == "making variables" and not made:
                made.extend([tf.Variable(1.0), tf.Variable(0.0, trainable=False)])
            return [total * made[0] for total in training.reduce()] if made else training.reduce()

        function = tu.function(reduce)
        training.call = {
            "traced again": lambda: function(next(numbers)),  # Each is another signature.
            "made again": lambda: tu.function(reduce)(),
            "making variables": function,
        }[kind]
        self.assertLess(abs(training.lost(8)), MOST)
        self.assertLen(residuals(ops), 3)
        training.call = tu.function(lambda: training.reduce())  # It has another name.
        self.assertAllEqual([3.0] * 4, training.step(1.0))
        self.assertLen(residuals(ops), 6)

    def test_functions_without_variables_share_nothing(self):
        ops = make_ops()

        def reduce(number: float) -> Any:
            value = tu.per_replica([tf.fill([4], number)] * 3)
            return ops.batch_reduce(SUM, [(value, value)])[0].values[0]

        first, second = (tu.function(lambda n=n: reduce(n)) for n in (ROUNDED, 1.0))
        first()
        self.assertAllEqual([3.0] * 4, second())
        self.assertLen(residuals(ops), 6)

    def test_loops(self):
        training = Training(make_ops())

        @tf.function
        def many() -> tf.Tensor:
            total = tf.zeros([4])
            for _ in tf.range(8):
                total += training.reduce()[0]
            return total

        training.assign(ROUNDED)
        self.assertAllClose([24 * ROUNDED] * 4, many(), rtol=0, atol=MOST)

    @parameterized.parameters("called by another", "in a strategy")
    def test_a_concrete_function_keeps_its_residuals_until_it_is_gone(self, kind):
        ops = make_ops()
        strategy = tf.distribute.MirroredStrategy(list(tu.ALL_DEVICES[:3]), ops)

        def made() -> Training:
            training = Training(ops)

            def reduce() -> Any:
                if kind != "in a strategy":
                    return training.reduce()
                totals = strategy.run(
                    lambda own: tf.distribute.get_replica_context().all_reduce(SUM, [own, own])[0],
                    (tu.per_replica(training.gradients),),
                )
                return strategy.experimental_local_results(totals)

            training.call = tu.function(reduce).get_concrete_function()
            if kind == "called by another":
                inner = training.call
                training.call = tu.function(lambda: inner()).get_concrete_function()
            gc.collect()
            return training

        first, second = made(), made()
        lost = np.zeros(2)
        for _ in range(8):
            lost += [first.lost(1), second.lost(1, -3 - 2 * TINY["bfloat16"])]
        self.assertAllClose([0.0, 0.0], lost, atol=2 * MOST)
        # Variables of functions that are gone are used again, and begin with nothing.
        number = len(residuals(ops))
        del first, second
        gc.collect()
        third = made()
        self.assertAllEqual([3.0] * 4, third.step(1.0))  # 1 is not rounded.
        self.assertFalse(np.any(residuals(ops)[-3:]))
        self.assertLess(abs(third.lost(8)), MOST)
        self.assertLen(residuals(ops), number)

    def test_eager_residuals_are_not_those_of_a_function_that_is_gone(self):
        ops = make_ops()
        training = Training(ops)
        training.lost(5)
        concrete: Any = training.call
        concrete = concrete.get_concrete_function()
        training.call = training.reduce
        gc.collect()
        self.assertAllEqual([3.0] * 4, training.step(1.0))
        self.assertLen(residuals(ops), 6)
        graph = weakref.ref(concrete.graph)
        del concrete
        gc.collect()
        self.assertIsNone(graph())

    def test_explaining_and_copying_take_none(self):
        ops = make_ops()
        ops.explain([(4,)], devices=["/cpu:0", "/cpu:1"])
        self.assertEmpty(residuals(ops))
        Training(ops, function=False).step(1.0)
        self.assertEmpty(residuals(copy.deepcopy(ops)))


if __name__ == "__main__":
    tf.test.main()
