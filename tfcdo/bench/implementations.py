"""Finds the all-reduces that are compared, by the names a user writes in Python."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tfcdo
from tfcdo import tf_internals
from tfcdo.bench.results import OURS, TENSORFLOW
from tfcdo.execute.numerics import on_each

# From one `PerReplica` per value to one `Mirrored` per value.
Reduce = Callable[[Sequence[Any]], Sequence[Any]]

_STRATEGY_DEFAULT = "CollectiveAllReduce"
_TENSORFLOW_CALLS = (
    "tf.HierarchicalCopyAllReduce(num_packs=0)",
    "tf.HierarchicalCopyAllReduce(num_packs=1)",
    "tf.HierarchicalCopyAllReduce(num_packs=8)",
    "tf.ReductionToOneDevice",
    "tf.NcclAllReduce",
    f"tf.{_STRATEGY_DEFAULT}",
)
# The other classes are ways to configure this one.
_GENERAL = "AllReduceCrossDeviceOps"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of all-reduce."""

    name: str  # As in Python, such as `tf.HierarchicalCopyAllReduce(num_packs=8)`.
    package: str  # `OURS` or `TENSORFLOW`.
    class_name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def wire(self) -> str | None:
        """Returns the dtype in which float32 and float64 are sent; None for their own."""
        found: str | None = dict(self.arguments).get("wire_dtype")
        return found

    def cross_device_ops(self) -> tf.distribute.CrossDeviceOps | None:
        """Makes an instance; returns None for the one that a strategy chooses by itself."""
        if (self.package, self.class_name) == (TENSORFLOW, _STRATEGY_DEFAULT):
            return None
        return _classes(self.package)[self.class_name](**dict(self.arguments))

    def strategy(self, devices: Sequence[str]) -> tf.distribute.MirroredStrategy:
        """Makes a strategy over these devices that reduces by this implementation."""
        return tf.distribute.MirroredStrategy(
            list(devices), cross_device_ops=self.cross_device_ops()
        )

    def reducer(self, devices: Sequence[str]) -> Reduce:
        """Returns the function that sums a batch of values over these devices."""
        batch_reduce = _batch_reduce(self, tuple(devices))
        return lambda values: batch_reduce(
            tf.distribute.ReduceOp.SUM, [(value, value) for value in values]
        )

    def reason_not_to_run(self, devices: Sequence[str], dtype: str) -> str | None:
        """Returns the reason why this implementation cannot run."""
        # The default of the general class is TensorFlow's.
        algorithm = dict(self.arguments).get("all_reduce_alg", "nccl")
        if self.class_name != "NcclAllReduce" and (self.class_name, algorithm) != (
            _GENERAL,
            "nccl",
        ):
            return None
        cast = self.wire if dtype in ("float32", "float64") else None
        status = tfcdo.nccl_status(devices, cast or dtype)
        return None if status.can_run else str(status)

    def check_arguments(self, devices: Sequence[str]) -> None:
        """Sums a number on each device; `ValueError` if arguments only prove wrong there."""
        if not self.arguments:
            return
        numbers = on_each(devices, lambda: tf.ones([]))
        try:
            self.reducer(devices)([tf_internals.per_replica(numbers)])
        except Exception as error:
            message = str(error).partition("\n")[0]
            raise ValueError(f"{self.name}: {message}") from error


# One instance for all workloads: a second strategy over the same devices would number its
# collective ops like the first one's, which TensorFlow takes for the same ops.
@functools.cache
def _batch_reduce(
    implementation: Implementation, devices: tuple[str, ...]
) -> Callable[..., Sequence[Any]]:
    ops = implementation.cross_device_ops()
    reduce: Callable[..., Sequence[Any]] = (
        ops.batch_reduce if ops else implementation.strategy(devices).extended.batch_reduce_to
    )
    return reduce


def parse(name: str) -> list[Implementation]:
    """Returns the implementations that a name stands for."""
    if name in (OURS, TENSORFLOW, "all"):
        return [found for found in _known() if name in (found.package, "all")]
    package, class_name, arguments = _read_call(name)
    if class_name == _STRATEGY_DEFAULT and arguments:
        raise ValueError(f"{name}: a strategy makes it without arguments")
    if class_name not in _classes(package):
        raise ValueError(
            f"no class {class_name!r} in {package}, which has {', '.join(_classes(package))}"
        )
    found = Implementation(name, package, class_name, arguments)
    try:
        found.cross_device_ops()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    return [found]


def _known() -> list[Implementation]:
    """Returns all implementations, tfcdo's first."""
    ours = [f"{OURS}.{name}" for name in _classes(OURS) if name != _GENERAL]
    return [Implementation(name, *_read_call(name)) for name in (*ours, *_TENSORFLOW_CALLS)]


def _classes(package: str) -> dict[str, Any]:
    if package == OURS:
        public = {name: getattr(tfcdo, name) for name in tfcdo.__all__}
    else:
        public = {name: getattr(tf.distribute, name) for name in dir(tf.distribute)}
    classes: dict[str, Any] = {
        name: item
        for name, item in public.items()
        if isinstance(item, type)
        and issubclass(item, tf.distribute.CrossDeviceOps)
        and item is not tf.distribute.CrossDeviceOps
    }
    if package == TENSORFLOW:
        classes[_STRATEGY_DEFAULT] = None
    return classes


def _read_call(text: str) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    """Splits `package.Class(argument=literal)` into its parts."""
    arguments: dict[str, Any] = {}
    try:
        compile(text, "--ops", "eval")  # It also finds an argument that is given twice.
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call):
            if node.args:
                raise ValueError("arguments are written as in num_packs=8")
            arguments = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
            node = node.func
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"cannot read {text!r}: {error.args[0]}") from error
    package, _, class_name = ast.unparse(node).rpartition(".")
    package = {"tf.distribute": TENSORFLOW}.get(package, package)
    if package not in (OURS, TENSORFLOW):
        raise ValueError(
            f"{text!r} is not the name of an implementation: write all, tfcdo, tf, tfcdo.CLASS or "
            "tf.CLASS"
        )
    return package, class_name, tuple(arguments.items())
