"""The files of backups, and data whose order is known."""

import collections
import errno
import os
import pathlib
import random
import resource
import tempfile
from typing import Any
from unittest import mock

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfcdo.keras
from tfcdo import log
from tfcdo.keras import backup_folder, data_order
from tfcdo.training import alike

_ARRAYS: dict[str, np.ndarray] = {"v0": np.arange(5, dtype=np.float32), "v1": np.array(3, np.int64)}


class BackupFolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "backup")

    def folder(self) -> Any:
        folder = backup_folder.BackupFolder(self.path)
        folder.take()
        return folder

    def write(self, *positions: backup_folder.Position) -> Any:
        folder = self.folder()
        for position in positions:
            folder.write(position, {"position": position}, _ARRAYS)
        return folder

    def assert_arrays(self, backup: backup_folder.Backup) -> None:
        self.assertCountEqual(backup.arrays, _ARRAYS)
        for name, array in _ARRAYS.items():
            self.assertEqual(backup.arrays[name].dtype, array.dtype)
            np.testing.assert_array_equal(backup.arrays[name], array)

    def test_the_two_newest_are_kept_and_read(self):
        folder = self.write((0, 9), (0, 10), (1, 0))
        self.assertEqual(folder.positions(), [(1, 0), (0, 10)])
        backup = folder.newest()
        self.assertEqual((backup.position, backup.header), ((1, 0), {"position": [1, 0]}))
        self.assert_arrays(backup)
        folder.remove()
        self.assertFalse(self.path.exists())

    def test_without_any_that_can_be_read(self):
        folder = self.write((0, 1), (0, 2))
        for position in folder.positions():
            folder.file(position).write_bytes(b"")
        folder.file((0, 3)).mkdir()  # Not a backup.
        with self.assertRaisesRegex(RuntimeError, r"no backup in '.*backup' can be read: epoch-"):
            folder.newest()
        folder.remove_after((0, 1))
        self.assertEqual(folder.positions(), [(0, 1)])

    def test_any_flipped_bit_and_any_length_is_noticed(self):
        folder = self.write((0, 1), (0, 2))
        path = folder.file((0, 2))
        whole = path.read_bytes()
        damages = [whole[:length] for length in range(0, len(whole), 29)]
        for position in random.Random(5).sample(range(8 * len(whole)), 300):
            flipped = bytearray(whole)
            flipped[position // 8] ^= 1 << position % 8
            damages.append(bytes(flipped))
        positions: collections.Counter[backup_folder.Position] = collections.Counter()
        for data in damages:
            path.write_bytes(data)
            with mock.patch.object(log, "warn_once") as warn:
                backup = folder.newest()
            positions[backup.position] += 1
            self.assertEqual(list(backup.header["position"]), list(backup.position))
            self.assert_arrays(backup)
            if backup.position == (0, 1):
                self.assertIn(f"{path} cannot be read", warn.call_args.args[0])
        # Some bits, such as times in the archive, have no meaning.
        self.assertGreater(positions[0, 1], len(damages) // 2)

    def test_a_half_written_one_is_not_seen_and_removed(self):
        folder = self.write((0, 1))
        killed = SystemExit("killed")  # Nothing is cleaned up: no OSError.
        with mock.patch.object(os, "fsync", side_effect=killed), self.assertRaises(SystemExit):
            folder.write((0, 2), {}, _ARRAYS)
        [left] = self.path.glob("writing-*")
        self.assertGreater(left.stat().st_size, 0)
        self.assertEqual(self.folder().newest().position, (0, 1))
        self.assertFalse(left.exists())

    def assert_write_fails(self, folder: Any, error: str, **arrays) -> None:
        """Asserts that a write raises an OSError, and leaves the backup before."""
        with self.assertRaisesRegex(OSError, f"a backup cannot be written, {error}"):
            folder.write((0, 2), {"position": (0, 2)}, {**_ARRAYS, **arrays})
        self.assertEqual(folder.newest().position, (0, 1))
        names = sorted(path.name for path in self.path.iterdir())
        self.assertEqual(names, ["epoch-00000-batch-00000001.npz", "training.json"])

    def test_a_disk_that_fills_up_while_a_backup_is_written(self):
        folder = self.write((0, 1))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))  # The half of it.
        self.assert_write_fails(folder, ".* are kept", v0=np.ones([2**18], np.float32))
        folder.write((0, 2), {"position": (0, 2)}, _ARRAYS)
        self.assertEqual(folder.newest().position, (0, 2))

    @parameterized.parameters((os, "fsync"), (pathlib.Path, "replace"))
    def test_a_full_disk_leaves_the_last_one(self, owner, function):
        folder = self.write((0, 1))
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(owner, function, side_effect=full):
            with self.assertRaisesRegex(OSError, "backup_dir cannot be written"):
                backup_folder.BackupFolder(self.path).take()
            self.assert_write_fails(folder, "'.*': No space left on device; the backups")

    @parameterized.parameters(False, True)
    def test_a_second_job_takes_the_folder(self, amid_a_write):
        first = self.write((0, 1))
        save = backup_folder._save

        def slow(*arguments: Any) -> None:
            save(*arguments)
            self.folder()

        if not amid_a_write:
            self.folder()
        told = rf"another job uses backup_dir '.*': process {os.getpid()} on .* began"
        with (
            mock.patch.object(backup_folder, "_save", slow if amid_a_write else save),
            self.assertRaisesRegex(RuntimeError, told),
        ):
            first.write((0, 2), {}, _ARRAYS)
        self.assertEqual(first.positions(), [(0, 1)])

    @parameterized.parameters(b"", b'{"run": "a', b"[1]", b"{}", b"\xff")
    def test_a_name_of_the_owner_that_is_damaged(self, data: bytes):
        folder = self.write((0, 1))
        (self.path / "training.json").write_bytes(data)
        told = r"no backup is made, because '.*training\.json', .*, is damaged: \w+Error: .*; start"
        self.assertRaisesRegex(RuntimeError, told, folder.write, (0, 2), {}, _ARRAYS)
        self.assertEqual(self.folder().newest().position, (0, 1))

    def test_a_folder_that_cannot_be_written_to(self):
        self.path.write_text("a file")
        self.assertRaisesRegex(OSError, "backup_dir cannot be written, '.*backup': ", self.folder)

    @parameterized.parameters(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.bool_, np.float16)
    def test_dtypes_keep_their_bits(self, dtype: type):
        array: np.ndarray = np.array([[1, 0, 2]], dtype)
        packed = backup_folder.unpack(backup_folder.pack({"x": array}))["x"]
        self.assertEqual(packed.view(dtype).tobytes(), array.tobytes())
        self.assertEqual(packed.shape, array.shape)


