"""Runs the same work through TensorFlow's classes and tfcdo's: `make compat` makes docs/compat.md.

The work is trainings (`compat_trainings`) and single calls. Each library has a process of its own,
and a new one follows a crash or a hang.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import compat_trainings
import keras
import numpy as np
import pages
import tensorflow as tf
import testing_utils as tu  # It configures the virtual devices.
from compat_trainings import TRAININGS, Training
from pages import Row

# The base class of two of the public classes is not public itself.
from tensorflow.python.distribute import cross_device_ops
from testing_utils import MEAN, SUM

import tfcdo
from tfcdo import tf_internals

SECONDS = 600.0  # That a case may take.
# The rows of README.md's table, by the training.
README = {
    "`global_clipnorm`": "`global_clipnorm`",
    "`gradient_accumulation_steps`": "`gradient_accumulation_steps`",
    "`Dropout`": "`Dropout`",
    "a last batch of 7 examples, a dense model": "a last batch that does not divide",
    "sentences with a mask": "padded sentences with a mask",
}
# By the name of a case: TensorFlow's and tfcdo's.
Rows = Mapping[str, tuple[Row, ...]]


def all_reduce(case: Case, ops: Any) -> Any:
    """All-reduces a batch of values, each a list of what the devices have."""
    values = [tu.per_replica(value) for value in case.given]
    results = ops.batch_reduce(case.op, [(value, value) for value in values])
    read = [_read(result) for result in results]
    return read[0] if len(read) == 1 else read


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and its correct result."""

    given: Any  # What `call` works on.
    expected: Any = None
    make: Callable[[Any], Any] = methodcaller("HierarchicalCopyAllReduce")  # Gets the library.
    # Gets the case and what `make` returns; returns its result or raises.
    call: Callable[[Case, Any], Any] = all_reduce
    op: Any = SUM
    refused: str = ""  # The argument that a `ValueError` or `TypeError` must name.

    def row(self, library: str) -> Row:
        """Runs the case with the classes of one library."""
        module = cross_device_ops if library == "TensorFlow" else tfcdo
        try:
            result = self.call(self, self.make(module))
        except Exception as error:
            clear = isinstance(error, (ValueError, TypeError)) and self.refused in str(error)
            return Row("✓" if self.refused and clear else "✗", pages.error_text(error))
        if self.refused:
            return Row("✗", f"accepts it and gives {result}")
        if result == self.expected:
            return Row("✓", str(result))
        return Row("✗", f"{result} instead of {self.expected}")


def _read(result: Any) -> Any:
    """Returns what a result holds, if all devices hold the same."""
    components = tf_internals.components(result)
    read = [tf.convert_to_tensor(component).numpy().tolist() for component in components]
    return read[0] if all(one == read[0] for one in read) else f"{read} on the devices"


def _trace(case: Case, ops: Any) -> Any:
    """All-reduces in a `tf.function` that does not know the shape."""

    @tf.function(input_signature=[tf.TensorSpec([None])] * 2)
    def call(first: Any, second: Any) -> Any:
        value = tu.per_replica([first, second])
        return ops.batch_reduce(SUM, [(value, value)])[0].values

    return [_read(one) for one in call(*map(tf.constant, case.given))]


def _reorder(case: Case, ops: Any) -> str:
    swapped = tu.per_replica([0.0, 0.0], tu.device_names(2)[::-1])
    result = ops.reduce(SUM, tu.per_replica(case.given), swapped)
    return " ".join(component.device[-5:] for component in result.values)


def _reduce_to(case: Case, ops: Any) -> Any:
    return _read(ops.reduce(SUM, tu.per_replica([1.0, 2.0, 3.0]), case.given))


def _gather(case: Case, ops: Any) -> Any:
    value = tu.per_replica(case.given)
    return _read(ops._gather(value, value, 0))


def _fit(case: Case, ops: Any) -> str:
    strategy = tf.distribute.MirroredStrategy(tu.device_names(3), ops)
    weights, _ = compat_trainings.differences(case.given, strategy)
    close = weights <= 1e-5
    return "the weights of one-device training" if close else "other weights than on one device"


def _share(case: Case, ops: Any) -> Any:
    """All-reduces, in each of three replicas, one tensor that was made outside of them."""
    strategy = tf.distribute.MirroredStrategy(tu.device_names(3), cross_device_ops=ops)
    value = tf.constant(case.given)
    context = tf.distribute.get_replica_context
    return _read(strategy.run(lambda: context().all_reduce("SUM", value)))


def _count_replicas(case: Case, library: Any) -> int:
    """Sets Keras's distribution by Keras's function, or by tfcdo's; returns the replicas."""
    set_distribution = getattr(library, "keras", keras.distribution).set_distribution
    set_distribution(keras.distribution.DataParallel(devices=case.given))
    try:
        return tf.distribute.get_strategy().num_replicas_in_sync
    finally:
        set_distribution(None)


