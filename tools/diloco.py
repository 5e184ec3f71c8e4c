"""Compares hosts that train alone between exchanges with synchronous training, for docs/wire.md.

sudo python tools/diloco.py --hosts 2 --rate 100 --steps 300 --every 50

The hosts are processes of this machine. All of them share one loopback interface of so many
Mbit/s, which nothing else uses. Each training sees the same examples in the same number
of steps, in processes of its own. Handwritten digits are learned by 1.1 million parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo.bench import link
from tfcdo.cli import demo
from tfcdo.exchange import DiLoCo
from tfcdo.launch import cluster

_BATCH_PER_HOST = 32
_WIDTH = 1024
_SECONDS = 3600.0
# The trainings: the strategy's arguments, of the number of steps between exchanges.
_TRAININGS: dict[str, Any] = {
    "synchronous": lambda every: {},
    "synchronous, int8": lambda every: {"exchange": "int8"},
    "DiLoCo": lambda every: {"outer": DiLoCo(every)},
    "DiLoCo, int8": lambda every: {"outer": DiLoCo(every), "exchange": "int8"},
    "DiLoCo, 5 fragments": lambda every: {"outer": DiLoCo(every, fragments=5)},
}


class _Clock(keras.callbacks.Callback):
    """Notes when the first step, which is traced, has ended, and the bytes by then."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not hasattr(self, "begin"):
            self.begin = time.perf_counter(), link.shared_link().count_bytes()


def _work(name: str, every: int, steps: int) -> None:
    """Trains on one host, and prints the results."""
    strategy = tfcdo.MultiWorkerMirroredStrategy(
        devices_per_worker=1, check_in_sync=False, **_TRAININGS[name](every)
    )
    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(2)]
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers, keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-4), loss, metrics=["accuracy"])
    digits = demo.load_digits()
    batch = _BATCH_PER_HOST * strategy.num_replicas_in_sync
    images = digits.train_images.reshape(-1, 8, 8, 1)
    data = tf.data.Dataset.from_tensor_slices((images, digits.train_labels))
    data = data.shuffle(len(images), seed=7).repeat().batch(batch)
    clock = _Clock()
    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[clock])
    seconds, num_bytes = time.perf_counter(), link.shared_link().count_bytes()
    tests = digits.test_images.reshape(-1, 8, 8, 1), digits.test_labels
    parts = tf.data.Dataset.from_tensor_slices(tests).batch(batch)
    test_loss, accuracy = model.evaluate(parts, verbose=0)
    results = {
        "seconds": seconds - clock.begin[0],
        "bytes": num_bytes - clock.begin[1],
        "loss": test_loss,
        "accuracy": accuracy,
        "weights": float(np.sum([np.abs(one).sum() for one in model.get_weights()])),
    }
    print(json.dumps(results), flush=True)


def _measure(name: str, hosts: int, rate: float, every: int, steps: int) -> dict[str, float]:
    """Trains on several hosts; returns the first one's results."""
    with link.open_link(rate) as opened, cluster.reserved_ports(hosts) as addresses:
        command = [*opened.command, sys.executable, __file__, "--worker", name]
        command += ["--every", str(every), "--steps", str(steps)]
        processes = [
            subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "TF_CONFIG": cluster.tf_config(addresses, host),
                    "CUDA_VISIBLE_DEVICES": "",
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(hosts)
        ]
        try:
            outputs = [process.communicate(timeout=_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert len({result["weights"] for result in results}) == 1, results
    first: dict[str, float] = results[0]
    return first


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of all hosts together")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.worker, arguments.every, arguments.steps)
        return
    print("| hosts | training | test loss | accuracy | MB sent | seconds |")
    print("|---|---|---|---|---|---|")
    for hosts in arguments.hosts:
        for name in _TRAININGS:
            found = _measure(
                name, hosts, arguments.rate * 1e6 / 8, arguments.every, arguments.steps
            )
            print(
                f"| {hosts} | {name} | {found['loss']:.4f} | {found['accuracy']:.2%} "
                f"| {found['bytes'] / 1e6:.1f} | {found['seconds']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