class ResumableTest(tf.test.TestCase, parameterized.TestCase):
    def test_every_epoch_has_each_example_once_in_its_own_order(self):
        data = tfcdo.keras.resumable_dataset(np.arange(10), batch_size=4, seed=5)
        examples = np.concatenate([batch.numpy() for batch in data.take(10)])
        epochs = examples.reshape(4, 10)
        for epoch, order in enumerate(epochs):
            self.assertCountEqual(order, range(10))
            shuffle, seed = tf.random.experimental.index_shuffle, tf.constant([5, epoch], tf.int64)
            expected = [shuffle(index, seed, 9) for index in tf.range(10, dtype=tf.int64)]
            self.assertAllEqual(order, expected)
        self.assertLen(np.unique(epochs, axis=0), 4)
        other = tfcdo.keras.resumable_dataset(np.arange(20), batch_size=8, shuffle=False)
        iterator = mock.Mock(data_adapter=mock.Mock(_dataset=tf.data.Dataset.zip((other, data))))
        data_order.begin_at(data_order.orders_of(iterator), 7)
        self.assertAllEqual(next(iter(data)), examples[7:11])
        self.assertAllEqual(next(iter(other))[0], 14)

    def test_random_access_and_no_shuffle(self):
        class Squares:
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> Any:
                return {"x": np.float32(index), "y": np.full([2], index**2)}

        data = tfcdo.keras.resumable_dataset(Squares(), 2, shuffle=False)
        batches = [tf.nest.map_structure(lambda x: x.numpy().tolist(), b) for b in data.take(2)]
        first = {"x": [0.0, 1.0], "y": [[0, 0], [1, 1]]}
        self.assertEqual(batches, [first, {"x": [2.0, 0.0], "y": [[4, 4], [0, 0]]}])

    @parameterized.parameters(
        ((np.zeros(2), np.zeros(3)), 1, ValueError, r"arrays of the same length; got \[2, 3\]"),
        (np.zeros([0, 2]), 1, ValueError, "at least one example; got none"),
        (5, 1, TypeError, "data must be arrays, .* got 5"),
        ((np.zeros(2), None), 1, TypeError, "data must be dense arrays of examples; got "),
        ((1, 2), 1, TypeError, r"data must be dense arrays of examples; got \(1, 2\)"),
        (np.zeros(2), 0, ValueError, "batch_size must be at least 1"),
        (np.zeros(2), 1, TypeError, "shuffle must be True or False; got 'no'", "shuffle", "no"),
        (np.zeros(2), 1, ValueError, "seed must be from 0 to 9223372036854775807", "seed", 2**63),
    )
    def test_bad_input(self, data, batch_size, error, message, name="seed", value=0):
        with self.assertRaisesRegex(error, message):
            tfcdo.keras.resumable_dataset(data, batch_size, **{name: value})

    def fit(self, x: Any, y: Any = None, **options: Any) -> None:
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(x, y, verbose=0, callbacks=[tfcdo.keras.BackupAndRestore(folder)], **options)

    def test_data_that_cannot_be_resumed_is_named_at_the_start(self):
        arrays = np.zeros([4, 4]), np.zeros([4, 1])
        tf.random.set_seed(None)
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        parts = dataset.batch(4).interleave(lambda *x: tf.data.Dataset.from_tensors(x).shuffle(2))

        class Batches(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 1

            def __getitem__(self, index: int) -> Any:
                return arrays

        class Reordered(Batches):
            def on_epoch_end(self) -> None:
                """It may draw another order."""

        of_processes = dataset.shuffle(4, seed=1, reshuffle_each_iteration=False)
        setattr(of_processes, alike.OF_PROCESSES, True)
        for data, shuffle, reason in (
            ([of_processes.batch(2)], True, "without a seed"),
            (arrays, True, r"fit\(shuffle=True\) draws another order"),
            ([dataset.shuffle(4).batch(2)], True, "reshuffle_each_iteration=True"),
            ([parts], True, "reshuffle_each_iteration=True"),
            ([dataset.shuffle(4, reshuffle_each_iteration=False).batch(2)], True, "without a seed"),
            ([dataset.shuffle(4, seed=1, reshuffle_each_iteration=False).batch(2)], True, None),
            ([Batches()], True, r"fit\(shuffle=True\) draws another order of a PyDataset's"),
            ([Reordered()], False, "its on_epoch_begin or on_epoch_end.* may reorder the batches"),
            ([Batches()], False, None),
        ):
            with mock.patch.object(log, "warn_once") as warn:
                self.fit(*data, shuffle=shuffle)
            self.assertEqual(warn.call_count, reason is not None)
            self.assertRegex("".join(call.args[0] for call in warn.call_args_list), reason or "^$")

    def test_an_endless_dataset_needs_steps(self):
        data = tfcdo.keras.resumable_dataset(np.zeros(4), 2)
        zipped = tf.data.Dataset.zip(data.map(tf.identity), data).prefetch(1)
        for given, reasons in (zipped, []), (zipped.unbatch().batch(4), ["its Batch, after"]):
            refused = self.assertRaisesRegex(ValueError, "steps_per_epoch .* got None")
            with mock.patch.object(log, "warn_once") as warn, refused:
                self.fit(given)
            self.assertEqual(warn.call_count, len(reasons))
            self.assertIn("".join(reasons), str(warn.call_args))


if __name__ == "__main__":
    tf.test.main()