def _slices(*dtypes: str) -> list[tf.IndexedSlices]:
    """Returns gradients of rows 0 and 3 on a device, and of row 3 on another."""
    parts = ([[1.0], [2.0]], [0, 3]), ([[4.0]], [3])
    return [
        tf.IndexedSlices(np.array(rows, "f4"), np.array(indices, dtype), np.array([4, 1], dtype))
        for (rows, indices), dtype in zip(parts, dtypes, strict=True)
    ]


_A_SUM = [[1.0, 2.0]]
_TO_ONE = methodcaller("ReductionToOneDevice")
_hierarchical = partial(methodcaller, "HierarchicalCopyAllReduce")
_algorithm = partial(methodcaller, "AllReduceCrossDeviceOps")
_SLICES = _slices("int64", "int64")
_EMBEDDING = [[1.0], [0.0], [0.0], [6.0]]
_FIRST_NUMBERS = [[*range(1, count + 1)] for count in range(1, 9)]
SUBJECTS: dict[str, dict[str, Case]] = {
    "Sums": {
        **{
            f"{len(numbers)} device{'s' * (len(numbers) > 1)} holding {str(numbers)[1:-1]}": Case(
                [np.array(numbers, "float32")], float(sum(numbers))
            )
            for numbers in _FIRST_NUMBERS
        },
        "3 devices, MEAN of 1, 2, 3": Case([[1.0, 2.0, 3.0]], 2.0, op=MEAN),
        "2 that 3 replicas share, SUM": Case(2.0, 6.0, _TO_ONE, _share),
        "Keras `fit` on 3 devices": Case(
            Training(), "the weights of one-device training", call=_fit
        ),
        "replicas of `DataParallel` over 2 devices": Case(
            ["cpu:0", "cpu:1"], 2, lambda library: library, _count_replicas
        ),
    },
    "Packs and dtypes": {
        "3 devices, 4 packs": Case([[[1.0] * 8] * 3], [3.0] * 8, _hierarchical(4)),
        "more packs than elements": Case([[[1.0, 2.0], [3.0, 4.0]]], [4.0, 6.0], _hierarchical(8)),
        "float32 and float64 in one batch": Case(
            [*_A_SUM, np.array([3, 4], "float64")], [3.0, 7.0]
        ),
        "float32, int64 and complex64 in one batch": Case(
            [*_A_SUM, np.array([3, 4], "int64"), np.array([1j, 2j], "complex64")], [3.0, 7, 3j]
        ),
        "float16: 2048 and seven ones (2055 rounds to 2056)": Case(
            [np.array([2048, *[1] * 7], "float16")], 2056.0
        ),
        "bfloat16: 256 and seven ones (263 rounds to 264)": Case(
            [np.array([256, *[1] * 7], tf.bfloat16.as_numpy_dtype)], 264.0, _TO_ONE
        ),
        "MEAN of int64 3 and 4": Case([np.array([3, 4], "int64")], 3.5, _TO_ONE, op=MEAN),
        "4 devices, MEAN of uint8 100 on each, whose sum is no uint8": Case(
            [np.array([100] * 4, "uint8")], 100.0, _TO_ONE, op=MEAN
        ),
        "`NcclAllReduce` on CPU devices": Case(_A_SUM, 3.0, methodcaller("NcclAllReduce")),
        "an empty batch": Case([], []),
        "an empty tensor": Case([[[], []], *_A_SUM], [[], 3.0]),
        "a shape not known while tracing": Case(
            [[1.0, 2.0], [3.0, 4.0]], [[4.0, 6.0]] * 2, call=_trace
        ),
    },
    "Embeddings and destinations": {
        "`IndexedSlices`": Case([_SLICES], _EMBEDDING),
        "`IndexedSlices` before and after dense values": Case(
            [_SLICES, *_A_SUM, _SLICES], [_EMBEDDING, 3.0, _EMBEDDING]
        ),
        "`IndexedSlices` with int32 and int64 indices": Case(
            [_slices("int32", "int64")], _EMBEDDING, _TO_ONE
        ),
        "destination `/cpu:3`": Case("/cpu:3", 6.0, call=_reduce_to),
        "destinations in another order than the values": Case(
            [1.0, 2.0], "CPU:1 CPU:0", call=_reorder
        ),
        "an `accumulation_fn` of one's own: the maximum": Case(
            [[[1.0, 9.0], [5.0, 2.0]]],
            [5.0, 9.0],
            methodcaller("ReductionToOneDevice", None, lambda parts: tf.reduce_max(parts, 0)),
        ),
        "gather of different numbers of rows": Case(
            [[[1.0], [2.0]], [[3.0]], [[4.0]]], [[1.0], [2.0], [3.0], [4.0]], call=_gather
        ),
    },
    "Incorrect arguments": {
        "gather of replicas with unlike shapes, (2, 1) and (1, 2) along axis 0": Case(
            [[[1.0], [2.0]], [[3.0, 4.0]]], refused="shape", call=_gather
        ),
        'reduce_op="max"': Case(_A_SUM, refused="reduce_op", op="max"),
        'reduce_op="MEAN", a string': Case(_A_SUM, refused="reduce_op", op="MEAN"),
        'all_reduce_alg="bogus"': Case(_A_SUM, make=_algorithm("bogus"), refused="all_reduce_alg"),
        "num_packs=-1": Case(_A_SUM, make=_algorithm("hierarchical_copy", -1), refused="num_packs"),
        "num_packs=1.5": Case([[[1.0] * 4] * 2], make=_hierarchical(1.5), refused="num_packs"),
        "a replica of shape [4] and one of [2, 2]": Case(
            [[[1.0] * 4, [[1.0] * 2] * 2]], refused="shape"
        ),
        "a replica of float32 and one of float64": Case(
            [[np.float32(1.0), np.float64(2.0)]], refused="dtype"
        ),
        "destinations=[]": Case([], refused="destinations", call=_reduce_to),
        "destinations=`/cpu:99`, which does not exist": Case(
            "/cpu:99", refused="destinations", call=_reduce_to
        ),
        "a pair that is a list of three": Case(
            [1.0, 2.0],
            refused="value_destination_pairs",
            call=lambda case, ops: ops.batch_reduce(SUM, [[tu.per_replica(case.given)] * 3]),
        ),
    },
}
CASES = {name: case for part in SUBJECTS.values() for name, case in part.items()}
WORK: dict[str, Case | Training] = {**TRAININGS, **CASES}


