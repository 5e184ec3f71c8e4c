"""`tfcdo demo`: trains a real Keras model on several devices and checks it against one."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.cli import demo_training, demo_workers, options

if TYPE_CHECKING:
    import tensorflow as tf

MIN_ACCURACY = 0.95
# The epochs that it takes to reach that accuracy.
MIN_EPOCHS = 8
# Two correct trainings differ by the rounding of their sums: three units in float32's last place
# were measured here. A device left out of the sums makes it 0.1 and more.
MAX_WEIGHT_DIFFERENCE = 1e-5

_DEVICES = 4
_DEVICES_PER_WORKER = 2
_SUMMED = (1.0, 2.0, 3.0)
_VERDICTS = {True: Text("ok", "green"), False: Text("not ok", "bold red"), None: Text("-")}


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the table: what was checked, the result, and the wanted result."""

    subject: str
    result: str
    wanted: str
    # None if the result is only shown.
    passed: bool | None
    # False for TensorFlow's own sums, which do not fail the demo.
    is_tfcdo: bool = True
    # Explains a result that is only shown.
    note: str = ""


@click.command()
@click.option(
    "--devices",
    type=click.IntRange(1, 16),
    help=f"How many virtual CPU devices to train on, {_DEVICES} by default; with --workers, how "
    f"many each worker has, {_DEVICES_PER_WORKER} by default.",
)
@click.option(
    "--workers",
    "num_workers",
    type=click.IntRange(2, 16),
    help="Number of processes on this host, under tfcdo.MultiWorkerMirroredStrategy.",
)
@click.option(
    "--cross-device-ops",
    "ops_name",
    metavar="NAME",
    default="HierarchicalCopyAllReduce",
    show_default=True,
    help="Which of tfcdo's classes adds up the gradients.",
)
@click.option(
    "--epochs",
    type=click.IntRange(1, 1000),
    default=MIN_EPOCHS,
    show_default=True,
    help="How often to go through the training images.",
)
def demo(devices: int | None, num_workers: int | None, ops_name: str, epochs: int) -> int:
    """Train a model on several devices and check the result.

    A small convolutional network learns handwritten digits on virtual CPU devices, under
    tf.distribute.MirroredStrategy, and once more on one device. The exit status is 1 if a check
    fails. Accuracy counts if there are enough epochs for it.
    """
    importlib.import_module("sklearn")
    if devices is None:
        devices = _DEVICES_PER_WORKER if num_workers else _DEVICES
    console = options.make_console(width_of_a_pipe=120)
    with options.status(console, "Starting TensorFlow ..."), options.quiet_start():
        import tensorflow as tf

        from tfcdo.virtual_devices import configure_virtual_cpus

        device_names = configure_virtual_cpus(max(devices, len(_SUMMED)))
        tf.config.list_logical_devices()
    tf.get_logger().setLevel("ERROR")

    ops_class = demo_training.find_cross_device_ops_class(ops_name)
    digits = demo_training.load_digits()

    if num_workers:
        checks = _check_workers(digits, num_workers, devices, ops_class.__name__, epochs, console)
        _show(checks, console)
        return int(any(_failed(check) for check in checks))

    console.print(f"Training on {_count(devices)} with tfcdo.{ops_class.__name__}", style="bold")
    ops = ops_class()
    strategy = tf.distribute.MirroredStrategy(device_names[:devices], cross_device_ops=ops)
    # Keras's bar redraws its line, which a file or a pipe cannot.
    model = demo_training.train(
        digits, devices, epochs, strategy, "auto" if sys.stdout.isatty() else 2
    )
    shapes = [weight.shape for weight in model.trainable_weights]
    console.print(
        str(ops.explain(shapes, devices=device_names[:devices])), highlight=False, markup=False
    )
    with options.status(console, "The same training on one device, to compare ..."):
        alone = demo_training.train(digits, devices, epochs, tf.distribute.get_strategy(), 0)
        checks = [
            _check_accuracy(model, digits, epochs),
            _check_replicas(strategy, model),
            _check_weights(model, alone),
            *_check_clipping(digits, strategy),
            *_check_sums(device_names[: len(_SUMMED)], ops_class),
        ]
    _show(checks, console)
    return int(any(_failed(check) for check in checks))


def _check_workers(
    digits: demo_training.Digits,
    num_workers: int,
    devices: int,
    ops_name: str,
    epochs: int,
    console: Console,
) -> list[Check]:
    """Trains on several processes and in this one, and compares."""
    import keras
    import tensorflow as tf

    each = f"{num_workers} x {_count(devices)}"
    console.print(f"Training on {num_workers} workers, {each}, with tfcdo.{ops_name}", style="bold")
    with options.status(console, "Training (a minute or two) ..."):
        weights, copies = demo_workers.train_on_workers(num_workers, devices, ops_name, epochs)
    with options.status(console, "The same training on one device, to compare ..."):
        alone = demo_training.train(
            digits, num_workers * devices, epochs, tf.distribute.get_strategy(), 0
        )
    model = keras.models.clone_model(alone)
    model.set_weights(weights)
    return [
        _check_accuracy(model, digits, epochs),
        _check_copies(each, len(copies)),
        _check_weights(model, alone),
    ]


