"""Running the plan of a question: eagerly, in a graph, or eagerly as one function."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import copy_trees, interpreter
from tfcdo.execute.between import Network
from tfcdo.execute.feedback import Residuals
from tfcdo.execute.interpreter import Runtime
from tfcdo.execute.question import Question
from tfcdo.plan.plan import Plan

Accumulate = Callable[[Sequence[tf.Tensor], str], tf.Tensor]
_lock = threading.Lock()  # All threads must get the same function for the same residuals.


def run(
    question: Question,
    plan: Plan,
    network: Network | None,
    residuals: Residuals | None,
    accumulate: Accumulate,
    axis: Any,
) -> list[tuple[int, Any]]:
    """Runs a plan; returns the results with their positions in the caller's batch."""
    devices = question.devices
    if network is not None and any(pack.over_hosts for pack in plan.packs):
        # The members of a collective are known by their devices, so each replica takes part with
        # its own, even where several values lie on one: TensorFlow would wait for ever.
        devices = network.devices
    if plan.one_function and tf.executing_eagerly():
        # The ops wait for each other, so they must run at the same time, not one by one. A concrete
        # function is a function even where tf.config.run_functions_eagerly(True) rules.
        values = [list(value) for value in question.values]
        function = _eager_function(plan, devices, network, residuals)
        results = function.get_concrete_function(values)(values)
        # The result of a function is on the device of its last op, but TensorFlow may name another.
        results = [
            [copy_trees.copy([own], to)[0] for own, to in zip(value, question.devices, strict=True)]
            for value in results
        ]
    else:
        runtime = Runtime(network.exchange(plan) if network else None, residuals, accumulate, axis)
        results = interpreter.run(plan, question.values, devices, runtime)
    return [
        (position, tf_internals.mirrored([result[node] for node in asked.to]))
        for position, result, asked in zip(
            question.positions, results, question.batch.requests, strict=True
        )
    ]


def emit(question: Question, plan: Plan, network: Network | None, accumulate: Accumulate) -> None:
    """Creates the ops of a plan in the current graph, without residuals: nothing is reduced."""
    runtime = Runtime(
        network.exchange(plan) if network else None, None, accumulate, remembered=False
    )
    results = interpreter.run(plan, question.values, question.devices, runtime)
    if question.batch.has_owners:
        owners = [request.owner or 0 for request in question.batch.requests]
        here = [result[owner] for result, owner in zip(results, owners, strict=True)]
        interpreter.broadcast(plan, here, question.devices)


def _eager_function(
    plan: Plan, devices: tuple[str, ...], network: Network | None, residuals: Residuals | None
) -> Any:
    """Returns the function that runs a plan eagerly; it lives as long as its residuals."""
    if residuals is None:
        return _function(plan, devices, network)
    with _lock:
        if (plan, devices) not in residuals.functions:
            residuals.functions[plan, devices] = _make_function(plan, devices, network, residuals)
        return residuals.functions[plan, devices]


def _make_function(
    plan: Plan,
    devices: tuple[str, ...],
    network: Network | None,
    residuals: Residuals | None = None,
) -> Any:
    def reduce(values: Any) -> list[list[Any]]:
        runtime = Runtime(network.exchange(plan) if network else None, residuals)
        return interpreter.run(plan, values, devices, runtime)

    return tf.function(reduce, autograph=False)


# Tracing costs much more than running; the bound keeps a process that draws ever new shapes small.
_function = functools.lru_cache(maxsize=64)(_make_function)
