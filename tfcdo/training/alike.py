"""What hosts must have alike: calls of `fit`, models, the order of data, and all weights."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcdo import keras_internals, tf_internals
from tfcdo.cluster import session
from tfcdo.exchange.rounding import ROUNDOFF
from tfcdo.execute import device_ops
from tfcdo.training import diloco, parts, step

Function = Callable[..., Any]
# The attribute of a dataset whose order follows a seed that only the hosts of now know.
OF_PROCESSES = "_tfcdo_of_processes"
# Odd numbers without pattern, as in hash functions of 64 bits.
_OF_INDEX, _FIRST, _SECOND = (
    int(np.uint64(odd).astype(np.int64))
    for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF = np.int64(32)
_INTEGER_OF_SIZE = {2: tf.int16, 4: tf.int32, 8: tf.int64}
# Arguments of `fit`, `evaluate` and `predict` by which hosts take steps.
_OF_STEPS = (
    *("batch_size", "epochs", "initial_epoch", "steps", "steps_per_epoch"),
    *("validation_batch_size", "validation_freq", "validation_split", "validation_steps"),
)
_OF_COMPILE = ("loss_weights", "metrics", "weighted_metrics", "loss")
# An incorrect setup shows in the first update; the next two show an optimizer that drifts.
_FIRST_CALLS = 3
# Parts of a variable's size by which replicas may differ: 64 roundings in 32 bits, as unlike
# processors add up a norm in other orders; where rows are added, which each device does in an order
# of its own; and what these grow to in a training of any length.
_OF_NORMS, _OF_ROWS, _DRIFT = 64 * 2.0**-24, 1e-4, 1e-2


def of_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns what the arguments of `fit` and the like must have alike on all hosts."""
    known: dict[str, Any] = {name: str(arguments[name]) for name in _OF_STEPS if name in arguments}
    known["class_weight"] = str(sorted((arguments.get("class_weight") or {}).items()))
    x = arguments.get("x")
    known["batches of x"] = str(x.num_batches if isinstance(x, keras.utils.PyDataset) else None)
    if isinstance(x, tf.data.Dataset):
        known["tensors of x"] = [type(spec).__name__ for spec in tf.nest.flatten(x.element_spec)]
    for name in ("x", "y", "sample_weight"):
        values = tf.nest.flatten(arguments.get(name))
        known[f"shapes of {name}"] = str([getattr(one, "shape", None) for one in values])
    return known


def of_model(model: Any) -> dict[str, Any]:
    """Returns what a model, and its `compile`, must have alike on all hosts."""
    # A model that only predicts may not be compiled.
    optimizer = getattr(model, "optimizer", None)
    compiled = keras_internals.compiled_with(model)
    parts_of = {
        "optimizer": keras_internals.leaves(optimizer),
        **{name: tf.nest.flatten(compiled.get(name)) for name in _OF_COMPILE},
        "layers": keras_internals.layers_of(model),
    }
    return {
        **{name: [*map(keras_internals.settings_of, ones)] for name, ones in parts_of.items()},
        **{name: str(getattr(model, name)) for name in ("steps_per_execution", "run_eagerly")},
        # Of a `LossScaleOptimizer`, which is not among its leaves; its first scale is the chief's.
        "dynamic_growth_steps": str(getattr(optimizer, "dynamic_growth_steps", None)),
        "trainable_weights": [str(weight.shape) for weight in model.trainable_weights],
    }


def shuffled(
    own: Function, dataset: Any, buffer_size: Any, seed: Any = None, *args: Any, **kwargs: Any
) -> tf.data.Dataset:
    """Stands for `Dataset.shuffle`: without a seed, all hosts have the same one."""
    kind = f"shuffle of {dataset.element_spec}"
    common = _common_seed(session.current(), kind) if seed is None else None
    if common is None:
        return own(dataset, buffer_size, seed, *args, **kwargs)
    made = own(dataset, buffer_size, common, *args, **kwargs)
    setattr(made, OF_PROCESSES, True)
    return made


def cached(own: Function, dataset: Any, filename: Any = "", name: Any = None) -> tf.data.Dataset:
    """Stands for `Dataset.cache`: hosts with one path for a file each write one of their own."""
    joined = session.current()
    if isinstance(filename, str) and filename and joined and not joined.cluster.is_chief:
        filename += f".host{joined.cluster.index}"
    return own(dataset, filename, name)


