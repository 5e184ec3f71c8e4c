"""The door to TensorFlow's private modules."""

from __future__ import annotations

import importlib
import itertools
import re
import threading
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
import testing_utils as tu

from tfcdo import private_names, tf_internals


class PrivateNamesTest(tf.test.TestCase):
    def test_names_all_that_are_missing_and_the_known_versions(self):
        source = """
from tensorflow.python.distribute import values as _values
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import no_such_kernels as _kernels

def function():
    _kernels.get(_values.PerReplica, _values.Gone)
    _context.context().abort_collective_ops(_context.context().no_such_method())
"""
        missing = [
            "tensorflow.python.framework.no_such_kernels",
            "tensorflow.python.distribute.values.Gone",
            "tensorflow.python.eager.context.context().no_such_method",
        ]
        self.assertCountEqual(missing, private_names.missing(source))
        message = (
            f"uses names of TensorFlow that are not in TensorFlow {re.escape(tf.__version__)}: "
            r"one, other\. .*tests were run: 2\.16\.\d.* Install one of those"
        )
        with (
            mock.patch.object(private_names, "missing", return_value=["one", "other"]),
            self.assertRaisesRegex(ImportError, message),
        ):
            importlib.reload(tf_internals)


class ValuesTest(tf.test.TestCase):
    def test_is_what_a_strategy_makes(self):
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        made = strategy.run(lambda: tf.random.uniform([]))
        self.assertIs(type(made), type(tf_internals.per_replica([1, 2])))
        reduced = strategy.extended.batch_reduce_to(tu.SUM, [(made, made)])[0]
        self.assertIs(type(reduced), type(tf_internals.mirrored([1, 2])))

    def test_devices_of_values_that_are_no_tensors(self):
        plain = tf_internals.per_replica([1.0, np.ones(2)])
        self.assertEqual(("", ""), tf_internals.devices_of_values(plain))


class ValueAtCallTimeTest(tf.test.TestCase):
    def test_is_made_again_at_each_call(self):
        """Also where a called function needs it, in a condition in a loop: Keras's steps."""
        numbers = itertools.count(1)
        spec = tf.TensorSpec([], tf.int32)

        @tf.function
        def number():
            return tf_internals.value_at_call_time(lambda: tf.constant(next(numbers)), spec)

        def loop(body: Any) -> Any:
            return tf.function(lambda: tf.while_loop(lambda i: i < 1, body, [0])[0])

        in_loop = loop(lambda i: [tf.cond(i < 1, number, lambda: i)])
        calls = [
            number,
            tf.function(lambda: number() + tf.function(number)() - number()),
            # A function that calls one that has it, once more in a loop.
            loop(lambda i: [tf.cond(i < 1, in_loop, lambda: i)]),
        ]
        for expected, call in enumerate((*calls, *calls), start=1):
            self.assertEqual(expected, int(call()))


class KeyValueStoreTest(tf.test.TestCase):
    def test_a_chief_that_is_stopped_is_not_waited_for(self):
        """TensorFlow would wait without end, also when a process ends."""
        answers, context = threading.Event(), mock.Mock()
        context.set_config_key_value.side_effect = lambda *_: answers.wait(60)
        store = tf_internals.KeyValueStore()
        with mock.patch.object(tf_internals._context, "context", return_value=context):
            with mock.patch.object(tf_internals, "_WRITE_SECONDS", 0.1):
                for call in (lambda: store.set("key", "value"), lambda: store.delete("key")):
                    with self.assertRaisesRegex(tf.errors.DeadlineExceededError, "not answered"):
                        call()
            answers.set()
            store.set("other", "value")
            context.set_config_key_value.assert_called_with("tfcdo/other", "value")
            error = tf.errors.AlreadyExistsError(None, None, "key")
            context.set_config_key_value.side_effect = error
            with self.assertRaises(tf.errors.AlreadyExistsError):
                store.set("key", "value")


if __name__ == "__main__":
    tf.test.main()
