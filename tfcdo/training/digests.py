"""Digests of variables: whether all replicas hold the same numbers, without sending them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo.training import diloco

# Odd numbers without pattern, as in hash functions of 64 bits.
_OF_INDEX, _FIRST, _SECOND = (
    int(np.uint64(odd).astype(np.int64))
    for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF = np.int64(32)
_INTEGER_OF_SIZE = {2: tf.int16, 4: tf.int32, 8: tf.int64}
# A wrong setup shows in the first update; the second and third show an optimizer that drifts.
_FIRST_CALLS = 3


class WeightComparison:
    """Compares the weights of a Keras model, and its optimizer's variables, on all replicas."""

    def __init__(self, model: Any) -> None:
        self._strategy = model.distribute_strategy
        variables = [*model.trainable_variables, *getattr(model.optimizer, "variables", ())]
        self._variables = [  # Those of which all replicas hold the same numbers.
            variable
            for variable in variables
            if variable.value.synchronization != tf.VariableSynchronization.ON_READ
            and (variable.value.dtype.is_floating or variable.value.dtype.is_integer)
        ]
        # Between two exchanges, all hosts have the same of the outer loop only.
        states = diloco.states_of(model.optimizer)
        common = [one for state in states for one in state.variables_of_all]
        self._num_of_host = len(self._variables) if states else 0
        self._variables += common
        self._digests = _digests_of(self._strategy, self._variables)

    def difference(self) -> str | None:
        """Returns which variable and replica differ first, and by how much; None if none does."""
        strategy, variables = self._strategy, self._variables
        if strategy.num_replicas_in_sync == 1:
            return None
        with strategy.scope():
            digests = self._digests().numpy()
            expected = np.broadcast_to(digests[0], digests.shape).copy()
            replicas = np.arange(len(digests))
            of_host = replicas - replicas % len(strategy.extended.worker_devices)
            alone = slice(self._num_of_host)
            expected[:, alone] = digests[of_host, alone]
            differing = np.flatnonzero((digests != expected).any(0))
            if not len(differing):
                return None
            at = differing[0]
            first = variables[at]
            replica = int(np.flatnonzero(digests[:, at] != expected[:, at])[0])
            other = int(of_host[replica]) if at < self._num_of_host else 0
            values = strategy.gather(  # This one variable is sent.
                strategy.run(lambda: tf.cast(tf.convert_to_tensor(first), tf.float64)[None]), axis=0
            ).numpy()
        hosts = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
        host = f" (host {replica * hosts // strategy.num_replicas_in_sync})" if hosts > 1 else ""
        return (
            f"replica {replica}{host} holds other numbers of {first.path} than replica {other}, by "
            f"{np.abs(values[replica] - values[other]).max():.3g} at most; of {len(variables)} "
            f"variables {len(differing)} differ somewhere"
        )


def run_checked(
    train_function: Callable[..., Any], model: Any, calls: list[Any], /, *args: Any
) -> Any:
    """Calls a model's train function; its first `calls` also compare all replicas."""
    logs = train_function(*args)
    if len(calls) == _FIRST_CALLS:
        return logs
    # The optimizer has its variables after the first call.
    calls.append(calls[0] if calls else WeightComparison(model))
    difference = calls[0].difference()
    if difference is not None:
        raise RuntimeError(
            f"after execution {len(calls)} of the train step, {difference}. All hosts must start "
            "with the same weights and update them alike; "
            "MultiWorkerMirroredStrategy(check_in_sync=False) turns this check off"
        )
    return logs


def digest(tensor: tf.Tensor) -> tf.Tensor:
    """Makes one int64 of all bits of a tensor of numbers or bools, on its device."""
    # It is equal for equal bits and, but for one chance in 2^64, for no others.
    if tensor.dtype.is_floating:
        tensor = tf.bitcast(tensor, _INTEGER_OF_SIZE[tensor.dtype.size])
    bits = tf.reshape(tf.cast(tensor, tf.int64), [-1])
    # The order counts, and so does how much each element differs: each is stirred with its index.
    stirred = (bits + tf.range(tf.size(bits, tf.int64)) * _OF_INDEX) * _FIRST
    stirred = tf.bitwise.bitwise_xor(stirred, tf.bitwise.right_shift(stirred, _HALF))
    return tf.reduce_sum(stirred * _SECOND)


def _digests_of(strategy: tf.distribute.Strategy, variables: list[Any]) -> Any:
    """Makes a function that returns the digests of all variables on all replicas of all hosts."""

    def on_replica() -> tf.Tensor:
        digests = []
        for variable in variables:
            tensor = tf.convert_to_tensor(variable)
            # A slot that only its owner has is read there, and only the digest is sent.
            with tf.device(tensor.device):
                digests.append(digest(tensor))
        return tf.stack(digests)[None]

    @tf.function(autograph=False)
    def digests() -> tf.Tensor:
        return strategy.gather(strategy.run(on_replica), axis=0)

    return digests
