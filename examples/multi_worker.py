"""Trains a Keras model on several hosts with tfcdo.MultiWorkerMirroredStrategy.

On one machine, two workers with two (virtual) devices each:

    tfcdo launch --workers 2 --devices-per-worker 2 examples/multi_worker.py

On two hosts a and b, which share the folder of --folder; change only --index on b:

    tfcdo launch --hosts a:2222,b:2222 --index 0 examples/multi_worker.py --folder /shared/run1

By hand, without the launcher, on each host (in two terminals of one machine: localhost:2222 and
localhost:2223 instead of a:2222 and b:2222):

    export TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/multi_worker.py --folder /shared/run1

On its own, `python examples/multi_worker.py` trains in one process.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfcdo
import tfcdo.keras

GLOBAL_BATCH = 128


def make_data(examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws points around ten centers; the label says which."""
    centers = np.random.default_rng(0).normal(size=(10, 16))
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, examples)
    points = centers[labels] + 0.5 * random.normal(size=(examples, 16))
    return points.astype(np.float32), labels


def make_batches(points: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    """Makes the same global batches on every host; the strategy gives each replica its part."""
    return tf.data.Dataset.from_tensor_slices((points, labels)).batch(
        GLOBAL_BATCH, drop_remainder=True
    )


def make_model() -> keras.Model:
    """Makes a small classifier."""
    model = keras.Sequential(
        [
            keras.layers.Input([16]),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Trains, evaluates and saves."""
    parser = argparse.ArgumentParser(description="Trains a Keras model on several hosts.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("multi_worker_run"))
    options = parser.parse_args()

    # Before anything else of TensorFlow runs: this starts its servers.
    strategy = tfcdo.MultiWorkerMirroredStrategy()
    # One process speaks for all.
    chief = tfcdo.is_chief()
    if chief:
        print(f"Training on {strategy.num_replicas_in_sync} replicas", flush=True)

    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = make_model()
    model.fit(
        make_batches(*make_data(20 * GLOBAL_BATCH, seed=1)),
        epochs=options.epochs,
        shuffle=False,
        # A restarted job continues after the last complete epoch.
        callbacks=[tfcdo.keras.BackupAndRestore(options.folder / "backup")],
        verbose=2 if chief else 0,
    )
    loss, accuracy = model.evaluate(make_batches(*make_data(4 * GLOBAL_BATCH, seed=2)), verbose=0)

    # All hosts save, because reading some variables takes all of them, but only the chief to the
    # path that counts.
    with tempfile.TemporaryDirectory() as elsewhere:
        folder = options.folder if chief else pathlib.Path(elsewhere)
        folder.mkdir(parents=True, exist_ok=True)
        model.save(folder / "model.keras")
    if chief:
        print(f"Test loss {loss:.4f}, accuracy {accuracy:.4f}")
        print(f"Saved {options.folder / 'model.keras'}")


if __name__ == "__main__":
    main()
