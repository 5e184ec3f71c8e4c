"""A small training that may be disturbed at any moment.

    tfcdo launch --workers 2 tools/fault_training.py FOLDER

Without TF_CONFIG it trains on one device, without tfcdo's strategy. See `faults`.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

import numpy as np

from tfcdo.cluster import config, worker

SEED = 7
EPOCHS = 3
STEPS = 30
_BATCH = 24  # 1 to 4 hosts divide it.


def train(folder: pathlib.Path) -> None:
    """One host of a training: a small Keras model, on batches that are the same in each run."""
    cluster = config.from_tf_config()
    task = cluster.index if cluster else 0
    run = int(os.environ.get(worker.RESTART_COUNT, "0"))
    (folder / f"new-{run}-{task}").write_text(str(os.getpid()))
    (folder / f"new-{run}-{task}").rename(folder / f"pid-{run}-{task}")

    import keras
    import tensorflow as tf

    import tfcdo
    import tfcdo.keras

    class Progress(keras.callbacks.Callback):
        """Writes the number and the time of each step; batches that are skipped are none."""

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            self._before = int(self.model.optimizer.iterations.numpy())
            (folder / f"begins-{run}-{task}").touch()

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            step = int(self.model.optimizer.iterations.numpy())
            if step != self._before:
                with (folder / f"steps-{run}-{task}").open("a") as file:
                    file.write(f"{step} {time.time()}\n")
                time.sleep(0.03)  # So that a training takes some seconds.

    strategy = tf.distribute.get_strategy()
    if cluster:
        # Two packs a layer and more: partly updated variables would show.
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2048)
        strategy = tfcdo.MultiWorkerMirroredStrategy(communication_options=options)
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        hidden = [keras.layers.Dense(32, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.layers.Input([16]), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    features = np.random.default_rng(SEED).normal(size=(STEPS * _BATCH, 16)).astype(np.float32)
    targets = np.tanh(features.sum(axis=1, keepdims=True) / 4)
    model.fit(
        tfcdo.keras.resumable_dataset((features, targets), _BATCH, seed=SEED),
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        verbose=0,
        # The step after which all leave is written too.
        callbacks=[Progress(), tfcdo.keras.BackupAndRestore(folder / "backup", save_freq=10)],
    )
    np.savez(folder / f"weights-{task}.npz", *model.get_weights())


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]))