def parts(rows: Rows) -> dict[str, Iterable[str]]:
    """Makes the lines of each part of the page."""
    trained, called = (_good(rows, cases) for cases in (TRAININGS, CASES))
    return {
        "counts": [
            f"tfcdo gives the results of one device in {trained[1]} of {len(TRAININGS)} trainings,",
            f"and TensorFlow's strategy in {trained[0]}. Of {len(CASES)} single calls,",
            f"tfcdo's classes pass {called[1]} and TensorFlow's {called[0]}.",
            "",
            f"Made by `make compat` on virtual CPU devices with TensorFlow {tf.__version__},",
            f"Keras {keras.__version__} and tfcdo {tfcdo.__version__}.",
        ],
        "trainings": _tables(compat_trainings.SUBJECTS, rows),
        "calls": _tables(SUBJECTS, rows),
    }


def _good(rows: Rows, names: Iterable[str]) -> list[int]:
    """Returns the number of TensorFlow's good rows, and of tfcdo's."""
    sides = zip(*(rows[name] for name in names), strict=True)
    return [sum(row.mark == "✓" for row in side) for side in sides]


def _tables(subjects: Mapping[str, Mapping[str, Any]], rows: Rows) -> Iterator[str]:
    """Yields a table for each subject, with the numbers of its good rows in the heading."""
    for subject, names in subjects.items():
        theirs, ours = (f"{good} of {len(names)}" for good in _good(rows, names))
        cells = ((name, *(row.cell for row in rows[name])) for name in names)
        yield from pages.table(f"{subject} | TensorFlow: {theirs} | tfcdo: {ours}", cells)
        yield ""


def readme_rows(rows: Rows) -> Iterator[Sequence[str]]:
    """Yields the cells of README.md's rows."""
    for name, label in README.items():
        # The first number, or the kind of the error.
        yield label, *(re.split("[,:]", row.text)[0] for row in rows[name])


def run(name: str, library: str) -> Row:
    """Runs one case or training with one library."""
    return WORK[name].row(library)


def _measure(library: str) -> Iterator[Row]:
    names = pages.with_progress([*WORK], lambda name: f"{library}, {name}")
    calls = ({"name": name, "library": library} for name in names)
    for row in pages.call_apart("compat", calls, SECONDS):
        yield row or Row("✗", f"crashes or hangs (over {SECONDS:g} s)")


if __name__ == "__main__":
    measured = _measure("TensorFlow"), _measure("tfcdo")
    rows = dict(zip(WORK, zip(*measured), strict=True))
    for name, lines in parts(rows).items():
        pages.replace("docs/compat.md", f"compat.py, {name}", lines)
    head = f"The program has | TensorFlow {tf.__version__}, Keras {keras.__version__} | tfcdo"
    pages.replace("README.md", "compat.py", pages.table(head, readme_rows(rows)))
