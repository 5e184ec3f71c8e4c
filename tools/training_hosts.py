"""Runs one training of docs/compat.md as one host of several; `training_runs` starts it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import tensorflow as tf
import training_runs
from compat import first_words
from training_cases import TRAININGS

import tfcdo
from tfcdo import virtual_devices


def main(library: str, devices: str, name: str, folder: str) -> None:
    """Trains in step with the other hosts; the first one writes its results into a folder."""
    (training,) = (one for one in TRAININGS if one.name == name)
    strategy = _strategy(library, int(devices))
    seen: dict[str, Any]
    try:
        _, (weights, reported) = training_runs.train(training, library, strategy)
        seen = {"weights": [weight.tolist() for weight in weights], "reported": reported}
    except Exception as error:
        seen = {"error": f"{type(error).__name__}: {first_words(str(error))}"}
    if strategy.cluster_resolver.task_id == 0:
        pathlib.Path(folder, "seen.json").write_text(json.dumps(seen), encoding="utf-8")


def _strategy(library: str, devices: int) -> tf.distribute.Strategy:
    if library == "tfcdo":
        return tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=devices)
    virtual_devices.configure_virtual_cpus(devices)
    return tf.distribute.MultiWorkerMirroredStrategy()
