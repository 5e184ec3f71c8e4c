"""Runs the trainings of docs/compat.md with one library, and prints a row for each; JSON.

python tools/training_runs.py tfcdo 0
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from compat import first_words
from training_cases import BATCH, TRAININGS, Training

import tfcdo
from tfcdo.keras import DistributedOptimizer, SynchronizeStatistics, weight_by_examples

COUNTS = (2, 3, 5)
Row = dict[str, str]
# Weights and reported numbers of a training; or how much two trainings differ in each.
Seen = tuple[list[np.ndarray], list[float]]
Differences = tuple[float, float]


def differences(training: Training, library: str, count: int) -> Differences | str:
    """Trains on several replicas and compares with one device.

    Args:
      training: the training.
      library: "TensorFlow" or "tfcdo".
      count: the number of replicas.

    Returns:
      The largest difference of weights and of reported numbers, or an error.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, seen = _train(training, library, count)
            if training.saved_only:
                path = pathlib.Path(folder) / "model.keras"
                model.save(path)
                loaded = keras.models.load_model(path)
                inside, outside = (_evaluate(training, one) for one in (model, loaded))
                return _largest((seen[0], inside), (loaded.get_weights(), outside))
            return _largest(seen, _on_one_device(training))
    except Exception as error:
        return f"{type(error).__name__}: {first_words(str(error))}"


@functools.lru_cache(maxsize=1)
def _on_one_device(training: Training) -> Seen:
    return _train(training, "one device", 1)[1]


def _train(training: Training, library: str, count: int) -> tuple[keras.Model, Seen]:
    keras.utils.set_random_seed(1)
    with _strategy(library, count).scope():
        optimizer = training.optimizer()
        if library == "tfcdo":
            optimizer = DistributedOptimizer(optimizer)
        model = training.build()
        arguments = {"loss": "mse", "metrics": list(training.metrics), **training.compile}
        model.compile(optimizer, auto_scale_loss=False, **arguments)
    if training.weighted and library == "tfcdo":
        weight_by_examples(model)
    inputs, targets, *weights = training.data()
    history = model.fit(
        inputs,
        targets,
        BATCH,
        epochs=2,
        sample_weight=weights[0] if weights else None,
        shuffle=False,
        verbose=0,
        callbacks=[SynchronizeStatistics()] if library == "tfcdo" else [],
        **training.fit,
    ).history
    reported = [number for name in sorted(history) for number in history[name]]
    if training.evaluate_batch:
        reported += _evaluate(training, model)
    return model, (model.get_weights(), reported)


def _strategy(library: str, count: int) -> tf.distribute.Strategy:
    devices = tu.device_names(count)
    if library == "tfcdo":
        return tfcdo.MirroredStrategy(devices, tfcdo.HierarchicalCopyAllReduce())
    if library == "TensorFlow":
        return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    return tf.distribute.get_strategy()


def _evaluate(training: Training, model: keras.Model) -> list[float]:
    inputs, targets, *_ = training.data()
    return model.evaluate(inputs, targets, training.evaluate_batch, verbose=0)


def _largest(one: Seen, other: Seen) -> Differences:
    weights = max(float(np.abs(a - b).max()) for a, b in zip(one[0], other[0], strict=True))
    reported = max(abs(a - b) / max(1, abs(b)) for a, b in zip(one[1], other[1], strict=True))
    return weights, reported


def judge(training: Any, differences: Mapping[int, Any]) -> Row:
    """Makes a cell of what was seen.

    Args:
      training: the training.
      differences: by the number of replicas, the differences of weights and of reported numbers, or
        an error's text.

    Returns:
      The row's name, mark and text.
    """
    errors = {count: text for count, text in differences.items() if isinstance(text, str)}
    if errors:
        where = "" if len(errors) == len(differences) else f" ({_listed(errors)} replicas)"
        text, mark = f"{next(iter(errors.values()))}{where}", "✗"
    else:
        weights, reported = (max(pair[part] for pair in differences.values()) for part in (0, 1))
        equal = weights <= training.tolerance and reported <= training.tolerance
        text, mark = f"{_short(weights)}, {_short(reported)}", "✓" if equal else "✗"
    if mark == "✗" and training.reason:
        text, mark = f"{text}: {training.reason}", "~"
    return {"name": training.name, "mark": mark, "text": text}


def _short(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def _listed(counts: Sequence[int] | Mapping[int, Any]) -> str:
    return " and ".join(map(str, counts))


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--names":
        for training in TRAININGS:
            print(json.dumps({"name": training.name}))
        return
    library, first = arguments[0], int(arguments[1])
    for training in TRAININGS[first:]:
        seen = {count: differences(training, library, count) for count in COUNTS}
        print(json.dumps(judge(training, seen)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
