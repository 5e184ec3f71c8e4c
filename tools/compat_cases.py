"""Lists the cases of docs/compat.md.

Each case gets a library's namespace, and returns its result or raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu  # It configures the virtual devices.


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and its correct result."""

    name: str
    call: Callable[[Any], Any]  # Gets the library.
    expected: Any  # The result, or the argument that a clear error names.


@dataclasses.dataclass(frozen=True)
class Refused:
    """Says that no result is right: a `ValueError` or `TypeError` must name `argument`."""

    argument: str


def _values(*numbers: Any, dtype: str = "float32", devices: Sequence[int] | None = None) -> Any:
    places = devices or range(len(numbers))
    return tu.per_replica(
        [tf.constant(number, dtype) for number in numbers],
        [tu.device_name(place) for place in places],
    )


def _sum(ops: Any, *values: Any, op: Any = None) -> Any:
    """All-reduces a batch; returns what each device has of each value, if the devices agree."""
    op = op or tf.distribute.ReduceOp.SUM
    results = ops.batch_reduce(op, [(value, value) for value in values])
    read = [_read(result) for result in results]
    return read[0] if len(read) == 1 else read


def _read(result: Any) -> Any:
    """Returns what a result holds, if all devices hold the same."""
    components = getattr(result, "values", None)
    if components is None or hasattr(result, "indices"):
        components = [result]
    read = [_plain(component) for component in components]
    return read[0] if all(one == read[0] for one in read) else f"{read} on the devices"


def _plain(tensor: Any) -> Any:
    return tf.convert_to_tensor(tensor).numpy().tolist()


def _slices(rows: Sequence[Sequence[float]], indices: Sequence[int], dtype: str = "int64") -> Any:
    return tf.IndexedSlices(
        tf.constant(rows, tf.float32), tf.constant(indices, dtype), tf.constant([4, 1], dtype)
    )


def _embedding(index_dtypes: Sequence[str] = ("int64", "int64")) -> Any:
    return tu.per_replica(
        [
            _slices([[1.0], [2.0]], [0, 3], index_dtypes[0]),
            _slices([[4.0]], [3], index_dtypes[1]),
        ]
    )


def _traced(ops: Any) -> Any:
    """All-reduces in a `tf.function` that does not know the shape."""

    @tf.function(input_signature=[tf.TensorSpec([None])] * 2)
    def call(first: Any, second: Any) -> Any:
        value = tu.per_replica([first, second])
        return ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(value, value)])[0].values

    return [_plain(one) for one in call(tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]))]


def _devices_of(result: Any) -> str:
    return " ".join(component.device[-5:] for component in result.values)


def _reordered(ops: Any) -> str:
    result = ops.reduce(
        tf.distribute.ReduceOp.SUM, _values(1.0, 2.0), _values(0.0, 0.0, devices=[1, 0])
    )
    return _devices_of(result)


def _nothing(library: Any) -> Any:
    ops = library.HierarchicalCopyAllReduce()
    return ops.batch_reduce(tf.distribute.ReduceOp.SUM, [])


def _reduce_to(ops: Any, destinations: Any) -> Any:
    return _read(ops.reduce(tf.distribute.ReduceOp.SUM, _values(1.0, 2.0, 3.0), destinations))


def _gather(ops: Any) -> Any:
    value = _values([[1.0], [2.0]], [[3.0]], [[4.0]])
    return _read(ops._gather(value, value, 0))


def _gather_unlike_shapes(ops: Any) -> Any:
    """Gathers rows of one column and a row of two along axis 0."""
    value = _values([[1.0], [2.0]], [[3.0, 4.0]])
    return _read(ops._gather(value, value, 0))


