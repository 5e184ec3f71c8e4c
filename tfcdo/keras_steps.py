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
    for name in ("train", "test"):
        keras_makes = getattr(model_class, f"make_{name}_function")
        keras_step = getattr(model_class, f"{name}_step")
        method = functools.partialmethod(_make, name, keras_makes, keras_step)
        setattr(model_class, f"make_{name}_function", method)


def _make(
    model: Any, name: str, keras_makes: Callable[..., Any], keras_step: Any, force: bool = False
) -> Any:
    """Makes a function as Keras does; XLA compiles the step on each replica, not the whole."""
    before = model.train_function
    if _compiles_on_replicas(model):
        step = getattr(model, f"{name}_step")
        weighs = getattr(step, "__func__", None) is keras_step
        optimizer = model.optimizer if name == "train" else None
        compiled = xla.jit_compile(step, optimizer, weighs=weighs)
        model.jit_compile = False
        try:
            with replaced(model, f"{name}_step", compiled):
                made = keras_makes(model, force)
        finally:
            model.jit_compile = True
    else:
        made = keras_makes(model, force)
    function = model.train_function
    if function is not before and getattr(
        model.distribute_strategy.extended, "checks_in_sync", False
    ):
        model.train_function = functools.partial(digests.run_checked, function, model, [])
    return made


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
