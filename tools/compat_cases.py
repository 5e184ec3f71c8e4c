"""Lists the single calls of docs/compat.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import methodcaller
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu  # It configures the virtual devices.
from testing_utils import MEAN, SUM

Call = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and its correct result."""

    name: str
    call: Call  # Gets what `make` returns; returns its result or raises.
    expected: Any  # The result, or the argument that a clear error names.
    make: Call = methodcaller("HierarchicalCopyAllReduce")  # Gets the library.


class Refused(NamedTuple):
    """Says that no result is right: a `ValueError` or `TypeError` must name `argument`."""

    argument: str


def _held(*numbers: Any, dtype: Any = None) -> Callable[[], Any]:
    """Returns what makes a value of one number, or array, on each device."""
    return lambda: tu.per_replica([tf.constant(number, dtype) for number in numbers])


def _summed(*makes: Callable[[], Any], op: Any = SUM) -> Call:
    """Returns the all-reduce of a batch, for what each device has of each value if they agree."""

    def call(ops: Any) -> Any:
        values = [make() for make in makes]
        read = [_read(one) for one in ops.batch_reduce(op, [(value, value) for value in values])]
        return read[0] if len(read) == 1 else read

    return call


def _read(result: Any) -> Any:
    """Returns what a result holds, if all devices hold the same."""
    components = getattr(result, "values", None)
    if components is None or hasattr(result, "indices"):
        components = [result]
    read = [tf.convert_to_tensor(component).numpy().tolist() for component in components]
    return read[0] if all(one == read[0] for one in read) else f"{read} on the devices"


def _slices(*index_dtypes: str) -> Callable[[], Any]:
    """Returns what makes gradients of rows 0 and 3 on a device, and of row 3 on another."""
    parts = [([[1.0], [2.0]], [0, 3]), ([[4.0]], [3])]

    def make() -> Any:
        return tu.per_replica(
            [
                tf.IndexedSlices(
                    tf.constant(rows), tf.constant(own, kind), tf.constant([4, 1], kind)
                )
                for (rows, own), kind in zip(parts, index_dtypes or ("int64", "int64"), strict=True)
            ]
        )

    return make


def _traced(ops: Any) -> Any:
    """All-reduces in a `tf.function` that does not know the shape."""

    @tf.function(input_signature=[tf.TensorSpec([None])] * 2)
    def call(first: Any, second: Any) -> Any:
        value = tu.per_replica([first, second])
        return ops.batch_reduce(SUM, [(value, value)])[0].values

    return [_read(one) for one in call(tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]))]


def _reordered(ops: Any) -> str:
    swapped = tu.per_replica([tf.constant(0.0)] * 2, tu.device_names(2)[::-1])
    result = ops.reduce(SUM, _held(1.0, 2.0)(), swapped)
    return " ".join(component.device[-5:] for component in result.values)


def _reduced_to(destinations: Any) -> Call:
    return lambda ops: _read(ops.reduce(SUM, _held(1.0, 2.0, 3.0)(), destinations))


def _gathered(*parts: Any) -> Call:
    def call(ops: Any) -> Any:
        value = _held(*parts)()
        return _read(ops._gather(value, value, 0))

    return call


def _fit(ops: Any) -> str:
    """Trains on 3 devices and on one; returns whether the weights agree."""
    generator = np.random.default_rng(0)
    inputs, targets = (generator.normal(size=(36, n)).astype("float32") for n in (4, 1))

    def train(strategy: tf.distribute.Strategy) -> list[Any]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(inputs, targets, batch_size=12, epochs=2, verbose=0, shuffle=False)
        return model.get_weights()

    three = train(tf.distribute.MirroredStrategy(tu.device_names(3), ops))
    pairs = zip(train(tf.distribute.get_strategy()), three, strict=True)
    close = all(np.allclose(a, b, atol=1e-5) for a, b in pairs)
    return "the weights of one-device training" if close else "other weights than on one device"


def _shared(ops: Any) -> Any:
    """All-reduces, in each of three replicas, one tensor that was made outside of them."""
    strategy = tf.distribute.MirroredStrategy(tu.device_names(3), cross_device_ops=ops)
    value = tf.constant(2.0)
    context = tf.distribute.get_replica_context
    return _read(strategy.run(lambda: context().all_reduce("SUM", value)))


def _data_parallel(library: Any) -> int:
    """Sets Keras's distribution by Keras's function, or by tfcdo's; returns the replicas."""
    set_distribution = getattr(library, "keras", keras.distribution).set_distribution
    set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        return tf.distribute.get_strategy().num_replicas_in_sync
    finally:
        set_distribution(None)


def _counting(count: int) -> tuple[str, tuple[Call, float]]:
    """Returns the name and the case of the sum of 1, 2, ... over as many devices."""
    numbers = range(1, count + 1)
    name = f"{count} device{'s' * (count > 1)} holding {', '.join(map(str, numbers))}"
    return name, (_summed(_held(*map(float, numbers))), float(sum(numbers)))


_A_SUM = _held(1.0, 2.0)
_TO_ONE = methodcaller("ReductionToOneDevice")
_EMBEDDING = [[1.0], [0.0], [0.0], [6.0]]


def _copying(packs: Any) -> Call:
    return methodcaller("HierarchicalCopyAllReduce", packs)


def _choosing(*arguments: Any) -> Call:
    return methodcaller("AllReduceCrossDeviceOps", *arguments)