def _fit(library: Any) -> str:
    """Trains on 3 devices and on one; returns whether the weights agree."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(36, 4)).astype("float32")
    targets = generator.normal(size=(36, 1)).astype("float32")

    def train(devices: Sequence[str], ops: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=ops)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(inputs, targets, batch_size=12, epochs=2, verbose=0, shuffle=False)
        return model.get_weights()

    one = train(tu.device_names(1), library.ReductionToOneDevice())
    three = train(tu.device_names(3), library.HierarchicalCopyAllReduce())
    close = all(np.allclose(a, b, atol=1e-5) for a, b in zip(one, three, strict=True))
    return "the weights of one-device training" if close else "other weights than on one device"


def _shared(ops: Any) -> Any:
    """All-reduces, in each of three replicas, one tensor that was made outside of them."""
    strategy = tf.distribute.MirroredStrategy(tu.device_names(3), cross_device_ops=ops)
    tensor = tf.constant(2.0)

    def replica() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tensor)

    return _read(strategy.run(replica))


def _mean(ops: Any, *values: Any) -> Any:
    return _sum(ops, *values, op=tf.distribute.ReduceOp.MEAN)


def _maximum(library: Any) -> Any:
    ops = library.ReductionToOneDevice(
        accumulation_fn=lambda values: tf.reduce_max(tf.stack(values), 0)
    )
    return _sum(ops, _values([1.0, 9.0], [5.0, 2.0]))


def _data_parallel(library: Any) -> int:
    """Sets Keras's distribution by Keras's function, or by tfcdo's; returns the replicas."""
    set_distribution = getattr(library, "keras", keras.distribution).set_distribution
    set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        return tf.distribute.get_strategy().num_replicas_in_sync
    finally:
        set_distribution(None)


def _counting(count: int) -> Case:
    """Returns the case of the sum of 1, 2, ... over as many devices."""
    held = range(1, count + 1)
    return Case(
        f"{count} device{'s' * (count > 1)} holding {', '.join(map(str, held))}",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(), _values(*map(float, held))),
        float(sum(held)),
    )


_EMBEDDING = [[1.0], [0.0], [0.0], [6.0]]

