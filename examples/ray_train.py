"""Elastic training on Ray Train: hosts may be lost and may join. python ray_train.py FOLDER.

FOLDER must be on a file system that all machines of the cluster share. See docs/ray.md.
"""

import os
import pathlib
import sys

from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

EPOCHS, STEPS, BATCH = 4, 40, 24  # Each number of workers from 1 to 4 divides the batch.


def train_one_worker(config):
    """Runs in each worker, again from its beginning after each change of their number."""
    # Ray sets it for TensorFlow's own strategy; Keras 3 works with tfcdo's.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import keras
    import numpy as np

    import tfcdo
    import tfcdo.keras

    strategy = tfcdo.MultiWorkerMirroredStrategy()  # Reads TF_CONFIG, which Ray has set.
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 16)).astype("float32")
    backup = tfcdo.keras.BackupAndRestore(f"{config['folder']}/backup", save_freq=10)

    data = tfcdo.keras.resumable_dataset((x, x[:, :4] ** 2), BATCH, seed=1)
    history = model.fit(
        data, epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0, callbacks=[backup]
    ).history
    metrics = {"loss": history["loss"][-1], "replicas": strategy.num_replicas_in_sync}
    checkpoint = None
    if tfcdo.is_chief():
        folder = pathlib.Path(config["folder"], "model")
        folder.mkdir(exist_ok=True)
        model.save(folder / "model.keras")
        checkpoint = train.Checkpoint.from_directory(folder)
    # All workers report; Result.metrics are None without a checkpoint.
    train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    trainer = TensorflowTrainer(
        train_one_worker,
        train_loop_config={"folder": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=30),
        run_config=RunConfig(
            storage_path=f"{sys.argv[1]}/ray", failure_config=FailureConfig(max_failures=-1)
        ),
    )
    print(trainer.fit().metrics)
