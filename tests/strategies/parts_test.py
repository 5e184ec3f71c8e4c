"""How strategies take data: the parts of batches, generators, and datasets that they warn of."""

import collections
import json
import warnings
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from keras_training import dense_data, dense_layers, graphs_as_traced, model_of, strategy_of

from tfcdo import keras_internals, log
from tfcdo.cluster import protocol
from tfcdo.training import parts

_Dataset, _of_python = tf.data.Dataset, keras_internals.PyDatasetAdapter
_POLICY = tf.data.experimental.AutoShardPolicy


def _with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def _lines(names):
    return tf.data.TextLineDataset(names).map(tf.strings.length)


_Pair = collections.namedtuple("_Pair", "first second")
_STRUCTURES = (
    ("one", lambda numbers: numbers),
    ("tuple_of_one", lambda numbers: (numbers,)),
    ("dict", lambda numbers: {"a": numbers, "b": (numbers * 2, None)}),
    ("named_tuple", lambda numbers: _Pair(numbers, tf.stack([numbers] * 2, 1))),
    ("sparse", lambda numbers: (numbers, tf.sparse.from_dense(tf.stack([numbers] * 2, 1)))),
    ("ragged", lambda numbers: (numbers, tf.RaggedTensor.from_row_lengths(numbers, numbers**0))),
)
_OF_KIND = {"sparse": tf.sparse.from_dense, "ragged": tf.RaggedTensor.from_tensor}


def _dense(value):
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value)
    return value.to_tensor() if isinstance(value, tf.RaggedTensor) else value


class CutTest(tf.test.TestCase, parameterized.TestCase):
    @mock.patch.object(_Dataset, "_apply_debug_options", lambda dataset: dataset)
    def test_nothing_tunes_the_iterators_of_replicas(self):
        distributed = strategy_of(2).experimental_distribute_dataset(_Dataset.range(4).batch(2))
        for iterator in iter(distributed)._iterators[0]._iterator._device_iterators:
            self.assertIs(iterator._dataset.options().autotune.enabled, False)

    def test_none_in_a_step_of_keras(self):
        with strategy_of(2).scope():
            model = model_of(dense_layers, "sgd", run_eagerly=False)
        dataset = _Dataset.from_tensor_slices(dense_data(7)).batch(6)  # 6 and 1 examples.
        with_none = dataset.map(lambda inputs, targets: (inputs, targets, None))
        of_python = ((*batch, None) for batch in dataset.as_numpy_iterator())
        losses = [model.evaluate(one, verbose=0) for one in (dataset, with_none, of_python)]
        self.assertAllEqual(losses, losses[:1] * 3)

    @parameterized.named_parameters(*_STRUCTURES)
    def test_structures(self, make):
        dataset = _Dataset.range(1, 18).batch(7).map(make)  # 7, 7 and 3 examples.
        cut = list(parts.cut(dataset, 0, 3, 3))
        self.assertEqual(9, int(parts.cut(dataset, 0, 3, 3).cardinality()))
        for number, batch in enumerate(dataset):
            own = cut[3 * number : 3 * number + 3]
            rows = [3, 2, 2] if number < 2 else [1, 1, 1]
            for part, start, count in zip(own, np.cumsum([0, *rows]), rows):
                tf.nest.assert_same_structure(batch, part)
                for whole, mine in zip(tf.nest.flatten(batch), tf.nest.flatten(part), strict=True):
                    if whole is not None:
                        self.assertAllEqual(_dense(whole)[start : start + count], _dense(mine))

    def test_several_rows_per_example_and_rows_for_all_examples(self):
        dataset = _Dataset.range(5).batch(5).map(lambda n: (n, tf.repeat(n, 4), n[:0], n[:3]))
        own = [part.numpy().tolist() for batch in parts.cut(dataset, 0, 3, 3) for part in batch]
        self.assertEqual([[4], [4] * 4, [], [2]], own[-4:])
        of_one = parts.of_one_batch(next(iter(dataset)), tu.device_names(3))
        self.assertEqual(own, [v.values[k].numpy().tolist() for k in range(3) for v in of_one])
        with mock.patch.object(log, "warn_once") as warn:
            for_all = dataset.map(lambda n, *_: (n, tf.ones([1]), tf.reshape(n, [5])))
            last = [*parts.cut(for_all, 0, 3, 3)][2]
            self.assertEqual([[4], [1], [4]], [list(part) for part in last])
            self.assertFalse(warn.called)
            for unlike in (lambda n, *_: (n, tf.eye(4)), lambda n, *_: (tf.eye(4), n)):
                parts.cut(dataset.map(unlike), 0, 3, 3)
            self.assertEqual(2, warn.call_count)
            self.assertRegex(warn.call_args[0][0], "a tensor of 4 rows.*tfcdo.keras.global_batch")

    def test_shapes_stay_known_where_batches_divide(self):
        full = _Dataset.range(12).batch(6, drop_remainder=True)
        two = parts.cut(full.map(lambda n: (n, tf.zeros([9]))), 0, 3, 3).element_spec
        self.assertEqual([[2], [3]], [spec.shape for spec in two])
        self.assertEqual([None], parts.cut(full, 0, 4, 4).element_spec.shape.as_list())

    def test_infinite_and_unknown_lengths_stay(self):
        numbers = _Dataset.range(6).batch(2)
        for dataset in (numbers.repeat(), numbers.filter(lambda _: True)):
            cut = parts.cut(dataset, 0, 2, 2)
            self.assertEqual(int(dataset.cardinality()), int(cut.cardinality()))

    @parameterized.named_parameters(
        ("unknown_rows", lambda d: d.batch(6), False, 3, True),
        ("rows_divide", lambda d: d.batch(6, drop_remainder=True), False, 3, False),
        ("rows_do_not_divide", lambda d: d.batch(7, drop_remainder=True), False, 3, True),
        ("one_replica", lambda d: d.batch(7), False, 1, False),
        ("hosts", lambda d: d.batch(6, drop_remainder=True), True, 3, True),
        ("hosts_with_data", lambda d: _with_policy(d.batch(6), _POLICY.DATA), True, 3, True),
        ("hosts_with_own_data", lambda d: _with_policy(d.batch(6), _POLICY.OFF), True, 3, False),
        ("hosts_with_file", lambda d: _with_policy(d.batch(6), _POLICY.FILE), True, 3, False),
        ("files", lambda _: tf.data.TextLineDataset([__file__] * 2).batch(6), True, 3, False),
    )
    def test_who_cuts(self, make, several, replicas, expected):
        self.assertEqual(expected, parts.is_cut_here(make(_Dataset.range(20)), several, replicas))

    def test_a_dataset_without_batches(self):
        with self.assertRaisesRegex(ValueError, r"must have batches.*call \.batch\(n\) on it"):
            parts.cut(_Dataset.range(5), 0, 2, 2)


class EndTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((True,), *tu.nightly(False))
    def test_data_that_end_after_data_that_do_not(self, is_full):
        """The last execution has a step less than the others, and Keras warns of no `shuffle`."""
        self.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", ".*shuffle=True")
        with strategy_of(2).scope():
            model = model_of(dense_layers, "sgd", run_eagerly=False, steps_per_execution=2)
        data = _Dataset.from_tensor_slices(dense_data(18)).batch(6, drop_remainder=is_full)
        model.fit(data.repeat(), steps_per_epoch=2, verbose=0)
        ends: list[int] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(batch)
        )
        model.fit(data, callbacks=[note], verbose=0)
        self.assertLen(ends, 2)
        self.assertEqual(5, model.optimizer.iterations.numpy())


class PreparedTest(tf.test.TestCase, parameterized.TestCase):
    # Whether hosts that make such a dataset may draw other orders, and are warned.
    @parameterized.named_parameters(
        ("shuffle", True, lambda: _Dataset.range(4).shuffle(4).batch(2).prefetch(1)),
        ("in_a_zip", True, lambda: _Dataset.zip(_Dataset.range(3), _Dataset.range(3).shuffle(3))),
        ("sample", True, lambda: _Dataset.sample_from_datasets([_Dataset.range(3)] * 2)),
        ("indices", True, lambda: _Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(9)))),
        # Keras gives such a seed to datasets from directories, a number from numpy.
        ("seed_of_this_host", True, lambda: _Dataset.range(4).shuffle(4, seed=5), True),
        ("array_of_this_host", True, lambda: _Dataset.from_tensor_slices(["a"]), True),
        ("shard_of_this_host", True, lambda: _Dataset.range(4).shard(2, 1), True),
        ("unordered", True, lambda: _Dataset.range(4).map(abs, 2, deterministic=False)),
        ("cut_files", True, lambda: _with_policy(_lines([__file__]).shuffle(4), _POLICY.DATA)),
        ("no_shuffle", False, lambda: _Dataset.range(4).batch(2)),
        ("seed", False, lambda: _Dataset.range(4).shuffle(4, seed=0)),
        ("global_seed", False, lambda: _Dataset.range(4).shuffle(4), False, 3),
        ("random_numbers", False, lambda: _Dataset.range(4).map(lambda _: tf.random.uniform([]))),
        ("policy_off", False, lambda: _with_policy(_Dataset.range(4).shuffle(4), _POLICY.OFF)),
        ("files", False, lambda: _Dataset.list_files(__file__).interleave(_lines).shuffle(4)),
        ("files_of_a_reader", False, lambda: _lines([__file__] * 2).shuffle(4)),
        ("cached_files", True, lambda: _lines([__file__] * 2).cache().shuffle(4)),
    )
    def test_orders_that_may_differ(self, expected, make, seeds_differ=False, global_seed=None):
        def differing(_, text):
            other = json.dumps([json.loads(text)[0], []])
            return {1: other} if seeds_differ and other != text else {}

        tf.random.set_seed(global_seed)  # tf.test.TestCase has set one.
        with mock.patch.object(log, "warn_once") as warn:
            parts.prepared(make(), mock.Mock(differing=differing))
        self.assertEqual(expected, warn.called)
        strategy_of(2)  # With it comes what stands before Keras's functions.
        of_python = (_of_python(_Counted(), None, on).get_tf_dataset() for on in (False, True))
        self.assertEqual([0, 1], [len([*parts.seeds(one)]) for one in of_python])

    @parameterized.parameters(
        (12, 3, "batch_size, element 0 of 1: 2 on host 0, 3 on host 1"),
        (7, 2, "lengths, element 1 of 3: 6 on host 0, 3 on host 1"),
    )
    def test_batches_that_differ(self, length, size, difference):
        session = mock.Mock(**{"differing.return_value": {}, "cluster.index": 0})
        data = _Dataset.range(length).batch(size, drop_remainder=True)
        for same in (data.repeat(), data.prefetch(1).repeat()):
            parts.prepared(same, session)
        told, again = (call.args[1] for call in session.differing.call_args_list)
        self.assertEqual(told, again)
        session.differing.return_value = {1: told}
        with self.assertRaisesRegex(protocol.DisagreementError, difference):
            parts.prepared(_Dataset.range(12).batch(2).repeat(), session)

    @parameterized.named_parameters(*_STRUCTURES)
    def test_copies_of_arrays_have_the_same_structure(self, make):
        def element(_):
            array = tf.numpy_function(lambda: np.ones(2, np.int64), [], tf.int64)
            return make(tf.ensure_shape(array, [2]))

        dataset = _Dataset.range(2).map(element)
        copies = parts.prepared(dataset, None)
        self.assertIsNot(dataset, copies)
        self.assertEqual(dataset.element_spec, copies.element_spec)
        for one, copy in zip(dataset, copies, strict=True):
            flat = (tf.nest.flatten(each, expand_composites=True) for each in (one, copy))
            for expected, own in zip(*flat, strict=True):
                if expected is not None:
                    self.assertAllEqual(expected, own)
        of_tensors = _Dataset.range(2).map(lambda number: number + 1)
        self.assertIs(of_tensors, parts.prepared(of_tensors, None))


