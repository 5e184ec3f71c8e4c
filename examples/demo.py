"""Trains a real Keras model on several devices and compares it with one device: `make demo`.

A small convolutional network learns scikit-learn's handwritten digits on virtual CPU devices, under
tfcdo.MirroredStrategy and with clipped gradients, and once more on one device. The exit status is 1
if a check fails. Accuracy counts if there are enough epochs for it.

pip install '.[demo]'
python examples/demo.py --devices 4
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sklearn import datasets

import tfcdo

MIN_ACCURACY = 0.95
# Number of epochs that reach that accuracy.
MIN_EPOCHS = 8
# Two correct trainings differ by the rounding of their sums: three units in float32's last place
# were measured here. A device left out of the sums makes it 0.1 and more.
MAX_WEIGHT_DIFFERENCE = 1e-5

SEED = 7
_TEST_IMAGES = 360
_GLOBAL_BATCH = 128
_SUMMED = (1.0, 2.0, 3.0)
_VERDICTS = {True: Text("ok", "green"), False: Text("not ok", "bold red"), None: Text("-")}
_WITHOUT_TFCDO = (
    "Under TensorFlow's strategy, Keras clips on each device, before the sum; and it cannot "
    "accumulate. TensorFlow's class leaves a device out of an odd number."
)


@dataclasses.dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits, 8x8 grey values in 0..1, shuffled and split."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of a table: the name of a check, its result, and the wanted result."""

    subject: str
    result: str
    wanted: str
    # None if the result is only shown.
    passed: bool | None


def main(devices: int, epochs: int) -> int:
    """Trains, prints what it finds, and returns the exit status."""
    width = None if sys.stdout.isatty() else 120
    console = Console(highlight=False, markup=False, width=width)
    tf.get_logger().setLevel("ERROR")
    tf.config.set_visible_devices([], "GPU")  # One device is to be the same processor.
    names = tfcdo.configure_virtual_cpus(max(devices, len(_SUMMED)))
    digits = load_digits()
    train_under = functools.partial(train, digits, devices, epochs)
    sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9, global_clipnorm=0.5)
    console.print(f"Training on {_count(devices)} with tfcdo.MirroredStrategy", style="bold")
    strategy = tfcdo.MirroredStrategy(names[:devices])
    # Keras's bar redraws its line, which a file or a pipe cannot.
    verbose = "auto" if sys.stdout.isatty() else 2
    model = train_under(strategy, sgd, verbose)
    console.print(str(strategy.explain([weight.shape for weight in model.trainable_weights])))
    with console.status("The same training on one device, to compare ..."):
        alone = train_under(tf.distribute.get_strategy(), sgd)
        # Its sums are correct on any number of devices.
        ops = tf.distribute.ReductionToOneDevice()
        clipping = train_under(tf.distribute.MirroredStrategy(names[:devices], ops), sgd)
        ours, theirs = tfcdo.HierarchicalCopyAllReduce(), tf.distribute.HierarchicalCopyAllReduce()
        checks = [
            check_accuracy(model, digits, epochs),
            check_replicas(strategy, model),
            check_weights("Largest weight difference from one-device training", model, alone),
            check_sum("1 + 2 + 3 by tfcdo's copies", names, ours),
        ]
        others = [
            check_weights("Clipping under TensorFlow's strategy", clipping, alone),
            check_sum("1 + 2 + 3 by TensorFlow's copies", names, theirs),
        ]
    failed = [check.subject for check in checks if check.passed is False]
    judged = Table("Check", "Result", "Wanted", "")
    shown = Table("Without tfcdo", "Result", "Wanted")
    for check in checks:
        judged.add_row(check.subject, check.result, check.wanted, _VERDICTS[check.passed])
    for check in others:
        shown.add_row(check.subject, check.result, check.wanted)
    verdict = Text("All checks passed.", "green")
    if failed:
        verdict = Text("Not as wanted: " + "; ".join(failed), "bold red")
    for part in ("", judged, verdict, shown, _WITHOUT_TFCDO):
        console.print(part)
    return int(bool(failed))