def _maximum(library: Any) -> Any:
    return library.ReductionToOneDevice(None, lambda values: tf.reduce_max(tf.stack(values), 0))


# By subject and name: the arguments of a case after its name.
_CALLS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Sums": {
        **dict(map(_counting, range(1, 9))),
        "3 devices, MEAN of 1, 2, 3": (_summed(_held(1.0, 2.0, 3.0), op=MEAN), 2.0),
        "2 that 3 replicas share, SUM": (_shared, 6.0, _TO_ONE),
        "Keras `fit` on 3 devices": (_fit, "the weights of one-device training"),
        "replicas of `DataParallel` over 2 devices": (_data_parallel, 2, lambda lib: lib),
    },
    "Packs and dtypes": {
        "3 devices, 4 packs": (_summed(_held(*[[1.0] * 8] * 3)), [3.0] * 8, _copying(4)),
        "more packs than elements": (
            _summed(_held([1.0, 2.0], [3.0, 4.0])),
            [4.0, 6.0],
            _copying(8),
        ),
        "float32 and float64 in one batch": (
            _summed(_A_SUM, _held(3.0, 4.0, dtype="float64")),
            [3.0, 7.0],
        ),
        "float32, int64 and complex64 in one batch": (
            _summed(_A_SUM, _held(3, 4, dtype="int64"), _held(1j, 2j, dtype="complex64")),
            [3.0, 7, 3j],
        ),
        "float16: 2048 and seven ones (2055 rounds to 2056)": (
            _summed(_held(2048.0, *[1.0] * 7, dtype="float16")),
            2056.0,
        ),
        "bfloat16: 256 and seven ones (263 rounds to 264)": (
            _summed(_held(256.0, *[1.0] * 7, dtype="bfloat16")),
            264.0,
            _TO_ONE,
        ),
        "MEAN of int64 3 and 4": (_summed(_held(3, 4, dtype="int64"), op=MEAN), 3.5, _TO_ONE),
        "4 devices, MEAN of uint8 100 on each, whose sum is no uint8": (
            _summed(_held(*[100] * 4, dtype="uint8"), op=MEAN),
            100.0,
            _TO_ONE,
        ),
        "`NcclAllReduce` on CPU devices": (_summed(_A_SUM), 3.0, methodcaller("NcclAllReduce")),
        "an empty batch": (_summed(), []),
        "an empty tensor": (_summed(_held([], []), _A_SUM), [[], 3.0]),
        "a shape not known while tracing": (_traced, [[4.0, 6.0]] * 2),
    },
    "Embeddings and destinations": {
        "`IndexedSlices`": (_summed(_slices()), _EMBEDDING),
        "`IndexedSlices` before and after dense values": (
            _summed(_slices(), _A_SUM, _slices()),
            [_EMBEDDING, 3.0, _EMBEDDING],
        ),
        "`IndexedSlices` with int32 and int64 indices": (
            _summed(_slices("int32", "int64")),
            _EMBEDDING,
            _TO_ONE,
        ),
        "destination `/cpu:3`": (_reduced_to("/cpu:3"), 6.0),
        "destinations in another order than the values": (_reordered, "CPU:1 CPU:0"),
        "an `accumulation_fn` of one's own: the maximum": (
            _summed(_held([1.0, 9.0], [5.0, 2.0])),
            [5.0, 9.0],
            _maximum,
        ),
        "gather of different numbers of rows": (
            _gathered([[1.0], [2.0]], [[3.0]], [[4.0]]),
            [[1.0], [2.0], [3.0], [4.0]],
        ),
    },
    "Incorrect arguments": {
        "gather of replicas with unlike shapes, (2, 1) and (1, 2) along axis 0": (
            _gathered([[1.0], [2.0]], [[3.0, 4.0]]),
            Refused("shape"),
        ),
        'reduce_op="max"': (_summed(_A_SUM, op="max"), Refused("reduce_op")),
        'reduce_op="MEAN", a string': (_summed(_A_SUM, op="MEAN"), Refused("reduce_op")),
        'all_reduce_alg="bogus"': (_summed(_A_SUM), Refused("all_reduce_alg"), _choosing("bogus")),
        "num_packs=-1": (_summed(_A_SUM), Refused("num_packs"), _choosing("hierarchical_copy", -1)),
        "num_packs=1.5": (_summed(_held(*[[1.0] * 4] * 2)), Refused("num_packs"), _copying(1.5)),
        "a replica of shape [4] and one of [2, 2]": (
            _summed(_held([1.0] * 4, [[1.0] * 2] * 2)),
            Refused("shape"),
        ),
        "a replica of float32 and one of float64": (
            _summed(_held(np.float32(1.0), np.float64(2.0))),
            Refused("dtype"),
        ),
        "destinations=[]": (_reduced_to([]), Refused("destinations")),
        "destinations=`/cpu:99`, which does not exist": (
            _reduced_to("/cpu:99"),
            Refused("destinations"),
        ),
        "a pair that is a list of three": (
            lambda ops: ops.batch_reduce(SUM, [[_A_SUM()] * 3]),
            Refused("value_destination_pairs"),
        ),
    },
}
SUBJECTS = {
    subject: [Case(name, *rest) for name, rest in calls.items()]
    for subject, calls in _CALLS.items()
}
CASES = tuple(case for part in SUBJECTS.values() for case in part)