class OneBatchTest(tf.test.TestCase, parameterized.TestCase):
    # Batches that do not divide. XLA draws other numbers.
    @parameterized.parameters((3, (5, 1), 0.4, "run_eagerly"), (2, (1,), 0.0, "jit_compile"))
    def test_as_on_one_device(self, replicas, sizes, rate, option):
        class Errors(keras.metrics.MeanAbsoluteError):
            def result(self):
                return {"error": super().result(), "errors": self.total * 1.0}

        def results(strategy, option):
            keras.utils.set_random_seed(1)
            draw = np.random.default_rng(0)
            with strategy.scope():
                first = keras.Input([5])
                output = keras.layers.Dense(1, name="y")(keras.layers.Dropout(rate, seed=3)(first))
                model = keras.Model(first, [output, keras.layers.Rescaling(2.0, name="z")(output)])
                model.compile("sgd", "mse", None, ["mae", Errors()], ["mse"] * 2, **{option: True})
            for rows in sizes:
                batch = [draw.normal(size=shape) for shape in ([rows, 5], [rows, 1])]
                weights = [draw.uniform(0.1, 2.0, rows)] * 2
                yield model.train_on_batch(batch[0], batch[1:] * 2, weights, None, True)
                yield model.test_on_batch(batch[0], batch[1:] * 2, weights)
                yield model.predict_on_batch(batch[0])
            yield model.get_weights()

        strategy = strategy_of(replicas)
        expected = results(tf.distribute.get_strategy(), "run_eagerly")
        for one, other in zip(expected, results(strategy, option), strict=True):
            self.assertAllClose(one, other, rtol=2e-6, atol=2e-6)
            self.assertEqual(*(tf.nest.map_structure(type, each) for each in (one, other)))

    @parameterized.parameters("sparse", "ragged")
    @graphs_as_traced()
    def test_composite_tensors(self, kind):
        """Also where a replica has none: a row stands in for them, which is in no result."""

        class Dense(keras.layers.Layer):
            def call(self, inputs):
                dense = inputs.to_tensor(shape=[None, 3]) if kind == "ragged" else _dense(inputs)
                with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(dense)[0])]):
                    return tf.identity(dense)

            def compute_output_shape(self, shape):
                return (shape[0], 3)

        numbers = tf.constant([[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 4]])
        inputs, targets = _OF_KIND[kind](numbers), numbers[:, :1]
        dataset = _Dataset.from_tensor_slices((inputs, targets)).batch(3)  # 3 rows and 1.

        def results(count):
            keras.utils.set_random_seed(1)
            with strategy_of(count).scope():
                first = keras.Input([3], **{kind: True})
                model = keras.Model(first, keras.layers.Dense(1)(Dense()(first)))
                model.compile(keras.optimizers.SGD(0.01), "mse")
            return [
                model.train_on_batch(inputs, targets),
                model.test_on_batch(inputs, targets),
                model.predict_on_batch(inputs),
                model.evaluate(dataset, verbose=0),
                model.predict(dataset, verbose=0),
            ]

        for one, other in zip(results(1), results(2), strict=True):
            self.assertAllClose(one, other, rtol=2e-6, atol=2e-6)