def load_digits() -> Digits:
    """Loads, shuffles and splits the images."""
    flat_images, labels = datasets.load_digits(return_X_y=True)
    images = (flat_images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(SEED).permutation(len(images))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def train(
    digits: Digits,
    devices: int,
    epochs: int,
    strategy: tf.distribute.Strategy,
    optimizer: Callable[[], Any],
    verbose: str | int = 0,
) -> Any:
    """Trains a new model: always the same first weights, and the same batches in the same order."""
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        # Smooth from end to end: relu's kink, or Adam's division by the size of a gradient, would
        # now and then make a large difference of a rounding.
        model = keras.Sequential(
            [
                keras.layers.Input(digits.train_images.shape[1:]),
                keras.layers.Conv2D(16, 3, padding="same", activation="tanh"),
                keras.layers.Conv2D(32, 3, strides=2, activation="tanh"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    # The same number of images for each device, and so the same mean of their gradients.
    batch = max(1, round(_GLOBAL_BATCH / devices)) * devices
    batches = (
        tf.data.Dataset.from_tensor_slices((digits.train_images, digits.train_labels))
        .batch(batch, drop_remainder=True)
        # One endless iterator, not one an epoch: ending one may take tf.data seconds of waiting.
        .repeat()
    )
    steps = len(digits.train_images) // batch
    model.fit(batches, steps_per_epoch=steps, epochs=epochs, shuffle=False, verbose=verbose)
    return model


def check_accuracy(model: Any, digits: Digits, epochs: int) -> Check:
    """Checks the accuracy on the test images, if there are epochs enough."""
    logits = model(digits.test_images, training=False).numpy()
    accuracy = float((logits.argmax(axis=-1) == digits.test_labels).mean())
    judged = epochs >= MIN_EPOCHS
    return Check(
        f"Accuracy on {len(digits.test_labels)} test images",
        f"{accuracy:.1%}",
        f"over {MIN_ACCURACY:.0%}" if judged else f"needs {MIN_EPOCHS} epochs",
        accuracy > MIN_ACCURACY if judged else None,
    )


def check_replicas(strategy: tf.distribute.Strategy, model: Any) -> Check:
    """Compares the copies of each variable bit for bit."""
    distinct = max(
        len({copy.numpy().tobytes() for copy in strategy.experimental_local_results(weight.value)})
        for weight in model.weights
    )
    equal = "bitwise equal"
    result = equal if distinct == 1 else f"{distinct} different copies"
    subject = f"Weights on {_count(strategy.num_replicas_in_sync)}"
    return Check(subject, result, equal, result == equal)


def check_weights(subject: str, model: Any, alone: Any) -> Check:
    """Compares the weights of two trainings."""
    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    difference = max(float(np.abs(one - other).max()) for one, other in pairs)
    wanted = f"< {MAX_WEIGHT_DIFFERENCE:.0e}"
    return Check(subject, f"{difference:.1e}", wanted, difference < MAX_WEIGHT_DIFFERENCE)


def check_sum(subject: str, names: Sequence[str], ops: tf.distribute.CrossDeviceOps) -> Check:
    """Sums 1, 2 and 3, one on each of three devices."""
    strategy = tf.distribute.MirroredStrategy(names[: len(_SUMMED)], cross_device_ops=ops)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(_SUMMED[context.replica_id_in_sync_group])
    )
    # As in a training step: TensorFlow's `reduce` would sum differently.
    (total,) = ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(values, values)])
    result = " ".join(f"{float(copy):g}" for copy in strategy.experimental_local_results(total))
    wanted = " ".join([f"{sum(_SUMMED):g}"] * len(_SUMMED))
    return Check(subject, result, wanted, result == wanted)


def _count(devices: int) -> str:
    return f"{devices} virtual CPU device" + ("s" if devices > 1 else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4, help="Number of virtual CPU devices.")
    parser.add_argument("--epochs", type=int, default=MIN_EPOCHS, help="Number of epochs.")
    sys.exit(main(**vars(parser.parse_args())))
