"""Compares exchanges between hosts by loss, bytes and time, for docs/performance.md.

    sudo python tools/exchanges.py

The hosts are processes of this machine that share a loopback interface, which nothing else uses.
Each training sees the same examples in the same order, in processes of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pages
import tensorflow as tf
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import tfcdo
from tfcdo.bench.hosts import Loopback, open_link, start_hosts
from tfcdo.exchange import DiLoCo, PowerSGD, TopK

_EVERY = 50
_STEPS_PER_POINT = 10
_TESTS = 297
# The strategy's arguments, by the name of a training.
TRAININGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"exchange": "bfloat16"},
    "int8": {"exchange": "int8"},
    "PowerSGD(4)": {"exchange": PowerSGD(4)},
    "TopK(0.01)": {"exchange": TopK(0.01)},
    f"DiLoCo({_EVERY})": {"outer": DiLoCo(_EVERY)},
    f"DiLoCo({_EVERY}), int8": {"outer": DiLoCo(_EVERY), "exchange": "int8"},
    f"DiLoCo({_EVERY}, fragments=5)": {"outer": DiLoCo(_EVERY, fragments=5)},
}
_ON_FOUR_HOSTS = ("float32", "int8", *(name for name in TRAININGS if name.startswith("DiLoCo")))


def convolutional() -> keras.Model:
    """Builds a network of 0.6 million parameters."""
    convolutions = [keras.layers.Conv2D(n, 3, padding="same", activation="relu") for n in (64, 128)]
    dense = keras.layers.Dense(256, activation="relu")
    ends = [keras.layers.MaxPooling2D(), keras.layers.Flatten(), dense, keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *convolutions, *ends])


def transformer() -> keras.Model:
    """Builds two blocks of attention over an image's rows, of 0.4 million parameters."""
    image = keras.Input((8, 8, 1))
    rows = keras.layers.Dense(128)(keras.layers.Reshape((8, 8))(image))
    places = keras.layers.Embedding(8, 128)(keras.ops.arange(8))
    values = rows + places
    for _ in range(2):
        normal = keras.layers.LayerNormalization()(values)
        values = values + keras.layers.MultiHeadAttention(4, 32)(normal, normal)
        hidden = keras.layers.Dense(512, "gelu")(keras.layers.LayerNormalization()(values))
        values = values + keras.layers.Dense(128)(hidden)
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(values))
    return keras.Model(image, keras.layers.Dense(10)(mean))


_MODELS = {"convolutional": convolutional, "transformer": transformer}


def run(model_name: str, training: str, steps: int) -> dict[str, Any]:
    """Trains on one host, in a process of its own."""
    options = {"devices_per_worker": 1, "check_in_sync": False, **TRAININGS[training]}
    strategy = tfcdo.MultiWorkerMirroredStrategy(**options)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = _MODELS[model_name]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
    batch = 32 * strategy.num_replicas_in_sync
    data = tf.data.Dataset.from_tensor_slices((images[_TESTS:], labels[_TESTS:]))
    data = data.shuffle(len(images), seed=7).repeat().batch(batch)
    ends: list[tuple[float, int]] = []  # Times and bytes.

    def end_step(batch: int, logs: Any) -> None:
        ends.append((time.perf_counter(), Loopback().count_bytes()))

    history = model.fit(
        data,
        epochs=steps // _STEPS_PER_POINT,
        steps_per_epoch=_STEPS_PER_POINT,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end_step)],
    )
    num_bytes = Loopback().count_bytes() - ends[0][1]  # The first step is traced.
    tests = tf.data.Dataset.from_tensor_slices((images[:_TESTS], labels[:_TESTS])).batch(batch)
    return {
        "seconds": (ends[-1][0] - ends[0][0]) / (steps - 1),
        "bytes": num_bytes / (steps - 1),
        "losses": history.history["loss"],
        "accuracy": model.evaluate(tests, verbose=0)[1],
        "weights": float(np.sum([np.abs(one).sum() for one in model.get_weights()])),
    }


def _measure(
    model: str, training: str, hosts: int = 2, rate: float = 1000, steps: int = 300
) -> dict[str, Any]:
    """Trains on several hosts that share a link of so many Mbit/s; returns the first's results."""
    program = pages.__file__, "exchanges"
    with open_link(rate * 1e6 / 8) as link, start_hosts(link, hosts, *program) as pool:
        results = pool.call("run", 1200.0, model_name=model, training=training, steps=steps)
    assert len({result["weights"] for result in results}) == 1, results
    return dict(results[0])


def _draw(found: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws the losses of trainings over the steps, and their bytes and times."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, bars, times = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    for name, result in found.items():
        losses = result["losses"]
        steps = np.arange(1, len(losses) + 1) * _STEPS_PER_POINT
        style = {"linewidth": 4, "alpha": 0.3, "color": "black"} if name == "float32" else {}
        (line,) = curves.semilogy(steps, losses, label=name, **style)
        bars.barh(name, result["bytes"] * 1e-6, color=line.get_color(), alpha=0.6)
        times.barh(name, result["slow seconds"] * 1e3, color=line.get_color(), alpha=0.6)
    curves.set(xlabel="step", ylabel="training loss", title="A transformer on two hosts")
    curves.legend(fontsize="small")
    bars.set(xlabel="MB per step", xscale="log")
    times.set(xlabel="ms per step at 100 Mbit/s", xscale="log", yticklabels=[])
    bars.invert_yaxis()
    times.invert_yaxis()
    return figure


def _two() -> Iterator[Sequence[str]]:
    """Yields the cells of each training's row; draws the transformer's."""
    for model in _MODELS:
        found = {}
        for name in TRAININGS:
            # Only the time is measured at the lower rate, of a multiple of `_EVERY` steps.
            slow = _measure(model, name, rate=100, steps=100)["seconds"]
            found[name] = {**_measure(model, name), "slow seconds": slow}
            yield [model, *_cells(name, found[name]), f"{slow * 1e3:.1f}"]
    _draw(found).savefig(pages.ROOT / "docs" / "exchanges.png", dpi=100)


def _cells(name: str, result: Mapping[str, Any]) -> list[str]:
    loss, megabytes = f"{result['losses'][-1]:.4f}", f"{result['bytes'] / 1e6:.3f}"
    milliseconds = f"{result['seconds'] * 1e3:.1f}"
    return [f"`{name}`", loss, f"{result['accuracy']:.1%}", megabytes, milliseconds]


if __name__ == "__main__":
    heading = "exchange | loss | accuracy | MB per step"
    two = f"model | {heading}, both hosts | ms at 1 Gbit/s | ms at 100 Mbit/s"
    page = "docs/performance.md"
    pages.replace(page, "exchanges.py, two hosts", pages.table(two, _two(), 5))
    rows = (_cells(one, _measure("convolutional", one, 4, 100)) for one in _ON_FOUR_HOSTS)
    four = pages.table(f"{heading}, all hosts | ms", rows, 4)
    pages.replace(page, "exchanges.py, four hosts", four)