def draw_as_chief(joined: session.Session) -> None:
    """Gives Python's and NumPy's generators the chief's states: without seeds, hosts draw alike."""

    def states() -> str:
        return json.dumps([random.getstate(), np.random.get_state()], default=np.ndarray.tolist)

    text = joined.text_of_chief({"what": "state of random generators"}, states)
    (version, words, gauss), of_numpy = json.loads(text)
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(of_numpy)


def of_arrays(own: Function, adapter: Any) -> tf.data.Dataset:
    """Stands for `get_tf_dataset` of arrays: without a seed, all hosts have the same order."""
    is_shuffled = keras_internals.is_shuffled(adapter)
    seed = _common_seed(step.now.session, "the order of arrays") if is_shuffled else None
    if seed is None:
        return own(adapter)
    with tf_internals.plain_variables("/cpu:0"):
        epoch = tf.Variable(0, dtype=tf.int64)
    with step.during(order=(seed, epoch)):
        dataset = own(adapter)
    setattr(dataset, parts.SEEDS, [seed])
    return dataset


def permuted(own: Function, value: Any, seed: Any = None, name: Any = None) -> tf.Tensor:
    """Stands for `tf.random.shuffle`, by which Keras orders arrays, in each epoch anew."""
    if step.now.order is None:
        return own(value, seed, name)
    first, epoch = step.now.order
    return tf.random.experimental.stateless_shuffle(value, [first, epoch.assign_add(1)])


def _common_seed(joined: session.Session | None, kind: str) -> int | None:
    """Returns a seed that all hosts have; None on one host, and where a program has set one."""
    if joined is None or tf_internals.has_global_seed():
        return None
    tf.compat.v1.get_seed(None)  # Raises TensorFlow's error if ops must be deterministic.
    return joined.seed(kind)


class WeightComparison:
    """Compares the weights of a Keras model, and its optimizer's variables, on all replicas."""

    def __init__(self, model: Any, trains: bool) -> None:
        self._strategy = model.distribute_strategy
        made = (one for one in model.variables if keras_internals.value_of(one).trainable)
        slots = keras_internals.variables_of_optimizers(model) if trains else []
        self._variables = [  # All replicas hold the same numbers of these, also of frozen ones.
            variable
            for variable in [*made, *slots]
            if variable.value.synchronization != tf.VariableSynchronization.ON_READ
            and (variable.value.dtype.is_floating or variable.value.dtype.is_integer)
        ]
        # Between two exchanges, all hosts have the same of the outer loop only.
        states = diloco.states_of_model(model)
        common = [one for state in states for one in state.variables_of_all]
        self._num_of_host = len(self._variables) if states else 0
        self._variables += common
        self._digests = self._of_all(digest)
        self._sketches = self._of_all(sketch)
        by_rows = [path.replace("/", "_") for path in self._strategy.extended.updated_by_rows]

        def may_differ(variable: Any) -> float:
            dtype, path = variable.value.dtype, variable.path.replace("/", "_")
            if not dtype.is_floating:
                return -1.0
            once = ROUNDOFF.get(dtype.name, 0.0)  # Of 16 bits.
            if any(one in path for one in by_rows):  # With the optimizer's variables for it.
                return max(_OF_ROWS, 64 * once)
            return max(_OF_NORMS, 4 * once)

        self._may_differ = np.array([*map(may_differ, self._variables)])

    def allow_drift(self) -> None:
        """Lets variables differ by what rounding grows to in a training of any length."""
        grown = np.maximum(self._may_differ, _DRIFT)
        self._may_differ = np.where(self._may_differ < 0, -1.0, grown)

    def difference(self) -> str | None:
        """Returns which variable and replica differ first, and by how much; None if none does."""
        strategy, variables = self._strategy, self._variables
        if strategy.num_replicas_in_sync == 1:
            return None
        with strategy.scope():
            digests = self._digests()().numpy()
            replicas, devices = np.arange(len(digests)), len(strategy.extended.worker_devices)
            of_host = replicas - replicas % devices
            alone = np.arange(len(variables)) < self._num_of_host
            others = np.where(alone, of_host[:, None], 0)  # With which each is compared.
            differs = digests != np.take_along_axis(digests, others, 0)
            if differs.any():
                parts, sizes = np.moveaxis(self._sketches()().numpy(), 2, 0)
                apart = parts - np.take_along_axis(parts, others, 0)
                differs &= ~(np.abs(apart) <= self._may_differ * sizes)
            differing = np.flatnonzero(differs.any(0))
            if not len(differing):
                return None
            at = differing[0]
            first = variables[at]
            replica = int(np.flatnonzero(differs[:, at])[0])
            other = int(others[replica, at])
            values = strategy.gather(  # This one variable is sent.
                strategy.run(lambda: tf.cast(tf.convert_to_tensor(first), tf.float64)[None]), axis=0
            ).numpy()
        host = f" (host {replica // devices})" if len(digests) > devices else ""
        return (
            f"replica {replica}{host} holds other numbers of {first.path} than replica {other}, by "
            f"{np.abs(values[replica] - values[other]).max():.3g} at most; of {len(variables)} "
            f"variables {len(differing)} differ somewhere"
        )

    def _of_all(self, function: Function) -> Any:
        """Makes a function that gathers what `function` makes of variables on all replicas."""

        def here() -> tf.Tensor:
            tensors = [*map(tf.convert_to_tensor, self._variables)]
            # A slot that only its owner has is read there, and only the result is sent.
            results = device_ops.on_each([one.device for one in tensors], function, tensors)
            return tf.stack(results)[None]

        strategy = self._strategy
        gathered = tf.function(lambda: strategy.gather(strategy.run(here), axis=0), autograph=False)
        # TensorFlow warns of the traces of a function that is called, such as one for each model.
        return functools.cache(gathered.get_concrete_function)


