"""XLA compiles the forward and backward pass of each replica; the replicas meet outside of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcdo import log, tf_internals
from tfcdo.replaced import replaced

_SUM = tf.distribute.ReduceOp.SUM
_LOCAL = threading.local()  # TensorFlow traces each replica in a thread of its own.


class _NotCompiledError(Exception):
    """Why XLA cannot compile a step as a whole; empty if the step compiles its own parts."""


@dataclasses.dataclass
class _Trace:
    """Collects, while a step is traced, the work that is left to do outside of XLA."""

    weighs: bool
    gradients: list[Any] | None = None
    variables: list[Any] | None = None
    ops_before_update: int = 0
    examples: tf.Tensor | None = None


def jit_compile(
    step: Callable[..., Any], optimizer: Any = None, *, weighs: bool = False
) -> Callable[..., Any]:
    """Compiles the forward and backward pass of a step with XLA, on each replica.

    XLA cannot hold an all-reduce. In a step made by this function, `optimizer.apply` (and
    `apply_gradients`) is put off until the compiled part is done, so the all-reduce and the update
    run outside. `Model.fit` does this by itself with `compile(jit_compile=True)`; this function is
    for a `train_step` with several updates and for own loops.

    A step is run without XLA, with one logged warning, if it updates more than once, if it reads
    a variable after its update, or if its replicas meet, as in
    `BatchNormalization(synchronized=True)`. If XLA does not know an op, its error is raised. XLA
    compiles again for each new shape of a batch. A step that runs eagerly is not compiled.
    AutoGraph does not convert the step.

    Args:
      step: A function of tensors that calls the optimizer at most once, as its last use of the
        variables. It is called on a replica, in a `tf.function`.
      optimizer: The Keras optimizer that the step calls, also a `DistributedOptimizer`; None for a
        step that updates nothing.
      weighs: For `Model.fit`: whether a weight of the loss may be put off, too.

    Returns:
      A function with the arguments and results of `step`.

    Raises:
      TypeError: If `step` is not callable or `optimizer` has no method `apply`.

    Example:
      >>> strategy = tf.distribute.get_strategy()
      >>> double = jit_compile(lambda x: {"doubled": 2 * x})
      >>> result = tf.function(lambda: strategy.run(double, (tf.constant(3.0),)))()
      >>> float(result["doubled"])
      6.0
    """
    if not callable(step):
        raise TypeError(f"step must be a function; got {step!r}")
    if optimizer is not None and not callable(getattr(optimizer, "apply", None)):
        raise TypeError(f"optimizer must be a Keras 3 optimizer or None; got {optimizer!r}")
    return functools.partial(_run, step, optimizer, weighs)


def weight_put_off(examples: tf.Tensor) -> bool:
    """Returns whether this step's gradients are weighted by its examples outside of XLA."""
    trace: _Trace | None = getattr(_LOCAL, "trace", None)
    if trace is None:
        return False
    if not trace.weighs or trace.examples is not None:
        raise _NotCompiledError("weight_by_examples is used with a train_step of the model's own")
    trace.examples = examples
    return True


@tf.autograph.experimental.do_not_convert
def _run(
    step: Callable[..., Any], optimizer: Any, weighs: bool, /, *args: Any, **kwargs: Any
) -> Any:
    if getattr(_LOCAL, "trace", None) is not None:
        raise _NotCompiledError
    if tf.executing_eagerly() or tf_internals.compiled_by_xla():
        return step(*args, **kwargs)
    trace = _Trace(weighs)
    traced = functools.partial(_traced, step, optimizer, trace)
    name = _name(step)
    try:
        compiled = tf.function(traced, jit_compile=True, autograph=False)
        # Traced before it is called: a call could not be taken back.
        function = compiled.get_concrete_function(*args, **kwargs)
        _check_last_use(function, trace, optimizer)
    except (_NotCompiledError, RuntimeError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        if reason:
            log.warn_once(
                f"jit_compile=True: XLA does not compile {name}, because {reason}; compile parts "
                "of it with tfcdo.keras.jit_compile, or set jit_compile=False"
            )
        return step(*args, **kwargs)
    log.info_once(
        f"jit_compile=True: on each replica XLA compiles {name}"
        + ("; the all-reduce and the update run outside" if trace.variables is not None else "")
        + ". Each new shape of a batch is compiled again"
    )
    outputs, gradients, examples = function(*args, **kwargs)
    if trace.variables is not None:
        optimizer.apply(_weighted(gradients, examples), trace.variables)
    return outputs


def _traced(
    step: Callable[..., Any], optimizer: Any, trace: _Trace, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs a step with updates put off; returns its outputs, gradients and number of examples."""
    trace.gradients = trace.variables = trace.examples = None
    apply = functools.partial(_apply, trace, tf.compat.v1.get_default_graph())
    _LOCAL.trace = trace
    try:
        with contextlib.nullcontext() if optimizer is None else replaced(optimizer, "apply", apply):
            outputs = step(*args, **kwargs)
    finally:
        _LOCAL.trace = None
    return outputs, trace.gradients, trace.examples


def _apply(trace: _Trace, graph: tf.Graph, grads: Any, trainable_variables: Any = None) -> None:
    """Stands for an optimizer's `apply`."""
    if trace.variables is not None:
        raise _NotCompiledError("it updates variables more than once")
    if tf.compat.v1.get_default_graph() is not graph:
        raise _NotCompiledError("it updates in a tf.cond, loop or tf.function")
    if trainable_variables is None:
        raise _NotCompiledError("it calls optimizer.apply without variables")
    trace.gradients, trace.variables = list(grads), list(trainable_variables)
    trace.ops_before_update = len(graph.get_operations())


def _check_last_use(function: Any, trace: _Trace, optimizer: Any) -> None:
    """Raises a `_NotCompiledError` if ops after the update use a variable that it changes."""
    if trace.variables is None:
        return
    updated = [*trace.variables, *optimizer.variables]
    values = [one if isinstance(one, tf.Variable) else one.value for one in updated]
    handles = {
        id(component.handle) for value in values for component in getattr(value, "values", (value,))
    }
    captured = function.captured_inputs
    inner = function.inputs[len(function.inputs) - len(captured) :]
    changed = {
        id(tensor) for own, tensor in zip(captured, inner, strict=True) if id(own) in handles
    }
    for op in function.graph.get_operations()[trace.ops_before_update :]:
        if any(id(tensor) in changed for tensor in op.inputs):
            raise _NotCompiledError(f"it uses a variable after its update, in {op.name}")


def _name(step: Callable[..., Any]) -> str:
    name = getattr(step, "__name__", repr(step))
    owner = getattr(getattr(step, "__self__", None), "name", None)
    return f"{owner}.{name}" if owner else name


def _reason(error: Exception) -> str | None:
    """Returns why a step is run without XLA; None if the error is another one."""
    if isinstance(error, _NotCompiledError):
        return str(error)
    return "its replicas meet in it" if "merge_call" in str(error) else None


def _weighted(gradients: list[Any], examples: tf.Tensor | None) -> list[Any]:
    """Multiplies gradients by this replica's share of the examples, relative to the mean share."""
    if examples is None:
        return gradients
    context = tf.distribute.get_replica_context()
    weight = examples * context.num_replicas_in_sync / context.all_reduce(_SUM, examples)
    return [gradient if gradient is None else _times(gradient, weight) for gradient in gradients]


def _times(gradient: Any, weight: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(weight, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(weight, gradient.dtype)
