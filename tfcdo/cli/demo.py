"""`tfcdo demo`: trains a real Keras model on several devices and checks it against one."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.cli import options

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

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
    "Keras alone clips on each device, before the sum; and it cannot accumulate. TensorFlow's "
    "class leaves a device out of an odd number."
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
    """One line of a table: what was checked, the result, and the wanted result."""

    subject: str
    result: str
    wanted: str
    # None if the result is only shown.
    passed: bool | None


@click.command()
@options.number("--devices", least=1, most=16, default=4, text="Number of virtual CPU devices.")
@options.number("--epochs", least=1, most=1000, default=MIN_EPOCHS, text="Number of epochs.")
def demo(devices: int, epochs: int) -> int:
    """Train a model on several devices and check the result.

    A small convolutional network learns handwritten digits on virtual CPU devices, under
    tfcdo.MirroredStrategy, and once more on one device. The exit status is 1 if a check fails.
    Accuracy counts if there are enough epochs for it.
    """
    importlib.import_module("sklearn")
    console = options.make_console(width_of_a_pipe=120)
    with options.status(console, "Starting TensorFlow ..."), options.quiet_start():
        import tensorflow as tf

        import tfcdo
        from tfcdo.keras import DistributedOptimizer
        from tfcdo.virtual_devices import configure_virtual_cpus

        names = configure_virtual_cpus(max(devices, len(_SUMMED)))
        tf.config.list_logical_devices()
    tf.get_logger().setLevel("ERROR")
    digits = load_digits()
    console.print(f"Training on {_count(devices)} with tfcdo.MirroredStrategy", style="bold")
    strategy = tfcdo.MirroredStrategy(names[:devices])
    # Keras's bar redraws its line, which a file or a pipe cannot.
    model = train(digits, devices, epochs, strategy, "auto" if sys.stdout.isatty() else 2)
    console.print(str(strategy.explain([weight.shape for weight in model.trainable_weights])))
    with options.status(console, "The same training on one device, to compare ..."):
        alone = train(digits, devices, epochs, tf.distribute.get_strategy(), 0)
        ours, theirs = tfcdo.HierarchicalCopyAllReduce(), tf.distribute.HierarchicalCopyAllReduce()
        checks = [
            check_accuracy(model, digits, epochs),
            check_replicas(strategy, model),
            check_weights("Largest weight difference from one-device training", model, alone),
            _check_clipping("Clipping and accumulating by tfcdo", digits, strategy,
                            DistributedOptimizer, accumulation=2),
            check_sum("1 + 2 + 3 by tfcdo's copies", names, ours),
        ]  # fmt: skip
        others = [
            _check_clipping("Clipping by Keras alone", digits, strategy, lambda made: made),
            check_sum("1 + 2 + 3 by TensorFlow's copies", names, theirs),
        ]
    failed = [check.subject for check in checks if check.passed is False]
    table = Table("Check", "Result", "Wanted", "")
    for check in checks:
        table.add_row(check.subject, check.result, check.wanted, _VERDICTS[check.passed])
    console.print()
    console.print(table)
    if failed:
        console.print(Text("Not as wanted: " + "; ".join(failed), "bold red"))
    else:
        console.print(Text("All checks passed.", "green"))
    _show_others(others, console)
    return int(bool(failed))


def load_digits() -> Digits:
    """Loads, shuffles and splits the images."""
    import numpy as np
    from sklearn import datasets

    flat_images, labels = datasets.load_digits(return_X_y=True)
    images = (flat_images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(SEED).permutation(len(images))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def train(
    digits: Digits, devices: int, epochs: int, strategy: tf.distribute.Strategy, verbose: str | int
) -> Any:
    """Trains a new model: always the same first weights, and the same batches in the same order."""
    import keras

    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input(digits.train_images.shape[1:]),
                keras.layers.Conv2D(16, 3, padding="same", activation="tanh"),
                keras.layers.Conv2D(32, 3, strides=2, activation="tanh"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        # Smooth from end to end: relu's kink, or Adam's division by the size of a gradient, would
        # now and then make a large difference of a rounding.
        _compile(model, keras.optimizers.SGD(0.1, momentum=0.9))
    _fit(model, digits, devices, epochs, verbose)
    return model


def _train_clipped(
    digits: Digits,
    devices: int,
    strategy: tf.distribute.Strategy,
    wrap: Callable[[Any], Any],
    accumulation: int | None,
) -> Any:
    """Trains one layer for a few steps whose gradients are longer than the limit."""
    import keras

    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input(digits.train_images.shape[1:]),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.SGD(
            1.0, global_clipnorm=0.1, gradient_accumulation_steps=accumulation
        )
        _compile(model, wrap(optimizer))
    _fit(model, digits, devices, 1, 0)
    return model


def _compile(model: Any, optimizer: Any) -> None:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])


def _fit(model: Any, digits: Digits, devices: int, epochs: int, verbose: str | int) -> None:
    import tensorflow as tf

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


def check_accuracy(model: Any, digits: Digits, epochs: int) -> Check:
    """Checks the accuracy on the test images, if there are epochs enough."""
    logits = model(digits.test_images, training=False).numpy()
    accuracy = float((logits.argmax(axis=-1) == digits.test_labels).mean())
    judged = epochs >= MIN_EPOCHS
    return Check(
        f"Accuracy on {len(digits.test_labels)} test images",
        f"{accuracy:.1%}",
        f"over {MIN_ACCURACY:.0%}" if judged else f"not judged before {MIN_EPOCHS} epochs",
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
    import numpy as np

    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    difference = max(float(np.abs(one - other).max()) for one, other in pairs)
    wanted = f"< {MAX_WEIGHT_DIFFERENCE:.0e}"
    return Check(subject, f"{difference:.1e}", wanted, difference < MAX_WEIGHT_DIFFERENCE)


def _check_clipping(
    subject: str,
    digits: Digits,
    strategy: tf.distribute.Strategy,
    wrap: Callable[[Any], Any],
    accumulation: int | None = None,
) -> Check:
    """Compares a training on several devices that clips its gradients with one on one device."""
    import tensorflow as tf

    devices = strategy.num_replicas_in_sync
    model, alone = (
        _train_clipped(digits, devices, used, wrap, accumulation)
        for used in (strategy, tf.distribute.get_strategy())
    )
    return check_weights(subject, model, alone)


def check_sum(subject: str, names: Sequence[str], ops: tf.distribute.CrossDeviceOps) -> Check:
    """Sums 1, 2 and 3, one on each of three devices."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(names[: len(_SUMMED)], cross_device_ops=ops)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(_SUMMED[context.replica_id_in_sync_group])
    )
    # As in a training step: TensorFlow's `reduce` would sum differently.
    (total,) = ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(values, values)])
    result = " ".join(f"{float(copy):g}" for copy in strategy.experimental_local_results(total))
    wanted = " ".join([f"{sum(_SUMMED):g}"] * len(_SUMMED))
    return Check(subject, result, wanted, result == wanted)


def _show_others(others: Sequence[Check], console: Console) -> None:
    table = Table("Without tfcdo", "Result", "Wanted")
    for check in others:
        table.add_row(check.subject, check.result, check.wanted)
    console.print(table)
    console.print(_WITHOUT_TFCDO)


def _count(devices: int) -> str:
    return f"{devices} virtual CPU device" + ("s" if devices > 1 else "")
