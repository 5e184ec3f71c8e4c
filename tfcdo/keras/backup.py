"""A backup of the training state that a killed job can trust, written by one of its hosts."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

import keras
import tensorflow as tf

from tfcdo import strategies
from tfcdo.keras.callback import Callback

_COMPLETE = re.compile(r"epoch-(\d+)")


class BackupAndRestore(Callback):
    """`keras.callbacks.BackupAndRestore` for several hosts; backups survive a kill at any time.

    Keras's callback overwrites the weights and then a file with the epoch: killed in between, it
    continues with weights of one epoch at another. On several hosts, each would write to the same
    files, or each to its own, and they could restore unlike epochs.

    Here one host, the chief (`tfcdo.is_chief()`), writes what Keras's callback writes into a new
    folder and renames it when it is complete. All hosts restore the newest complete one, and make
    sure that they restore the same.

    Args:
      backup_dir: The folder for backups, on a file system that all hosts share. Nothing else may be
        in it.
      delete_checkpoint: Whether to remove the folder at the end of the training.

    Raises:
      RuntimeError: When the training begins, if hosts do not find the same backup.

    Example:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> folder = tempfile.mkdtemp()
      >>> backup = BackupAndRestore(folder, delete_checkpoint=False)
      >>> data = np.zeros([4, 2]), np.zeros([4, 1])
      >>> _ = model.fit(*data, epochs=2, callbacks=[backup], verbose=0)
      >>> os.listdir(folder)
      ['epoch-2']
      >>> model.fit(*data, epochs=3, callbacks=[backup], verbose=0).epoch
      [2]
    """

    def __init__(self, backup_dir: str | os.PathLike[str], delete_checkpoint: bool = True) -> None:
        super().__init__()
        if not os.fspath(backup_dir):
            raise ValueError("backup_dir must be the path of a folder; got ''")
        self.backup_dir = pathlib.Path(backup_dir)
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest backup, if there is one."""
        epoch = max(self._complete(), default=0)
        self._check_same(epoch)
        if epoch:
            self._keras_callback(self._folder(epoch)).on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes a backup, and removes the one before."""
        with tempfile.TemporaryDirectory() as elsewhere:
            # All hosts save, because reading some variables takes all of them.
            is_chief = strategies.is_chief()
            writing = self.backup_dir / "writing" if is_chief else pathlib.Path(elsewhere, "unused")
            if is_chief:
                shutil.rmtree(writing, ignore_errors=True)
            self._keras_callback(writing).on_epoch_end(epoch, logs)
            if is_chief:
                self._complete_backup(writing, epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        """Removes all backups, because the training is complete."""
        if self.delete_checkpoint and strategies.is_chief():
            shutil.rmtree(self.backup_dir, ignore_errors=True)

    def _complete_backup(self, writing: pathlib.Path, epoch: int) -> None:
        before = self._complete()
        # A backup of that epoch is there if the training was restarted from an older one.
        shutil.rmtree(self._folder(epoch), ignore_errors=True)
        writing.rename(self._folder(epoch))
        for old in before:
            if old != epoch:
                shutil.rmtree(self._folder(old), ignore_errors=True)

    def _complete(self) -> list[int]:
        """Returns the epochs after which complete backups were made."""
        with contextlib.suppress(FileNotFoundError):
            found = (_COMPLETE.fullmatch(path.name) for path in self.backup_dir.iterdir())
            return [int(match[1]) for match in found if match]
        return []

    def _folder(self, epoch: int) -> pathlib.Path:
        return self.backup_dir / f"epoch-{epoch}"

    def _keras_callback(self, folder: pathlib.Path) -> keras.callbacks.BackupAndRestore:
        callback = keras.callbacks.BackupAndRestore(str(folder))
        callback.set_model(self.model)
        return callback

    def _check_same(self, epoch: int) -> None:
        """Raises a RuntimeError on all hosts unless all have found the same epoch."""
        strategy = tf.distribute.get_strategy()
        epochs = strategy.gather(
            strategy.experimental_distribute_values_from_function(lambda _: tf.constant([epoch])),
            axis=0,
        ).numpy()
        if epochs.min() != epochs.max():
            raise RuntimeError(
                f"all hosts must find the same backup in backup_dir, {str(self.backup_dir)!r}, "
                "which must be on a file system that they share; got backups after the epochs "
                f"{epochs.tolist()} (0: none), in the order of the replicas"
            )