def _check_accuracy(model: Any, digits: demo_training.Digits, epochs: int) -> Check:
    logits = model(digits.test_images, training=False).numpy()
    accuracy = float((logits.argmax(axis=-1) == digits.test_labels).mean())
    judged = epochs >= MIN_EPOCHS
    return Check(
        f"Accuracy on {len(digits.test_labels)} test images",
        f"{accuracy:.1%}",
        f"over {MIN_ACCURACY:.0%}" if judged else f"not judged before {MIN_EPOCHS} epochs",
        accuracy > MIN_ACCURACY if judged else None,
    )


def _check_replicas(strategy: tf.distribute.Strategy, model: Any) -> Check:
    """Compares the copies of each variable bit for bit."""
    distinct = max(
        len({copy.numpy().tobytes() for copy in strategy.experimental_local_results(weight.value)})
        for weight in model.weights
    )
    return _check_copies(_count(strategy.num_replicas_in_sync), distinct)


def _check_copies(devices: str, num_distinct: int) -> Check:
    return Check(
        f"Weights on {devices}",
        "bitwise equal" if num_distinct == 1 else f"{num_distinct} different copies",
        "bitwise equal",
        num_distinct == 1,
    )


def _check_weights(
    model: Any,
    alone: Any,
    subject: str = "Largest weight difference from one-device training",
    is_tfcdo: bool = True,
) -> Check:
    import numpy as np

    difference = max(
        float(np.abs(one - other).max())
        for one, other in zip(model.get_weights(), alone.get_weights())
    )
    return Check(
        subject,
        f"{difference:.1e}",
        f"< {MAX_WEIGHT_DIFFERENCE:.0e}",
        difference < MAX_WEIGHT_DIFFERENCE,
        is_tfcdo,
        note="Keras alone clips on each device, before the sum; and it cannot accumulate.",
    )


def _check_clipping(digits: demo_training.Digits, strategy: tf.distribute.Strategy) -> list[Check]:
    """Clips gradients, with tfcdo's wrapper and without, on several devices and on one."""
    import tensorflow as tf

    from tfcdo.keras import DistributedOptimizer

    one_device = tf.distribute.get_strategy()
    checks = []
    for subject, wrap, accumulation in (
        ("Difference if Keras alone clips", lambda optimizer: optimizer, None),
        ("Difference if tfcdo.keras clips and accumulates", DistributedOptimizer, 2),
    ):
        model, alone = (
            _train_clipped(digits, strategy.num_replicas_in_sync, own, wrap, accumulation)
            for own in (strategy, one_device)
        )
        checks.append(_check_weights(model, alone, subject, wrap is DistributedOptimizer))
    return checks


def _train_clipped(
    digits: demo_training.Digits,
    devices: int,
    strategy: tf.distribute.Strategy,
    wrap: Callable[[Any], Any],
    accumulation: int | None,
) -> Any:
    """Trains one layer for a few steps whose gradients are longer than the limit."""
    import keras

    keras.utils.set_random_seed(demo_training.SEED)
    batch = max(1, round(demo_training.GLOBAL_BATCH / devices)) * devices
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
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(wrap(optimizer), loss)
    size = len(digits.train_images) // batch * batch
    model.fit(
        digits.train_images[:size], digits.train_labels[:size], batch, shuffle=False, verbose=0
    )
    return model


def _check_sums(
    device_names: list[str], ops_class: type[tf.distribute.CrossDeviceOps]
) -> list[Check]:
    """Sums 1, 2 and 3, one on each of three devices, with TensorFlow's class and with tfcdo's."""
    import tensorflow as tf

    expected = [sum(_SUMMED)] * len(_SUMMED)
    checks = []
    for package, ops in (
        ("tf.distribute", tf.distribute.HierarchicalCopyAllReduce()),
        ("tfcdo", ops_class()),
    ):
        strategy = tf.distribute.MirroredStrategy(device_names, cross_device_ops=ops)
        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(_SUMMED[context.replica_id_in_sync_group])
        )
        # As in a training step: TensorFlow's `reduce` would sum differently.
        (total,) = ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(values, values)])
        sums = [float(copy) for copy in strategy.experimental_local_results(total)]
        checks.append(
            Check(
                f"1 + 2 + 3 by {package}.{type(ops).__name__}",
                _spaced(sums),
                _spaced(expected),
                sums == expected,
                is_tfcdo=package == "tfcdo",
                note="TensorFlow's class leaves a device out of an odd number.",
            )
        )
    return checks


def _show(checks: list[Check], console: Console) -> None:
    """Prints tfcdo's checks and the verdict, then Keras and TensorFlow without tfcdo."""
    table = Table("Check", "Result", "Wanted", "")
    for check in checks:
        if check.is_tfcdo:
            table.add_row(check.subject, check.result, check.wanted, _VERDICTS[check.passed])
    console.print()
    console.print(table)
    failed = [check.subject for check in checks if _failed(check)]
    if failed:
        heading = Text("Not as wanted:", "bold red")
        console.print(Text.assemble(heading, " ", "; ".join(failed)))
    else:
        console.print(Text("All checks passed.", "green"))
    others = [check for check in checks if not check.is_tfcdo]
    if others:
        table = Table("Without tfcdo", "Result", "Wanted")
        for check in others:
            table.add_row(check.subject, check.result, check.wanted)
        console.print(table)
        for check in others:
            console.print(check.note)


def _failed(check: Check) -> bool:
    return check.is_tfcdo and check.passed is False


def _count(devices: int) -> str:
    return f"{devices} virtual CPU device" + ("s" if devices > 1 else "")


def _spaced(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
