"""Trains on several processes of this host, under TensorFlow's strategy and tfcdo's in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo import tf_internals, virtual_devices
from tfcdo.bench import results, worker_pool
from tfcdo.bench.results import ALONE
from tfcdo.cluster.config import reserved_ports, tf_config

_WIRES = ("bfloat16", "int8")
# Seconds for a step; tracing its graph takes a minute on a busy machine.
_TIMEOUT = 900.0

# How long a packet may wait at the limit: long enough that TCP keeps the link full.
_QUEUE_SECONDS = 0.4
# The kernel lets packets of up to 64 KiB through a loopback interface, and gives them their turn
# in ticks of up to 4 ms: the bucket must hold more than a packet, and more than a tick's bytes.
_MIN_BURST = 256 * 1024
_TICK = 0.004

_SEED = 7
_IMAGE = (32, 32, 3)
_PATCH = 8
_CLASSES = 10
# A small vision transformer: with 6 blocks, 7.5 million parameters or 30 MB of gradients.
_WIDTH = 320
_HEADS = 5
# For all devices together, at least one each: computing takes much the same time on any number.
_IMAGES_PER_WORKER = 12


def run(
    opened: Loopback,
    num_workers: int,
    num_devices: int,
    iterations: int,
    warmup: int,
    track: results.Track,
    num_blocks: int = 6,
) -> list[results.Measurement]:
    """Trains a model on the same data under each strategy, a step of each in turn."""
    names = {
        "tfcdo": "tfcdo.MultiWorkerMirroredStrategy",
        **{f"tfcdo {wire}": f"the same, exchange={wire!r}" for wire in _WIRES},
        "tf": "tf.distribute.MultiWorkerMirroredStrategy",
        ALONE: ALONE,
    }
    # A file, not -m, which would import files of the current folder.
    program = __file__, str(num_devices), str(num_blocks)
    with start_hosts(opened, num_workers, *program) as pool:
        gradient_bytes, *_ = pool.call("gradient_bytes", _TIMEOUT)

        def step(kind: str) -> tuple[float, int]:
            before = opened.count_bytes()
            # A step ends when the slowest worker's does.
            seconds = max(pool.call("step", _TIMEOUT, name=kind))
            return seconds, opened.count_bytes() - before

        steps = {kind: functools.partial(step, kind) for kind in names}
        taken = results.take_turns(steps, iterations, warmup, track)
    return [
        results.Measurement(
            name,
            kind,
            num_devices,
            *results.median_and_spread([seconds for seconds, _ in taken[kind]]),
            size=gradient_bytes,
            # A machine that stalls sends some again.
            bytes_sent=float(np.median([sent for _, sent in taken[kind]])),
        )
        for kind, name in names.items()
    ]


class LinkError(RuntimeError):
    """Says why a link cannot be had here, with the remedy."""


@dataclasses.dataclass(frozen=True)
class Loopback:
    """A loopback interface; by default the machine's own, which other programs also use."""

    # The words before a program's command that start it on this link.
    command: tuple[str, ...] = ()
    # The file that counts the bytes that have crossed it.
    counters: pathlib.Path = pathlib.Path("/proc/net/dev")

    def count_bytes(self) -> int:
        """Returns how many bytes have crossed the link, in both directions, with all headers."""
        # The first column counts the bytes received: on a loopback, all bytes sent.
        (count,) = re.findall(r"^ *lo: *(\d+)", self.counters.read_text(), re.MULTILINE)
        return int(count)