class CheckedFunction:
    """A model's train, test or predict function, which compares all replicas as a call begins."""

    def __init__(self, function: Function, model: Any, name: str) -> None:
        self._function, self._model, self._name = function, model, name
        self._comparison: WeightComparison | None = None
        # In this `fit` or the like; whether this is its first one, or an epoch's.
        self.calls, self.begins = 0, True

    def __call__(self, *args: Any) -> Any:
        """Calls it, and returns its logs."""
        logs = self._function(*args)
        self.calls += 1
        trains = self._name == "train"
        if not (self.begins or (trains and self.calls <= _FIRST_CALLS)):
            return logs
        self.begins = False
        if self._comparison is None and not trains:  # That of `fit`, if there was one.
            self._comparison = getattr(self._model.train_function, "_comparison", None)
        if self._comparison is None:  # The optimizer has its variables now.
            self._comparison = WeightComparison(self._model, trains)
            if not trains:  # Which may come after a training of any length.
                self._comparison.allow_drift()
        difference = self._comparison.difference()
        if difference is not None:
            raise RuntimeError(
                f"after execution {self.calls} of the {self._name} step, {difference}. All hosts "
                "must start with the same weights and update them alike; "
                "MultiWorkerMirroredStrategy(check_in_sync=False) turns this check off"
            )
        if self.calls == _FIRST_CALLS:
            self._comparison.allow_drift()
        return logs


def digest(tensor: tf.Tensor) -> tf.Tensor:
    """Makes one int64 of all bits of a tensor of numbers or bools, on its device."""
    # It is equal for equal bits, and differs for others but for one chance in 2^64.
    if tensor.dtype.is_floating:
        tensor = tf.bitcast(tensor, _INTEGER_OF_SIZE[tensor.dtype.size])
    bits = tf.reshape(tf.cast(tensor, tf.int64), [-1])
    # Each element is mixed with its index, so that order and size of differences count.
    stirred = (bits + tf.range(tf.size(bits, tf.int64)) * _OF_INDEX) * _FIRST
    stirred = tf.bitwise.bitwise_xor(stirred, tf.bitwise.right_shift(stirred, _HALF))
    return tf.reduce_sum(stirred * _SECOND)


def sketch(tensor: tf.Tensor) -> tf.Tensor:
    """Makes two numbers: a tensor's part along a random direction, and its size."""
    values = tf.reshape(tf.cast(tensor, tf.float32), [-1])
    direction = tf.random.stateless_normal(tf.shape(values), seed=[1, 2])
    return tf.stack([tf.reduce_sum(values * direction), tf.norm(values)])
