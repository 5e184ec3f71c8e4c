"""Extends the functions of `keras.Model` that make a step's `tf.function`.

Keras gives a strategy no other place where it sees a model that is about to train. Only a model
whose strategy or optimizer is tfcdo's gets another function; all others get Keras's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tfcdo import digests, xla
from tfcdo.replaced import replaced


def install() -> None:
    """Extends `keras.Model`, once Keras 3.7 or newer is imported; later calls do nothing."""
    model_class = getattr(sys.modules.get("keras"), "Model", None)
    # Keras before 3.7 has no such method, and reads a model's steps when it traces them.
    if not hasattr(model_class, "_make_function"):
        return
    if isinstance(vars(model_class).get("make_train_function"), functools.partialmethod):
        return
    for name, make in (("train", _make_train_function), ("test", _make_test_function)):
        keras_makes = getattr(model_class, f"make_{name}_function")
        keras_step = getattr(model_class, f"{name}_step")
        method = functools.partialmethod(make, keras_makes, keras_step)
        setattr(model_class, f"make_{name}_function", method)


def _make_train_function(
    model: Any, keras_makes: Callable[..., Any], keras_step: Any, force: bool = False
) -> Any:
    before = model.train_function
    made = _make("train_step", model.optimizer, model, keras_makes, keras_step, force)
    function = model.train_function
    if function is not before and getattr(
        model.distribute_strategy.extended, "checks_in_sync", False
    ):
        model.train_function = digests.checked_at_first(function, model)
    return made


def _make_test_function(
    model: Any, keras_makes: Callable[..., Any], keras_step: Any, force: bool = False
) -> Any:
    return _make("test_step", None, model, keras_makes, keras_step, force)


def _make(
    name: str,
    optimizer: Any,
    model: Any,
    keras_makes: Callable[..., Any],
    keras_step: Any,
    force: bool,
) -> Any:
    """Has Keras make a function; XLA compiles the step on each replica instead of the whole."""
    if not _compiles_on_replicas(model):
        return keras_makes(model, force)
    step = getattr(model, name)
    weighs = getattr(step, "__func__", None) is keras_step
    model.jit_compile = False
    try:
        with replaced(model, name, xla.jit_compile(step, optimizer, weighs=weighs)):
            return keras_makes(model, force)
    finally:
        model.jit_compile = True


def _compiles_on_replicas(model: Any) -> bool:
    strategy = model.distribute_strategy
    return (
        bool(model.jit_compile)
        and strategy.num_replicas_in_sync > 1
        and any(
            getattr(owner, "meets_outside_xla", False)
            for owner in (strategy.extended, model.optimizer)
        )
    )
