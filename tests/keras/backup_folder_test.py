"""The files of backups: complete or not visible, read as they were written."""

from __future__ import annotations

import errno
import os
import pathlib
import tempfile
from unittest import mock

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from tfcdo.keras import backup_folder, host_exchange

_ARRAYS: dict[str, np.ndarray] = {"v0": np.arange(5, dtype=np.float32), "v1": np.array(3, np.int64)}


class BackupFolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "backup")

    def folder(self) -> backup_folder.BackupFolder:
        folder = backup_folder.BackupFolder(self.path)
        folder.take("training")
        return folder

    def newest(self, folder: backup_folder.BackupFolder) -> backup_folder.Backup:
        backup = folder.newest()
        assert backup is not None
        return backup

    def write(self, *positions: backup_folder.Position) -> backup_folder.BackupFolder:
        folder = self.folder()
        for position in positions:
            folder.write(position, {"position": position}, _ARRAYS)
        return folder

    def test_the_two_newest_are_kept_and_read(self):
        folder = self.write((0, 9), (0, 10), (1, 0))
        self.assertEqual(folder.positions(), [(1, 0), (0, 10)])
        backup = self.newest(folder)
        self.assertEqual((backup.position, backup.header), ((1, 0), {"position": [1, 0]}))
        for name, array in _ARRAYS.items():
            np.testing.assert_array_equal(backup.arrays[name], array)
        self.assertEqual(folder.training(), "training")
        folder.remove()
        self.assertFalse(self.path.exists())

    @parameterized.parameters("half", "empty", "bit")
    def test_a_damaged_one_is_not_used(self, damage: str):
        folder = self.write((0, 1), (0, 2))
        data = bytearray(folder.file((0, 2)).read_bytes())
        data[data.index(_ARRAYS["v0"].tobytes()) + 1] ^= 1
        damaged: bytes = {"half": bytes(data[: len(data) // 2]), "empty": b"", "bit": bytes(data)}[
            damage
        ]
        folder.file((0, 2)).write_bytes(damaged)
        self.assertEqual(self.newest(folder).position, (0, 1))
        folder.remove_after((0, 1))
        self.assertEqual(folder.positions(), [(0, 1)])
        folder.file((0, 1)).write_bytes(damaged)
        with self.assertRaisesRegex(RuntimeError, r"no backup in '.*backup' can be read: epoch-"):
            folder.newest()

    def test_a_full_disk_leaves_the_last_one(self):
        folder = self.write((0, 1))
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        error = r"a backup cannot be written, '.*': No space left on device; the backups before"
        for function in "fsync", "replace":
            where = mock.patch.object(os, "fsync", side_effect=full)
            if function == "replace":
                where = mock.patch.object(pathlib.Path, "replace", side_effect=full)
            with where, self.assertRaisesRegex(OSError, error) as raised:
                folder.write((0, 2), {}, _ARRAYS)
            self.assertEqual(raised.exception.errno, errno.ENOSPC)
            self.assertEqual(self.newest(folder).position, (0, 1))
            names = sorted(path.name for path in self.path.iterdir())
            self.assertEqual(names, ["epoch-00000-batch-00000001.npz", "training.json"])

    def test_a_folder_that_cannot_be_written_to(self):
        self.path.write_text("a file")
        with self.assertRaisesRegex(OSError, "backup_dir cannot be written, '.*backup': "):
            self.folder()

    def test_a_second_job_takes_the_folder(self):
        first = self.write((0, 1))
        second = self.write((0, 2))
        with self.assertRaisesRegex(
            RuntimeError, rf"another job uses backup_dir '.*': process {os.getpid()} on .* began"
        ):
            first.write((0, 3), {}, _ARRAYS)
        self.assertEqual(self.newest(second).position, (0, 2))

    def test_an_unreadable_owner(self):
        folder = self.write((0, 1))
        (self.path / "training.json").write_text("{")
        with self.assertRaisesRegex(RuntimeError, "an unreadable training.json: .*remove that"):
            folder.training()

    @parameterized.parameters(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.bool_, np.float16)
    def test_dtypes_keep_their_bits(self, dtype: type):
        array: np.ndarray = np.array([[1, 0, 2]], dtype)
        packed = host_exchange.unpack(host_exchange.pack({"x": array}))["x"]
        self.assertEqual(packed.view(dtype).tobytes(), array.tobytes())
        self.assertEqual(packed.shape, array.shape)


if __name__ == "__main__":
    absltest.main()
