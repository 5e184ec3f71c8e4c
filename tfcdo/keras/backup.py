"""`BackupAndRestore`: after a fault, training resumes at the batch of the last backup."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import os
from typing import Any, Literal

from absl import logging

from tfcdo import checks, keras_internals, log
from tfcdo.cluster import protocol
from tfcdo.keras import backup_folder, data_order, preemption, training_state
from tfcdo.keras.callbacks import Callback
from tfcdo.training import step

# Writes one backup at a time; the process ends when the last one has been written.
_writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tfcdo backup")


@dataclasses.dataclass(frozen=True)
class _Progress:
    """The position of a training."""

    epoch: int = 0  # That is running, or begins next.
    batch: int = 0  # How many of its batches are done.
    batches: int = 0  # How many of all epochs.
    examples: int = 0  # Where a `resumable_dataset` goes on.
    batch_size: int = 0  # Of the data; 0 if it is not known.
    before: int = 0  # Batches of earlier epochs, from the iterator that this epoch continues.
    began: bool = False  # Whether callbacks have been called for the beginning of the epoch.

    @property
    def position(self) -> backup_folder.Position:
        return self.epoch, self.batch


class BackupAndRestore(Callback):
    """`keras.callbacks.BackupAndRestore` that continues inside an epoch, bit for bit.

    A backup has the weights, all of the optimizer (accumulated gradients, averages, the loss
    scale), seeds, the moving statistics of each replica, the rounding errors of `error_feedback`,
    the metrics of the epoch and the position. On the same devices, a training that is killed and
    started again ends with the weights of an uninterrupted one, bit for bit. On another number of
    replicas or hosts it continues with the same global batches.

    The data must come in the same order again: pass `tfcdo.keras.resumable_dataset(...)` to `fit`,
    which starts at any example, or a `tf.data.Dataset` that gives the same batches each time, whose
    first ones are taken and dropped. If the data cannot be resumed, the log says so at the start.

    One host, the chief (`tfcdo.is_chief()`), writes the backups in the background; a host that
    trains a model alone writes its own. A backup is visible when it is complete, and the two newest
    are kept. Give this callback to `fit` after those that change the model or its learning rate,
    such as `SwapEMAWeights`. The state of other callbacks is not part of a backup. When training
    continues inside an epoch, they are called for its first batches too; what they change in the
    model then is undone.

    When the process gets SIGTERM while it trains, or TensorFlow has a notice of preemption for any
    host, all hosts make a backup after the same step and raise `SystemExit` with status 75;
    `tfcdo launch` then starts them again. A handler of the program's own for SIGTERM stays.

    The chief logs once where training has resumed, how long after the last batch before the fault,
    and how many batches are repeated. For that it keeps a small file, "progress", in the folder.

    Args:
      backup_dir: the folder for the backups of one training, on a file system that all hosts
        share, so that another machine finds the backups when it becomes the chief.
      save_freq: "epoch" for a backup at the end of each epoch; or after how many batches.
      delete_checkpoint: whether to remove the backups at the end of the training.

    Raises:
      TypeError: if an argument is of another type.
      ValueError: if `backup_dir` is empty or `save_freq` not one of the above; when training
        begins, if the newest backup is of another model or optimizer, amid an execution of several
        steps, or amid batches of another size; or `fit` got no `steps_per_epoch` for a
        `resumable_dataset`.
      OSError: if the folder cannot be written to, such as on a full disk; earlier backups stay.
      RuntimeError: if no backup can be read, or another job uses the folder.

    Example:
      >>> import os, tempfile
      >>> import keras, numpy as np, tfcdo.keras
      >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> data = tfcdo.keras.resumable_dataset((np.zeros([4, 2]), np.zeros([4, 1])), batch_size=2)
      >>> folder = tempfile.mkdtemp()
      >>> backup = BackupAndRestore(folder, save_freq=3, delete_checkpoint=False)
      >>> _ = model.fit(data, steps_per_epoch=2, epochs=2, callbacks=[backup], verbose=0)
      >>> sorted(os.listdir(folder))
      ['epoch-00001-batch-00000001.npz', 'training.json']
      >>> model.fit(data, steps_per_epoch=2, epochs=3, callbacks=[backup], verbose=0).epoch
      [1, 2]
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        # The program may change its folder later.
        self.backup_dir = checks.check_path("backup_dir", backup_dir).absolute()
        checks.check_bool("delete_checkpoint", delete_checkpoint)
        if not isinstance(save_freq, str):
            checks.check_int("save_freq", save_freq, at_least=1)
        elif save_freq != "epoch":
            raise ValueError(f'save_freq must be "epoch" or a number; got {save_freq!r}')
        self._mark: backup_folder.ProgressMark | None = None
        self._orders: list[data_order.Order] = []
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest backup, if one exists; Keras calls it."""
        _writer.submit(int).result()  # An earlier training of this process may still write.
        self._writing: concurrent.futures.Future[None] | None = None
        self._folder = backup_folder.BackupFolder(self.backup_dir)
        self._iterator = keras_internals.epoch_iterator(self.model)
        # Among the hosts that train this model: a host that trains it alone writes.
        self._is_chief = training_state.host_of(self.model.distribute_strategy)[0] == 0
        if self._is_chief:
            self._folder.take()
        # Hosts meet once the chief has taken the folder, so no other process adds to it.
        training_state.gather_json(self.model.distribute_strategy, None)
        restored = self._newest_of_all_hosts()
        self._restored: Any = restored
        self._progress = _Progress()
        self._logs: dict[str, float] = {}  # The last batch's.
        # `fit` changes none but the learning rate, which is not among them.
        self._settings = keras_internals.settings_of(self.model.optimizer)
        if restored is not None:
            self._restore(*restored)
        elif others := sorted(path.name for path in self.backup_dir.glob("*.weights.h5")):
            log.warn_once(
                f"training starts at the beginning: backup_dir {str(self.backup_dir)!r} has "
                f"backups of another class, which cannot be read: {', '.join(others[:3])}; load "
                "the weights yourself, or use the class that made them"
            )
        # Only one host may see the backup that was restored.
        self._saved_position = None if restored else self._progress.position
        if self._mark is not None:
            self._mark.close()
        self._mark = backup_folder.ProgressMark(self.backup_dir) if self._is_chief else None
        self._earlier = self._mark.read() if self._mark else None  # Before it is overwritten.
        self._resumed_at = self._progress if restored is not None else None
        self._orders = self._begin_data()
        if restored and self._is_chief:
            self._folder.remove_after(self._progress.position)
        self._calls, self._is_due = 0, False
        self._preemption = preemption.Preemption(step.now.session)
        self._preemption.start()
        keras_internals.at_end_of_fit(self.model, self._preemption.stop)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Continues inside the epoch, if it was the epoch of the backup; Keras calls it."""
        if self._resumed_at is not None:
            data_order.begin_at(self._orders, self._progress.examples)
        if self._restored is not None:
            progress, steps = self._progress, (self.params or {}).get("steps")
            iterator = None if self._orders else self._iterator  # Else it begins there itself.
            data_order.SkipBatches(
                self.model, progress.batch, steps, self._logs, iterator, progress.before
            )
            if self._progress.batch:
                training_state.restore_metrics(self.model, *self._restored)
                return
            if self._progress.began:
                self._restore_again()
                return
            self._restored = None
        self._progress = dataclasses.replace(self._progress, epoch=epoch, batch=0, began=True)
        if self._is_due:
            self._save()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Leaves if a host is being preempted; Keras calls it."""
        if not self._preemption.may_begin(self._calls + 1):
            self._leave()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Makes a backup if it is time to; Keras calls it."""
        self._calls += 1
        # Keras passes the last batch of an execution, and up to 3.9 its first.
        at_once = self.model.steps_per_execution
        done = (batch // at_once + 1) * at_once
        if self._iterator is not None and not self._iterator.steps_per_epoch:
            # With `steps_per_execution` Keras counts more batches than the data has, but where it
            # has no end trains them all.
            done = min(done, (self.params or {}).get("steps") or done)
        new = done - self._progress.batch
        if new <= 0:  # It was skipped.
            if new == 0:
                self._restore_again()
            return
        self._logs = {name: value for name, value in (logs or {}).items() if type(value) is float}
        self._progress = dataclasses.replace(
            self._progress,
            batch=self._progress.batch + new,
            batches=self._progress.batches + new,
            examples=self._progress.examples + new * self._progress.batch_size,
        )
        batches, every = self._progress.batches, self.save_freq
        # It reaches or passes a multiple: with `steps_per_execution` several batches are new.
        if isinstance(every, int) and batches // every > (batches - new) // every:
            self._save()
        self._note_progress()

    def on_test_begin(self, logs: Any = None) -> None:
        """Lets a validation begin its data as without a fault; Keras calls it."""
        data_order.begin_at(self._orders, 0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Makes a backup if it is time to; Keras calls it."""
        self._restore_again()  # An epoch with fewer steps now has not come to the backup's.
        before = keras_internals.batches_given(self._iterator) if self._iterator else 0
        self._progress = dataclasses.replace(
            self._progress, epoch=epoch + 1, batch=0, before=before, began=False
        )
        self._is_due = self.save_freq == "epoch"
        # Else when the next epoch begins: `SwapEMAWeights` may have swapped the weights until then.
        stops = self.model.stop_training or epoch + 1 == (self.params or {}).get("epochs")
        # A callback may have stopped one host only, with which all others then stop.
        if self._is_due and any(training_state.gather_json(self.model.distribute_strategy, stops)):
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Removes the backups, because the training is complete; Keras calls it."""
        self._preemption.complete()
        if self._is_due:  # Another callback has ended the training.
            self._save()
        self._finish_writing()  # A SIGTERM meanwhile does not end the process.
        self._preemption.stop()
        if self._mark is not None:
            self._mark.remove()
        if self.delete_checkpoint and self._is_chief:
            self._folder.remove()

    def _save(self) -> None:
        """Copies the state between two steps, and has it written; all hosts must call it."""
        position = self._progress.position
        header, values = training_state.copy(self.model, with_metrics=position[1] > 0)
        progress = dataclasses.asdict(self._progress)
        header |= {"run": self._folder.run, "settings": self._settings}
        header |= {"progress": progress, "logs": self._logs}
        self._saved_position = position
        self._is_due = False
        self._finish_writing()
        if self._is_chief:
            self._writing = _writer.submit(
                lambda: self._folder.write(position, header, training_state.fetch(values))
            )

    def _finish_writing(self) -> None:
        """Waits until the last backup has been written, and raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _leave(self) -> None:
        """Makes a backup and ends the process, as all hosts do after this step."""
        if self._saved_position != self._progress.position:
            self._restore_again()
            self._save()
        self._finish_writing()
        # Until the chief has written, no host ends.
        training_state.gather_json(self.model.distribute_strategy, None)
        logging.info(
            "tfcdo: leaving after epoch %d, batch %d, with a backup: this machine, or another "
            "host's, will be taken away",
            *self._progress.position,
        )
        self._iterator = None  # It ends with `fit`.
        raise SystemExit(protocol.RESTART_STATUS)

    def _note_progress(self) -> None:
        """Marks a batch as done; after the first one, the chief reports that training resumed."""
        resumed_at, self._resumed_at = self._resumed_at, None
        if resumed_at is not None:  # Other iterators, as of `evaluate`, begin as without a fault.
            data_order.begin_at(self._orders, 0)
        if self._mark is None:
            return
        self._mark.write(self._progress.batches)
        if resumed_at is not None:
            # A warning, because others are not shown unless the program asks for them.
            logging.warning("tfcdo: %s", _resumption(resumed_at, self._earlier, self._mark.read()))

    def _newest_of_all_hosts(self) -> tuple[backup_folder.Header, Any] | None:
        """Returns the newest complete backup that any host finds."""
        strategy = self.model.distribute_strategy
        host, _ = training_state.host_of(strategy)
        own = self._folder.newest()
        names = training_state.gather_json(strategy, own and own.name)
        choice = protocol.choose([name and tuple(name) for name in names])
        if choice is None:
            return None
        if choice.is_sent:
            # To a host whose file system is not up to date.
            data = own.path.read_bytes() if own is not None and host == choice.source else b""
            data = training_state.gather(strategy, data)[choice.source]
            if own is None or own.name != choice.position:
                return backup_folder.read(io.BytesIO(data))
        assert own is not None
        return own.header, own.arrays

    def _restore(self, header: backup_folder.Header, arrays: Any) -> None:
        model = self.model
        # With a strategy, `fit` has made all variables. Else the first step would make them.
        if self._iterator is not None and not step.is_ours(model.distribute_strategy):
            keras_internals.symbolic_build(model, keras_internals.element_spec(self._iterator))
        training_state.build(model, header)
        training_state.check_same_model(model, header, str(self.backup_dir))
        training_state.restore(model, header, arrays)
        self._progress = _Progress(**header["progress"])
        self._logs = header["logs"]
        keras_internals.set_initial_epoch(model, self._progress.epoch)

    def _restore_again(self) -> None:
        """Undoes what other callbacks have changed again, for what the backup already has."""
        restored, self._restored = self._restored, None  # Frees the arrays.
        if restored is not None:
            training_state.restore(self.model, *restored)

    def _begin_data(self) -> list[data_order.Order]:
        """Starts the data of `resumable_dataset` where training resumes; names other data."""
        if self._iterator is None:
            return []
        orders = data_order.orders_of(self._iterator)
        reason = data_order.why_not(self._iterator, orders)
        if reason is not None:
            log.warn_once(f"a training with this data cannot be resumed exactly: {reason}")
        if orders and self._iterator.steps_per_epoch is None:
            raise ValueError(
                "fit must get steps_per_epoch for data of tfcdo.keras.resumable_dataset, which has "
                "no end; got None"
            )
        size, done = data_order.batch_size(self._iterator, orders), self._progress
        is_amid = done.batch or (done.before and not orders)
        are_known = size and done.batch_size
        if is_amid and are_known and size != done.batch_size:
            raise ValueError(
                f"batch_size must be {done.batch_size}, as before the backup after batch "
                f"{done.batch}, so that no example is left out or repeated; got {size}"
            )
        self._progress = dataclasses.replace(done, batch_size=size)
        keras_internals.at_end_of_fit(self.model, lambda: data_order.begin_at(orders, 0))
        return orders


def _resumption(
    resumed_at: _Progress, earlier: tuple[int, float] | None, now: tuple[int, float] | None
) -> str:
    """Says where training has resumed; with marks, the time and the number of repeated batches.

    The time is from the last batch that was done before the fault to the first one after it.
    """
    after = repeated = ""
    if earlier is not None and earlier[0] >= resumed_at.batches:
        count = earlier[0] - resumed_at.batches
        repeated = f" ({count} batch{'es' if count != 1 else ''} repeated)"
        if now is not None and now[1] >= earlier[1]:  # Else the clock was set back.
            after = f" after {now[1] - earlier[1]:.1f} s"
    epoch, batch = resumed_at.position
    return f"resumed{after} at epoch {epoch}, batch {batch}{repeated}"