SUMS = (
    *map(_counting, (1, 2, 3, 4, 5, 6, 7, 8)),
    Case(
        "3 devices, MEAN of 1, 2, 3",
        lambda lib: _mean(lib.HierarchicalCopyAllReduce(), _values(1.0, 2.0, 3.0)),
        2.0,
    ),
    Case(
        "2 that 3 replicas share, SUM",
        lambda lib: _shared(lib.ReductionToOneDevice()),
        6.0,
    ),
    Case("Keras `fit` on 3 devices", _fit, "the weights of one-device training"),
    Case("replicas of `DataParallel` over 2 devices", _data_parallel, 2),
)
PACKS = (
    Case(
        "3 devices, 4 packs",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(4), _values(*[[1.0] * 8] * 3)),
        [3.0] * 8,
    ),
    Case(
        "more packs than elements",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(8), _values([1.0, 2.0], [3.0, 4.0])),
        [4.0, 6.0],
    ),
    Case(
        "float32 and float64 in one batch",
        lambda lib: _sum(
            lib.HierarchicalCopyAllReduce(), _values(1.0, 2.0), _values(3.0, 4.0, dtype="float64")
        ),
        [3.0, 7.0],
    ),
    Case(
        "float32, int64 and complex64 in one batch",
        lambda lib: _sum(
            lib.HierarchicalCopyAllReduce(),
            _values(1.0, 2.0),
            _values(3, 4, dtype="int64"),
            _values(1j, 2j, dtype="complex64"),
        ),
        [3.0, 7, 3j],
    ),
    Case(
        "float16: 2048 and seven ones (2055 rounds to 2056)",
        lambda lib: _sum(
            lib.HierarchicalCopyAllReduce(), _values(2048.0, *[1.0] * 7, dtype="float16")
        ),
        2056.0,
    ),
    Case(
        "bfloat16: 256 and seven ones (263 rounds to 264)",
        lambda lib: _sum(lib.ReductionToOneDevice(), _values(256.0, *[1.0] * 7, dtype="bfloat16")),
        264.0,
    ),
    Case(
        "MEAN of int64 3 and 4",
        lambda lib: _mean(lib.ReductionToOneDevice(), _values(3, 4, dtype="int64")),
        3.5,
    ),
    Case(
        "4 devices, MEAN of uint8 100 on each, whose sum is no uint8",
        lambda lib: _mean(lib.ReductionToOneDevice(), _values(*[100] * 4, dtype="uint8")),
        100.0,
    ),
    Case(
        "`NcclAllReduce` on CPU devices",
        lambda lib: _sum(lib.NcclAllReduce(), _values(1.0, 2.0)),
        3.0,
    ),
    Case("an empty batch", _nothing, []),
    Case(
        "an empty tensor",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(), _values([], []), _values(1.0, 2.0)),
        [[], 3.0],
    ),
    Case(
        "a shape not known while tracing",
        lambda lib: _traced(lib.HierarchicalCopyAllReduce()),
        [[4.0, 6.0]] * 2,
    ),
)
EMBEDDINGS_AND_DEVICES = (
    Case(
        "`IndexedSlices`",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(), _embedding()),
        _EMBEDDING,
    ),
    Case(
        "`IndexedSlices` before and after dense values",
        lambda lib: _sum(
            lib.HierarchicalCopyAllReduce(), _embedding(), _values(1.0, 2.0), _embedding()
        ),
        [_EMBEDDING, 3.0, _EMBEDDING],
    ),
    Case(
        "`IndexedSlices` with int32 and int64 indices",
        lambda lib: _sum(lib.ReductionToOneDevice(), _embedding(("int32", "int64"))),
        _EMBEDDING,
    ),
    Case(
        "destination `/cpu:3`",
        lambda lib: _reduce_to(lib.HierarchicalCopyAllReduce(), "/cpu:3"),
        6.0,
    ),
    Case(
        "destinations in another order than the values",
        lambda lib: _reordered(lib.HierarchicalCopyAllReduce()),
        "CPU:1 CPU:0",
    ),
    Case("an `accumulation_fn` of one's own: the maximum", _maximum, [5.0, 9.0]),
    Case(
        "gather of different numbers of rows",
        lambda lib: _gather(lib.HierarchicalCopyAllReduce()),
        [[1.0], [2.0], [3.0], [4.0]],
    ),
)
ARGUMENTS = (
    Case(
        "gather of replicas with unlike shapes, (2, 1) and (1, 2) along axis 0",
        lambda lib: _gather_unlike_shapes(lib.HierarchicalCopyAllReduce()),
        Refused("shape"),
    ),
    Case(
        'reduce_op="max"',
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(), _values(1.0, 2.0), op="max"),
        Refused("reduce_op"),
    ),
    Case(
        'reduce_op="MEAN", a string',
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(), _values(1.0, 2.0), op="MEAN"),
        Refused("reduce_op"),
    ),
    Case(
        'all_reduce_alg="bogus"',
        lambda lib: _sum(lib.AllReduceCrossDeviceOps("bogus"), _values(1.0, 2.0)),
        Refused("all_reduce_alg"),
    ),
    Case(
        "num_packs=-1",
        lambda lib: _sum(lib.AllReduceCrossDeviceOps("hierarchical_copy", -1), _values(1.0, 2.0)),
        Refused("num_packs"),
    ),
    Case(
        "num_packs=1.5",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(1.5), _values(*[[1.0] * 4] * 2)),
        Refused("num_packs"),
    ),
    Case(
        "a replica of shape [4] and one of [2, 2]",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(), _values([1.0] * 4, [[1.0] * 2] * 2)),
        Refused("shape"),
    ),
    Case(
        "a replica of float32 and one of float64",
        lambda lib: _sum(lib.HierarchicalCopyAllReduce(), _two_dtypes()),
        Refused("dtype"),
    ),
    Case(
        "destinations=[]",
        lambda lib: _reduce_to(lib.HierarchicalCopyAllReduce(), []),
        Refused("destinations"),
    ),
    Case(
        "destinations=`/cpu:99`, which does not exist",
        lambda lib: _reduce_to(lib.HierarchicalCopyAllReduce(), "/cpu:99"),
        Refused("destinations"),
    ),
    Case(
        "a pair that is a list of three",
        lambda lib: _triple(lib.HierarchicalCopyAllReduce()),
        Refused("value_destination_pairs"),
    ),
)
SUBJECTS = {
    "Sums": SUMS,
    "Packs and dtypes": PACKS,
    "Embeddings and destinations": EMBEDDINGS_AND_DEVICES,
    "Incorrect arguments": ARGUMENTS,
}
CASES = tuple(case for part in SUBJECTS.values() for case in part)


def _two_dtypes() -> Any:
    return tu.per_replica([tf.constant(1.0), tf.constant(2.0, tf.float64)])


def _triple(ops: Any) -> Any:
    value = _values(1.0, 2.0)
    return ops.batch_reduce(tf.distribute.ReduceOp.SUM, [[value, value, value]])
