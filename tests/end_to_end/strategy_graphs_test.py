"""The four classes inside a `MirroredStrategy`: control flow, and graphs of TensorFlow 1."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import testing_utils as tu
import warm_python
from absl.testing import parameterized
from strategy_testing import (
    BASES,
    CLASSES,
    StrategyTestCase,
    context,
    distributed,
    strategy_of,
    strategy_results,
)
from testing_utils import MEAN, SUM


class ControlFlowTest(StrategyTestCase):
    @parameterized.parameters(BASES[1])
    def test_loops_and_branches(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        own = [tu.numbers((2,), tf.float32, rank, limit=5) for rank in range(count)]
        value = tu.per_replica(own)
        total, mean = tu.oracle(SUM, own), tu.oracle(MEAN, own)

        def reduced(reduce_op, factor):
            result = strategy.run(
                lambda x: context().all_reduce(reduce_op, x * factor), args=(value,)
            )
            return strategy_results(result)[-1]

        @tf.function(autograph=False)
        def loop(steps):
            return tf.while_loop(
                lambda step, _: step < steps,
                lambda step, state: (step + 1, state + reduced(SUM, tf.cast(step, tf.float32))),
                (0, tf.zeros([2])),
            )[1]

        @tf.function(autograph=False)
        def branch(steps):
            return tf.cond(
                steps > 2,
                lambda: reduced(SUM, 1.0),
                lambda: tf.cond(steps > 1, lambda: reduced(MEAN, 1.0), lambda: tf.zeros([2])),
            )

        with self.used(ops):
            for steps in 0, 4:
                factor = sum(range(steps))
                self.assert_close(factor * total, loop(tf.constant(steps)))
            for steps, expected in (3, total), (2, mean), (1, 0 * total):
                self.assert_close(expected, branch(tf.constant(steps)))

    @parameterized.parameters(BASES[0])
    def test_autograph_loop_over_a_dataset(self, name, count):
        ops = CLASSES[name]()
        strategy = strategy_of(ops, count)
        rows = np.arange(1.0, 2 * count + 2, dtype=np.float32)  # The last batch: a single row.
        dataset = distributed(strategy, rows, count)
        with strategy.scope():
            sums = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

        def replica(x):
            batch = context().all_reduce(SUM, tf.reduce_sum(x))
            sums.assign_add(batch * batch)

        @tf.function
        def epoch():
            for batch in dataset:
                strategy.run(replica, args=(batch,))

        with self.used(ops):
            epoch()
        batches = np.split(rows.astype(np.float64), [count, 2 * count])
        self.assert_replicas(sum(batch.sum() ** 2 for batch in batches), sums, count)


_SESSION = """
import sys
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import numpy as np
import strategy_testing as st
from testing_utils import SUM, MEAN

for name, count in st.BASES:
    with tf.Graph().as_default():
        ops = st.CLASSES[name]()
        strategy = st.strategy_of(ops, count)
        feeds = tf.placeholder(tf.float32, [count, None])
        with strategy.scope():
            variable = tf.get_variable("v", [], initializer=tf.zeros_initializer(),
                                       aggregation=tf.VariableAggregation.MEAN)
        def replica():
            context = tf.distribute.get_replica_context()
            own = feeds[context.replica_id_in_sync_group]
            (gradient,) = tf.gradients(tf.reduce_sum(own * (variable + 1.0)), [variable])
            total, mean = (context.all_reduce(op, [own, gradient]) for op in (SUM, MEAN))
            return total, mean, variable.assign_add(gradient)
        with st.instead_of_tensorflows(ops):
            fetches = tf.nest.map_structure(strategy.experimental_local_results,
                                            strategy.run(replica))
        fed = np.arange(2.0 * count).reshape(count, 2)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            (total, total_gradient), (mean, mean_gradient), _ = session.run(fetches, {feeds: fed})
            after = session.run(variable.values)
        np.testing.assert_allclose(total, [fed.sum(0)] * count)
        np.testing.assert_allclose(mean, [fed.mean(0)] * count, rtol=1e-6)
        np.testing.assert_allclose(total_gradient, [fed.sum()] * count)
        np.testing.assert_allclose(mean_gradient, [fed.sum() / count] * count, rtol=1e-6)
        np.testing.assert_allclose(after, [fed.sum() / count] * count, rtol=1e-6)
        print("ok", name)
"""


class SessionTest(StrategyTestCase):
    """Graphs of TensorFlow 1, and gradients in them."""

    def test_with_version_1_behavior(self):
        # It cannot be switched off again, so it gets a process of its own.
        result = warm_python.run("-c", _SESSION)
        self.assertEqual(0, result.returncode, result.stderr)
        self.assertEqual([f"ok {name}" for name, _ in BASES], result.stdout.split("\n")[:-1])


if __name__ == "__main__":
    tf.test.main()
