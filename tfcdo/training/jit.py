"""XLA compiles the forward and backward pass of each replica; the replicas meet outside of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import checks, log, tf_internals
from tfcdo.training import step as running
from tfcdo.training import updates


class _NotCompiledError(Exception):
    """Why XLA cannot compile a step as a whole; empty if the step compiles its own parts."""


@dataclasses.dataclass
class Trace:
    """Collects, while a step is traced, the update that is left to do outside of XLA."""

    graph: tf.Graph
    apply: Callable[[list[Any]], Any] | None = None  # The update, of gradients.
    gradients: list[Any] | None = None
    updated: Sequence[Any] = ()  # The variables that it changes.
    ops_before_update: int = 0
    are_losses: Sequence[bool] = ()  # For each result, whether it is one.

    def defer(
        self, own: updates.Call, optimizer: Any, grads: list[Any], variables: list[Any] | None
    ) -> None:
        """Takes the arguments of the step's `updates.apply`."""
        if self.apply is not None:
            raise _NotCompiledError("it updates variables more than once")
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise _NotCompiledError("it updates in a tf.cond, loop or tf.function")
        if variables is None:
            raise _NotCompiledError("it calls optimizer.apply without variables")
        self.apply = lambda grads: updates.apply(own, optimizer, grads, variables)
        self.gradients, self.updated = grads, [*variables, *optimizer.variables]
        self.ops_before_update = len(self.graph.get_operations())


def jit_compile(step: Callable[..., Any], optimizer: Any = None) -> Callable[..., Any]:
    """Compiles the forward and backward pass of a step with XLA, on each replica.

    XLA cannot compile an all-reduce. In a step made by this function, `optimizer.apply` (and
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
      optimizer: The Keras optimizer that the step calls; it may be left out.

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
    if optimizer is not None:
        checks.check_optimizer(optimizer)
    return functools.partial(_run, step)


def _run(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    here = running.now.step or running.ReplicaStep(0, 1)
    if here.trace is not None:
        raise _NotCompiledError
    if tf.executing_eagerly() or tf_internals.compiled_by_xla():
        return step(*args, **kwargs)
    traces: list[Trace] = []

    def traced(*args: Any, **kwargs: Any) -> Any:
        trace = Trace(tf.compat.v1.get_default_graph())
        traces[:] = [trace]
        with running.during(step=dataclasses.replace(here, trace=trace)):
            outputs = step(*args, **kwargs)
        here.note_names(outputs)
        trace.are_losses = [id(one) in here.losses for one in tf.nest.flatten(outputs)]
        return outputs, trace.gradients

    owner = getattr(getattr(step, "__self__", None), "name", None)
    name = getattr(step, "__name__", repr(step))
    name = f"{owner}.{name}" if owner else name
    reason: str | None = None
    try:
        compiled = tf.function(traced, jit_compile=True, autograph=False)
        # Traced before it is called: a call could not be taken back.
        function = compiled.get_concrete_function(*args, **kwargs)
        _check_last_use(function, traces[0])
    except _NotCompiledError as error:
        reason = str(error)
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        reason = "its replicas meet in it"
    if reason is not None:
        if reason:
            log.warn_once(
                f"jit_compile=True: XLA does not compile {name}, because {reason}; compile parts "
                "of it with tfcdo.keras.jit_compile, or set jit_compile=False"
            )
        return step(*args, **kwargs)
    [trace] = traces
    log.info_once(
        f"jit_compile=True: on each replica XLA compiles {name}"
        + ("; the all-reduce and the update run outside" if trace.apply else "")
        + ". Each new shape of a batch is compiled again"
    )
    outputs, gradients = function(*args, **kwargs)
    for one, is_loss in zip(tf.nest.flatten(outputs), trace.are_losses, strict=True):
        if is_loss:
            here.loss(one)
    if trace.apply:
        trace.apply(gradients)
    return outputs


def _check_last_use(function: Any, trace: Trace) -> None:
    """Raises a `_NotCompiledError` if ops after the update use a variable that it changes."""
    handles = {id(one.handle) for variable in trace.updated for one in running.components(variable)}
    captured = function.captured_inputs
    inner = function.inputs[len(function.inputs) - len(captured) :]
    changed = {
        id(tensor) for own, tensor in zip(captured, inner, strict=True) if id(own) in handles
    }
    for op in function.graph.get_operations()[trace.ops_before_update :]:
        if any(id(tensor) in changed for tensor in op.inputs):
            raise _NotCompiledError(f"it uses a variable after its update, in {op.name}")
