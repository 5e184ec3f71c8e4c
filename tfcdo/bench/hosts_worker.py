"""Trains under TensorFlow's and tfcdo's multi-worker strategies: a worker of `bench.hosts`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcdo
from tfcdo import tf_internals
from tfcdo.bench import hosts, worker_pool
from tfcdo.exchange import rounding

_SEED = 7
_LEARNING_RATE = 0.01
_IMAGE = (32, 32, 3)
_PATCH = 8
_CLASSES = 10
# A small vision transformer: with 6 blocks, 7.5 million parameters or 30 MB of gradients.
_WIDTH = 320
_HEADS = 5
# As many however many devices share them, so that the time of computing is much the same.
_IMAGES_PER_WORKER = 12
_LARGEST = 4  # Bound of the numbers whose sums are compared with numpy's; exact in 16 bits.


class _TensorFlowExtended(tf_internals.MultiWorkerExtended):
    """TensorFlow's own implementation; it would use one CPU device of each worker."""

    def __init__(self, strategy: tf.distribute.Strategy, num_devices: int) -> None:
        self._num_devices = num_devices
        super().__init__(
            strategy,
            cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver(),
            communication_options=tf.distribute.experimental.CommunicationOptions(),
        )

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        devices = (f"{worker_device}/device:CPU:{index}" for index in range(self._num_devices))
        return tuple(devices), "CPU"


class _TensorFlowStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` over several CPU devices of each worker."""

    def __init__(self, num_devices: int) -> None:
        # TensorFlow's own __init__ would make its own extended class.
        tf.distribute.Strategy.__init__(self, _TensorFlowExtended(self, num_devices))


class _Training:
    """A model in training under one strategy."""

    def __init__(self, strategy: tf.distribute.Strategy, num_devices: int, num_blocks: int) -> None:
        self._strategy = strategy
        self.num_replicas = strategy.num_replicas_in_sync
        keras.utils.set_random_seed(_SEED)
        with strategy.scope():
            self._model = _build_model(num_blocks)
            self._optimizer = keras.optimizers.SGD(_LEARNING_RATE)
            self._optimizer.build(self._model.trainable_variables)
        images, labels = _draw_batch(self.num_replicas, max(1, _IMAGES_PER_WORKER // num_devices))
        self._batch = [self._distribute(images), self._distribute(labels)]
        self.train = self._make_step(self._update)
        # The gradients are returned: TensorFlow leaves out ops that nothing depends on.
        self.compute = self._make_step(self._gradients)

    @property
    def gradient_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the gradients, in the order of the variables."""
        return [tuple(variable.shape) for variable in self._model.trainable_variables]

    def count_wrong(self, tolerance: float) -> int:
        """All-reduces known values as large as the gradients; counts differences from numpy."""
        addends = [
            [_draw_values(shape, replica) for replica in range(self.num_replicas)]
            for shape in self.gradient_shapes
        ]

        @tf.function(autograph=False)
        def all_reduce(*values: Any) -> Any:
            return self._strategy.run(_sum_over_replicas, args=(list(values),))

        sums = all_reduce(*map(self._distribute, addends))
        return sum(
            int(np.count_nonzero(~(np.abs(component.numpy() - np.sum(own, axis=0)) <= tolerance)))
            for total, own in zip(sums, addends, strict=True)
            for component in self._strategy.experimental_local_results(total)
        )

    def _distribute(self, by_replica: Sequence[np.ndarray]) -> Any:
        """Gives each replica of this worker its own value."""
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(by_replica[context.replica_id_in_sync_group])
        )

    def _make_step(self, replica_step: Callable[..., Any]) -> Callable[[], None]:
        @tf.function(autograph=False)
        def step(images: Any, labels: Any) -> Any:
            results = self._strategy.run(replica_step, args=(images, labels))
            return [
                self._strategy.experimental_local_results(one) for one in tf.nest.flatten(results)
            ]

        def step_and_wait() -> None:
            (losses, *_) = step(*self._batch)
            for loss in losses:
                loss.numpy()

        return step_and_wait

    def _gradients(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            logits = self._model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses) / self.num_replicas
        variables = [variable.value for variable in self._model.trainable_variables]
        return loss, tape.gradient(loss, variables)

    def _update(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, gradients = self._gradients(images, labels)
        self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss


def _sum_over_replicas(values: Sequence[tf.Tensor]) -> Any:
    # Unlike the results of ops, arguments of a function do not tell on which device they are.
    copies = [tf.identity(value) for value in values]
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, copies)


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


def _draw_batch(num_replicas: int, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draws each replica's images and labels, the same in each worker."""
    generator = np.random.default_rng(_SEED)
    images = generator.random((num_replicas, count, *_IMAGE), np.float32)
    labels = generator.integers(0, _CLASSES, (num_replicas, count))
    return list(images), list(labels)


def _draw_values(shape: tuple[int, ...], replica: int) -> np.ndarray:
    """Draws small integers, whose sums are exact."""
    generator = np.random.default_rng((replica, *shape))
    return generator.integers(-_LARGEST, _LARGEST + 1, shape).astype(np.float32)


class _Trainings:
    """The trainings of `tfcdo.bench.hosts`, by name."""

    def __init__(self, num_devices: str, num_blocks: str) -> None:
        devices = int(num_devices)
        # tfcdo's comes first, because it starts the server of this process.
        strategies = {
            "tfcdo": tfcdo.MultiWorkerMirroredStrategy(devices_per_worker=devices),
            **{
                f"tfcdo {wire}": tfcdo.MultiWorkerMirroredStrategy(
                    devices_per_worker=devices, exchange=wire
                )
                for wire in hosts.WIRES
            },
            "tf": _TensorFlowStrategy(devices),
        }
        self._trainings = {
            name: _Training(strategy, devices, int(num_blocks))
            for name, strategy in strategies.items()
        }
        self._steps = {name: training.train for name, training in self._trainings.items()}
        self._steps[hosts.ALONE] = self._trainings["tf"].compute

    def gradient_bytes(self) -> int:
        """Returns the bytes of a replica's gradients."""
        return 4 * sum(map(math.prod, self._trainings["tf"].gradient_shapes))

    def num_wrong(self, name: str) -> int:
        """Counts the elements of an all-reduce that differ from numpy's."""
        tolerance = 0.0
        if name == "tfcdo int8":  # The bound of the error; 16 bits are exact here.
            most = _LARGEST * self._trainings["tf"].num_replicas
            tolerance = 2.01 * rounding.ROUNDOFF["int8"] * most
        return self._trainings[name].count_wrong(tolerance)

    def step(self, name: str) -> float:
        """Takes a step; returns its seconds."""
        start = time.perf_counter()
        self._steps[name]()
        return time.perf_counter() - start


if __name__ == "__main__":
    worker_pool.serve(_Trainings)