_BATCHES, _BATCH = 9, 6


def _batches():
    for index in range(_BATCHES):
        ids = np.arange(_BATCH * index, _BATCH * (index + 1))[:, None]
        yield ids, ids.astype(np.float32)


def _mean_embedding() -> list[Any]:
    table = keras.layers.Embedding(_BATCHES * _BATCH, 1, embeddings_initializer="zeros")
    return [keras.Input((None,), dtype="int32"), table, keras.layers.GlobalAveragePooling1D()]


class _Counted(keras.utils.PyDataset):
    loaded = 0

    def __len__(self) -> int:
        return _BATCHES

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        ids, targets = list(_batches())[index]
        return np.repeat(ids, 1 + index % 2, 1), targets


class GeneratorsTest(tf.test.TestCase, parameterized.TestCase):
    def test_every_batch_is_seen_once(self):
        with strategy_of(2).scope():
            sgd = keras.optimizers.SGD(1.0)
            model = model_of(_mean_embedding, sgd, False, lambda target, output: -output)
        model.fit(_batches(), verbose=0)
        seen = _BATCH * model.get_weights()[0]
        self.assertAllClose(np.ones_like(seen), seen)
        # Not the step that finds no data, at the end of an epoch of unknown length.
        self.assertEqual(_BATCHES, model.optimizer.iterations.numpy())

    def test_a_dataset_of_keras_is_loaded_as_on_one_device(self):
        """TensorFlow does not know the shapes of its batches."""
        losses, loaded = [], []
        for count in (1, 2):
            with strategy_of(count).scope():
                model = model_of(_mean_embedding, "sgd", run_eagerly=False, metrics=["mae"])
            batches = _Counted(workers=2)
            losses.append(model.evaluate(batches, verbose=0))
            loaded.append(batches.loaded)
        self.assertAllClose(*losses)
        self.assertEqual(*loaded)

    def test_arrays_that_a_generator_has_parts_of_stay_as_they_are(self):
        """TensorFlow takes those whose address divides by 64 without a copy, and splits them."""
        arrays = [_aligned([256, 16]) for _ in range(2)]
        before = [array.copy() for array in arrays]
        with strategy_of(2).scope():
            activation = keras.layers.Activation("relu")  # It may write into its input.
            model = keras.Sequential([keras.Input([16]), activation, keras.layers.Dense(16)])
            model.compile("sgd", "mse")
        batches = (tuple(array[i : i + 32] for array in arrays) for i in range(0, 256, 32))
        model.fit(batches, verbose=0)
        for array, expected in zip(arrays, before, strict=True):
            self.assertAllEqual(expected, array)


def _aligned(shape: list[int]) -> np.ndarray:
    memory = np.empty(4 * np.prod(shape) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : memory.size - 64 + start].view(np.float32).reshape(shape)
    array[:] = np.random.default_rng(0).normal(size=shape)
    return array


if __name__ == "__main__":
    tf.test.main()
