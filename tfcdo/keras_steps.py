"""Extends the functions of `keras.Model` that build it and make a step's `tf.function`.

Keras gives a strategy no other place where it sees a model that is about to train. Only a model
whose strategy or optimizer is tfcdo's gets another function; all others get Keras's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcdo import digests, xla
from tfcdo.replaced import replaced


def install() -> None:
    """Extends `keras.Model`, once Keras 3.7 or newer is imported; later calls do nothing."""
    model_class = getattr(sys.modules.get("keras"), "Model", None)
    # Keras before 3.7 has no such method, and reads a model's steps when it traces them.
    if model_class is None or not hasattr(model_class, "_make_function"):
        return
    if isinstance(vars(model_class).get("make_train_function"), functools.partialmethod):
        return
    for name in ("train", "test"):
        keras_makes = getattr(model_class, f"make_{name}_function")
        keras_step = getattr(model_class, f"{name}_step")
        method = functools.partialmethod(_make, name, keras_makes, keras_step)
        setattr(model_class, f"make_{name}_function", method)
    method = functools.partialmethod(_build, model_class._maybe_symbolic_build)
    model_class._maybe_symbolic_build = method


def _build(
    model: Any, keras_builds: Callable[..., Any], iterator: Any = None, data_batch: Any = None
) -> Any:
    """Builds a model as Keras does, but takes no batch for its shapes where these are known."""
    # In a strategy's scope Keras takes a batch, and begins again. A generator cannot begin again:
    # all that TensorFlow has prefetched of it would be lost. Keras keeps its first batches. The
    # threads of a PyDataset go on while it begins again.
    first = _first_batch(getattr(iterator, "data_adapter", None))
    if first is not None and _is_ours(model):
        iterator, data_batch = None, tf.nest.map_structure(_spec, first)
    return keras_builds(model, iterator=iterator, data_batch=data_batch)


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


def _first_batch(adapter: Any) -> Any:
    """Returns the first batch of a generator, or values that have the shapes of a PyDataset's."""
    if getattr(adapter, "_first_batches", None):
        return adapter._first_batches[0]
    signature = getattr(adapter, "_output_signature", None)
    shapes = [spec.shape for spec in tf.nest.flatten(signature) if spec is not None]
    known = all(shape[1:].is_fully_defined() for shape in shapes)
    return signature if known and type(adapter).__name__ == "PyDatasetAdapter" else None


def _spec(value: Any) -> tf.TensorSpec | None:
    return None if value is None else tf.TensorSpec([None, *value.shape[1:]], value.dtype)


def _compiles_on_replicas(model: Any) -> bool:
    several = model.distribute_strategy.num_replicas_in_sync > 1
    return bool(model.jit_compile) and several and _is_ours(model)


def _is_ours(model: Any) -> bool:
    owners = model.distribute_strategy.extended, getattr(model, "optimizer", None)
    return any(getattr(owner, "meets_outside_xla", False) for owner in owners)
