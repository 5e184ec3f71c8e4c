"""What strategies look at in a dataset before they distribute it."""

from __future__ import annotations

import typing
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfcdo import datasets, log

_Dataset = tf.data.Dataset


def _of_its_own():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return _Dataset.range(4).shuffle(4).with_options(options)


def _lines(name):
    return tf.data.TextLineDataset(name).map(tf.strings.length)


class _Pair(typing.NamedTuple):
    first: tf.Tensor
    second: tf.Tensor


def _flat(element):
    return [
        one.numpy() for one in tf.nest.flatten(element, expand_composites=True) if one is not None
    ]


class DatasetsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("shuffle", lambda: _Dataset.range(4).shuffle(4).batch(2).prefetch(1)),
        ("in_a_zip", lambda: _Dataset.zip(_Dataset.range(3), _Dataset.range(3).shuffle(3))),
        ("sample", lambda: _Dataset.sample_from_datasets([_Dataset.range(3), _Dataset.range(3)])),
        ("indices", lambda: _Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(9)))),
    )
    def test_unseeded(self, make):
        self.assertTrue(self.warned(make))

    @parameterized.named_parameters(
        ("no_shuffle", lambda: _Dataset.range(4).batch(2)),
        ("seed", lambda: _Dataset.range(4).shuffle(4, seed=0).batch(2)),
        ("random_numbers", lambda: _Dataset.range(4).map(lambda _: tf.random.uniform([]))),
        ("policy_off", _of_its_own),
        ("files", lambda: _Dataset.list_files(__file__).interleave(_lines).shuffle(4)),
        ("files_of_a_reader", lambda: tf.data.TextLineDataset([__file__] * 2).shuffle(4)),
    )
    def test_alike_on_all_hosts(self, make):
        self.assertFalse(self.warned(make))

    @parameterized.named_parameters(
        ("one", lambda number: number),
        ("tuple_of_one", lambda number: (number,)),
        ("tuple", lambda number: (number, {"text": tf.constant("a"), "none": None})),
        ("named_tuple", lambda number: _Pair(number, tf.ragged.constant([[1], [2, 3]]))),
        ("sparse", lambda number: [number, tf.sparse.from_dense([0, 1])]),
    )
    def test_copies_of_arrays_have_the_same_structure(self, make):
        def element(_):
            return make(tf.numpy_function(lambda: np.float32(3), [], tf.float32))

        dataset = _Dataset.range(2).map(element)
        copies = datasets.prepared(dataset, None)
        self.assertIsNot(dataset, copies)
        self.assertEqual(dataset.element_spec, copies.element_spec)
        pairs = zip(dataset, copies, strict=True)
        for one, copy in pairs:
            for own, expected in zip(_flat(copy), _flat(one), strict=True):
                self.assertAllEqual(expected, own)

    def test_no_copies_of_tensors(self):
        dataset = _Dataset.range(2).map(lambda number: number + 1)
        self.assertIs(dataset, datasets.prepared(dataset, None))

    def test_global_seed(self):
        self.assertFalse(self.warned(lambda: _Dataset.range(4).shuffle(4), global_seed=3))

    # Keras gives such a seed to datasets from directories, a number from numpy.
    def test_another_host_has_another_seed(self):
        self.assertTrue(self.warned(lambda: _Dataset.range(4).shuffle(4, seed=5), differing=[1]))
        self.assertFalse(self.warned(lambda: _Dataset.range(4), differing=[1]))

    def warned(self, make, differing=(), global_seed=None):
        tf.random.set_seed(global_seed)  # tf.test.TestCase has set one.
        session = mock.Mock(**{"differing.return_value": list(differing)})
        with mock.patch.object(log, "warn_once") as warn:
            datasets.prepared(make(), session)
        return warn.called


if __name__ == "__main__":
    tf.test.main()