@contextlib.contextmanager
def open_link(rate: float | None) -> Iterator[Loopback]:
    """Opens a loopback interface of its own, with at most `rate` bytes per second."""
    for program in ("unshare", "nsenter", "ip", *(["tc"] if rate else [])):
        if shutil.which(program) is None:
            raise LinkError(f"{program} is not installed: it comes with util-linux or iproute2")
    make, enter = ["unshare", "--net"], ["nsenter", "--net"]
    if os.geteuid():
        make, enter = [*make, "--map-root-user"], [*enter, "--user", "--preserve-credentials"]
    script = ["ip link set lo up"]
    if rate:
        burst = max(_MIN_BURST, round(rate * _TICK))
        # To tc, bps are bytes per second.
        limit = f"rate {round(rate)}bps burst {burst} latency {round(_QUEUE_SECONDS * 1000)}ms"
        script.append(f"tc qdisc add dev lo root tbf {limit}")
    # A program that holds the namespace until its standard input is closed.
    script += ["echo ready", "exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*make, "sh", "-c", " && ".join(script)], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as holder:
        assert holder.stdout and holder.stderr
        try:
            if holder.stdout.readline() != "ready\n":
                reason = holder.stderr.read().strip() or "it ended"
                raise LinkError(
                    f"a network namespace of its own is refused ({reason}): run it as root, or "
                    "where users may make namespaces and shape their interfaces"
                )
            counters = pathlib.Path(f"/proc/{holder.pid}/net/dev")
            yield Loopback((*enter, "--target", str(holder.pid)), counters)
        finally:
            holder.kill()


@contextlib.contextmanager
def start_hosts(link: Loopback, count: int, *arguments: str) -> Iterator[worker_pool.WorkerPool]:
    """Starts Python with the same arguments for each host of a TF_CONFIG, without GPUs."""
    command = [*link.command, sys.executable, *arguments]
    quiet = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with reserved_ports(count) as addresses:
        variables = [{**quiet, "TF_CONFIG": tf_config(addresses, i)} for i in range(count)]
        with worker_pool.start_workers(command, variables) as pool:
            yield pool


class _TensorFlowExtended(tf_internals.MultiWorkerExtended):
    """TensorFlow's own implementation; it would use one CPU device of each worker."""

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        kind, count = virtual_devices.devices_here(cluster_resolver)
        return tuple(f"{worker_device}/device:{kind}:{index}" for index in range(count)), kind


class _TensorFlowStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` over several CPU devices of each worker."""

    def __init__(self) -> None:
        extended = _TensorFlowExtended(
            self,
            cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver(),
            communication_options=tf.distribute.experimental.CommunicationOptions(),
        )
        # TensorFlow's own __init__ would make its own extended class.
        tf.distribute.Strategy.__init__(self, extended)


class _Training:
    """A model in training under one strategy."""

    def __init__(self, strategy: tf.distribute.Strategy, num_devices: int, num_blocks: int) -> None:
        self._strategy = strategy
        keras.utils.set_random_seed(_SEED)
        with strategy.scope():
            self._model = _build_model(num_blocks)
            self._optimizer = keras.optimizers.SGD(0.01)
            self._optimizer.build(self._model.trainable_variables)
        # The same in each worker.
        generator = np.random.default_rng(_SEED)
        shape = strategy.num_replicas_in_sync, max(1, _IMAGES_PER_WORKER // num_devices)
        images = generator.random((*shape, *_IMAGE), np.float32)
        labels = generator.integers(0, _CLASSES, shape)
        self._batch = [self._distribute(images), self._distribute(labels)]
        self.gradient_bytes: int = 4 * self._model.count_params()

    def _distribute(self, by_replica: np.ndarray) -> Any:
        """Gives each replica of this worker its own value."""
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(by_replica[context.replica_id_in_sync_group])
        )

    def step(self, updates: bool) -> float:
        """Takes a step, or only computes its gradients; returns the seconds until its end."""
        start = time.perf_counter()
        losses, *_ = self._step(updates, *self._batch)
        for loss in losses:
            loss.numpy()
        return time.perf_counter() - start

    @tf.function(autograph=False)
    def _step(self, updates: bool, images: Any, labels: Any) -> Any:
        # The gradients are returned: TensorFlow leaves out ops that nothing depends on.
        replica_step = self._update if updates else self._gradients
        returned = self._strategy.run(replica_step, args=(images, labels))
        return [self._strategy.experimental_local_results(one) for one in tf.nest.flatten(returned)]

    def _gradients(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            logits = self._model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses) / self._strategy.num_replicas_in_sync
        variables = [variable.value for variable in self._model.trainable_variables]
        return loss, tape.gradient(loss, variables)

    def _update(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, gradients = self._gradients(images, labels)
        self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss


def _build_model(num_blocks: int) -> keras.Model:
    """Builds a vision transformer."""
    images = keras.layers.Input(_IMAGE)
    x = keras.layers.Conv2D(_WIDTH, _PATCH, strides=_PATCH)(images)
    x = keras.layers.Reshape((-1, _WIDTH))(x)
    for _ in range(num_blocks):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(y, y)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * _WIDTH, activation="gelu")(y)
        x = x + keras.layers.Dense(_WIDTH)(y)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(images, keras.layers.Dense(_CLASSES)(x))


class _Trainings:
    """The trainings of one worker, by name."""

    def __init__(self, num_devices: str, num_blocks: str) -> None:
        devices = int(num_devices)
        ours = functools.partial(tfcdo.MultiWorkerMirroredStrategy, devices_per_worker=devices)
        # tfcdo's comes first, because it starts the server of this process.
        strategies = {
            "tfcdo": ours(),
            **{f"tfcdo {wire}": ours(exchange=wire) for wire in _WIRES},
            "tf": _TensorFlowStrategy(),
        }
        self._trainings = {
            name: _Training(strategy, devices, int(num_blocks))
            for name, strategy in strategies.items()
        }

    def gradient_bytes(self) -> int:
        """Returns the bytes of a replica's gradients."""
        return self._trainings["tf"].gradient_bytes

    def step(self, name: str) -> float:
        """Takes a step; returns its seconds."""
        training = self._trainings["tf" if name == ALONE else name]
        return training.step(updates=name != ALONE)


if __name__ == "__main__":  # It is one of the processes.
    worker_pool.serve(_Trainings)
