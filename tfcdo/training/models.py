"""What tfcdo does where a Keras model or optimizer is used under one of its strategies.

`extensions` lists all functions that stand before Keras's own. With other strategies, and on
one replica, Keras's are called as they are.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcdo import keras_internals, log, tf_internals
from tfcdo.cluster import session
from tfcdo.training import alike, diloco, draws, jit, losses, parts, statistics, step, updates

Function = Callable[..., Any]
_STEP_OF = {"fit": "train", "evaluate": "test", "predict": "predict"}


def install() -> None:
    """Puts tfcdo's functions before Keras's; later calls do nothing."""
    if keras.backend.backend() == "tensorflow":  # Else `keras_internals` has said so.
        keras_internals.extend_all([*extensions()])


def extensions() -> Iterator[keras_internals.Extension]:
    """Yields the owner and the name of each function of Keras's, and ours that stands before it."""
    for optimizer_class in (keras_internals.BaseOptimizer, *keras_internals.WRAPPERS):
        yield optimizer_class, "apply", updates.apply
    yield keras_internals.BaseOptimizer, "__init__", _init_optimizer
    yield keras_internals.BaseOptimizer, "build", _build_optimizer
    yield keras_internals.OPTIMIZERS, "global_norm", updates.norm_of_all
    yield keras_internals.BaseOptimizer, "_use_weight_decay", updates.use_weight_decay
    yield keras_internals.BaseOptimizer, "finalize_variable_values", diloco.finalize
    yield keras.optimizers.LossScaleOptimizer, "check_finite", updates.finite
    optimizer = keras_internals.TFOptimizer
    yield optimizer, "_all_reduce_sum_gradients", updates.already_summed
    yield optimizer, "add_variable_from_reference", _add_slot
    for name in ("assign", "assign_add", "assign_sub"):
        yield optimizer, name, updates.note_rows
    yield keras.Variable, "assign", updates.note_write
    for name in ("assign_add", "assign_sub"):
        yield keras.Variable, name, functools.partial(updates.count, name)
    for name in ("__init__", "reset"):
        yield keras_internals.EpochIterator, name, keras_internals.end_with_all_data
    trainer = keras_internals.Trainer
    for name in ("train", "test", "predict"):
        yield trainer, f"make_{name}_function", functools.partial(_make, name)
    yield trainer, "_maybe_symbolic_build", _symbolic_build
    yield trainer, "fit", _fit
    yield keras.callbacks.CallbackList, "on_epoch_end", _end_epoch
    yield tf.data.Dataset, "shuffle", alike.shuffled
    yield tf.data.Dataset, "cache", alike.cached
    yield keras_internals.ArrayDataAdapter, "get_tf_dataset", alike.of_arrays
    yield tf.random, "shuffle", alike.permuted
    yield keras_internals.PyDatasetAdapter, "get_tf_dataset", parts.of_py_dataset
    yield trainer, "_get_metrics_result_or_logs", _metrics_or_logs
    for name in ("train_on_batch", "test_on_batch"):
        yield trainer, name, _on_batch
    for name in ("evaluate", "predict"):
        yield keras.Model, name, _with_data
    for name in ("save", "save_weights"):
        yield keras.Model, name, _save
    for name in ("export", "get_weights", "predict_on_batch"):
        yield keras.Model, name, _with_common_parameters
    for name in ("set_weights", "load_weights"):
        yield keras.Model, name, _begin_outer_again
    yield keras_internals.TRAINER, "_multi_worker_concat", _in_order_of_replicas
    for name in ("truncated_normal", "randint", "gamma", "binomial", "beta"):
        yield keras_internals.RANDOM, name, draws.whole_batch
    yield keras_internals.RANDOM, "draw_seed", draws.seed
    for name in ("dropout", "uniform", "normal", "categorical"):
        yield keras_internals.RANDOM, name, getattr(draws, name)
    yield keras_internals.LOSSES, "scale_loss_for_distribution", losses.scaled
    yield keras_internals.LOSSES, "unscale_loss_for_distribution", losses.unscaled
    yield keras_internals.LOSSES, "reduce_values", losses.reduced
    yield keras_internals.LOSSES, "apply_mask", losses.masked
    yield keras_internals.CompileLoss, "call", losses.compiled
    yield keras_internals.COMPILE_UTILS, "get_loss", losses.resolved
    yield keras.losses.Loss, "__call__", losses.called
    yield keras.metrics.MeanMetricWrapper, "update_state", losses.called
    yield tf.nn, "compute_average_loss", losses.of_rows
    yield keras.Model, "compute_loss", losses.computed
    for distiller in keras_internals.DISTILLERS:
        yield distiller, "compute_loss", losses.of_means
    yield trainer, "_aggregate_additional_loss", losses.additional
    yield keras.metrics.Mean, "update_state", losses.averaged
    yield keras.Layer, "__setattr__", _set
    yield keras_internals.TRACKING.TrackedDict, "__setitem__", _set
    yield tf.distribute.ReplicaContext, "merge_call", _meet
    yield keras.Layer, "add_loss", losses.added
    yield keras.Layer, "_get_own_losses", losses.of_layer
    yield keras.Layer, "_get_regularization_losses", losses.regularized
    yield keras.Layer, "_clear_losses", losses.cleared
    yield keras.layers.BatchNormalization, "build", statistics.build_layer
    yield keras.layers.BatchNormalization, "_moments", statistics.moments
    yield keras_internals.NN, "_compute_moments_sync", statistics.synchronized


def _set(own: Function, target: Any, *name_and_value: Any) -> None:
    """Notes what a replica sets in a step, as `self.x = x`, `self.all["x"] = x`: others do, too."""
    own(target, *name_and_value)
    name, values = name_and_value[0], target if isinstance(target, dict) else vars(target)
    if (here := step.now.step) is not None and name in values:
        here.attributes[id(values), name] = values, values[name]


def _meet(own: Function, context: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets replicas meet; then layers have again what this one has set."""
    result = own(context, *args, **kwargs)
    if (here := step.now.step) is not None:
        for (_, name), (values, value) in here.attributes.items():
            dict.__setitem__(values, name, value)
    return result


def _init_optimizer(own: Function, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the count of steps, and the learning rate, variables that each replica updates."""
    strategy = tf.distribute.get_strategy()
    ours, joined = step.is_ours(strategy), _session_of(strategy)
    if joined is not None:  # Before hosts wait for the first values of unlike variables.
        joined.agree({"what": f"making of an optimizer {type(optimizer).__name__}"})
    if ours:
        # A user's own `apply` may change gradients before Keras's is called: it gets the sums. A
        # class's own `build` makes variables, too, before and after Keras's.
        for name, function in (
            ("apply", updates.apply),
            ("apply_gradients", updates.apply_gradients),
            ("build", _in_scope),
        ):
            if keras_internals.has_own(optimizer, name):
                keras_internals.extend_class_of(optimizer, name, function)
    with tf.variable_creator_scope(_make_variable) if ours else contextlib.nullcontext():
        own(optimizer, *args, **kwargs)


def _make_variable(make: Function, **options: Any) -> tf.Variable:
    """Makes an optimizer's variable, which each replica updates."""
    if options.get("synchronization") != tf.VariableSynchronization.ON_READ:
        # Keras has the first replica's number sent to the others, where replicas meet.
        options["aggregation"] = tf.VariableAggregation.NONE
        # Not a statistic, whose mean hosts would have to meet for to read it.
        options["synchronization"] = tf.VariableSynchronization.ON_WRITE
    return make(**options)


def _extended_of(optimizer: Any) -> Any:
    """Returns the extended of the strategy of tfcdo's that an optimizer was made for; else None."""
    strategy = keras_internals.strategy_of(optimizer)
    ours = step.is_ours(strategy) and strategy.num_replicas_in_sync > 1
    return strategy.extended if ours and not diloco.is_outer(optimizer) else None


def _build_optimizer(own: Function, optimizer: Any, variables: Any) -> Any:
    if step.now.builds is not None and keras_internals.is_built_by_step(step.now.builds):
        return  # The first `apply` knows all variables, as on one device.
    variables = list(variables)
    values = [keras_internals.value_of(variable) for variable in variables]
    strategies = [getattr(one, "distribute_strategy", None) for one in values]
    strategies.append(keras_internals.strategy_of(optimizer))
    ours = next((one for one in strategies if one is not None and step.is_ours(one)), None)
    if ours is not None:  # Keras would fail for the slots, and not say why.
        updates.check_made_here(optimizer, ours, variables)
    extended = _extended_of(optimizer)
    if extended is not None and extended.shard_optimizer_state and not optimizer.built:
        if keras_internals.has_own(optimizer, "apply_gradients"):
            raise ValueError(
                "shard_optimizer_state must be False for an optimizer with an `apply_gradients` of "
                f"its own, {type(optimizer).__name__}, which would get each replica's part of a "
                "gradient; got True: override `apply` or `update_step`"
            )
        steps = optimizer.gradient_accumulation_steps
        if steps and not keras_internals.accumulates_parts(optimizer):
            raise ValueError(
                f"gradient_accumulation_steps must be None with shard_optimizer_state=True for an "
                f"optimizer with an `apply` of its own, {type(optimizer).__name__}, which would "
                f"get each replica's part of a gradient; got {steps}"
            )
        updates.assign_owners(extended, variables)
    _in_scope(own, optimizer, variables)
    diloco.build(keras_internals.strategy_of(optimizer), optimizer, variables)


def _in_scope(own: Function, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Builds an optimizer in its strategy's scope: a program of one device calls it anywhere."""
    strategy = keras_internals.strategy_of(optimizer)
    with contextlib.ExitStack() as stack:
        if step.is_ours(strategy):
            if not tf.distribute.has_strategy():
                stack.enter_context(strategy.scope())
            stack.enter_context(tf.variable_creator_scope(_make_variable))
        own(optimizer, *args, **kwargs)


def _add_slot(
    own: Function, optimizer: Any, reference_variable: Any, name: Any = None, *args: Any, **kw: Any
) -> Any:
    extended = _extended_of(optimizer)
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if extended is not None and not keras_internals.is_overwritten(reference_variable):
        if name == "gradient_accumulator" and keras_internals.accumulates_parts(optimizer):
            scope = tf.variable_creator_scope(_make_parts)
        # SwapEMAWeights swaps a variable with its moving average, so both are on all devices.
        elif extended.shard_optimizer_state and name != "average":
            device = updates.device_of_slots(extended, reference_variable)
            scope = tf_internals.plain_variables(device) if device else scope
    with scope:
        return own(optimizer, reference_variable, name, *args, **kw)


def _make_parts(make: Function, **options: Any) -> tf.Variable:
    """Makes a variable of which each replica has its own part, such as accumulated gradients."""
    options["synchronization"] = tf.VariableSynchronization.ON_READ
    options["aggregation"] = tf.VariableAggregation.SUM
    return make(**options)


def _symbolic_build(
    own: Function, model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Builds a model before its first step, by the spec of its batches, if it can be called so."""
    ours, spec = step.is_ours(model.distribute_strategy), None
    if iterator is not None:
        keras_internals.note_iterator(model, iterator)
        spec = keras_internals.element_spec(iterator) if ours else None
    with contextlib.ExitStack() as stack:
        if ours:
            stack.enter_context(keras_internals.building(model))
            stack.enter_context(step.during(builds=model))
        # Keras takes a batch, and begins again. A generator cannot begin again.
        if spec is not None:
            iterator, data_batch = None, keras.tree.map_structure(_of_any_batch, spec)
            # It may also make the targets of a loss.
            if keras.utils.unpack_x_y_sample_weight(data_batch)[1] is None:
                stack.enter_context(keras_internals.without_loss(model))
        own(model, iterator=iterator, data_batch=data_batch)


def _of_any_batch(spec: Any) -> Any:
    """Returns a tensor's spec for any number of examples; None for a value that is not a tensor."""
    spec = tf_internals.spec_of_component(spec)
    if not isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)):
        return None
    if spec.shape.rank in (None, 0) or not isinstance(spec, tf.TensorSpec):
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _fit(own: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    is_ours = step.is_ours(model.distribute_strategy)
    data = args[0] if args else kwargs.get("x")
    if is_ours and len(args) < 2 and isinstance(data, tf.data.Dataset):
        # Keras's default is True, which it ignores for a dataset, with a warning.
        kwargs.setdefault("shuffle", False)
    with _with_other_hosts(own, model, args, kwargs):
        with keras_internals.fitting(model):
            history = own(model, *args, **kwargs)
        if is_ours:
            diloco.finish(model.distribute_strategy, diloco.states_of_model(model))
    return history


@contextlib.contextmanager
def _with_other_hosts(own: Function, model: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Begins `fit` and the like once all hosts do; an error if they call it in different ways."""
    # Parts of unlike batches fit together, but are not one batch's.
    joined = _session_of(model.distribute_strategy)
    if joined is None:  # A callback may train another model, which is this host's.
        with step.during(session=None):
            yield
        return
    function = getattr(model, f"{_STEP_OF[own.__name__]}_function")
    if isinstance(function, alike.CheckedFunction):
        # Weights may have been assigned since the last call.
        function.calls, function.begins = 0, True
    call = inspect.signature(own).bind(model, *args, **kwargs)
    call.apply_defaults()
    callbacks = tf.nest.flatten(call.arguments.get("callbacks"))
    if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks):
        log.warn_once(
            "keras.callbacks.BackupAndRestore is for one host: at the end of fit each host removes "
            "the folder, in which another may be writing; use tfcdo.keras.BackupAndRestore"
        )
    described = alike.of_call(call.arguments) | alike.of_model(model)
    called = step.during(session=joined, keeps_order=own.__name__ == "predict")
    with joined.calling({"what": own.__name__, **described}), called:
        yield


def _end_epoch(own: Function, callbacks: Any, *args: Any, **kwargs: Any) -> None:
    """Ends the training of all hosts where a callback of one host does, such as by its clock."""
    own(callbacks, *args, **kwargs)
    if step.now.session is not None:
        model = callbacks.model
        extended = model.distribute_strategy.extended
        model.stop_training = any(extended.numbers_of_hosts(int(model.stop_training)))


def _session_of(strategy: Any) -> session.Session | None:
    """Returns the session of the hosts of a strategy of tfcdo's; None on one host."""
    several = step.is_ours(strategy) and strategy.extended._in_multi_worker_mode()
    return session.current() if several else None


def _on_batch(own: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the metrics of the batch, where Keras returns the mean of the replicas' metrics."""
    strategy = model.distribute_strategy
    several = step.is_ours(strategy) and strategy.num_replicas_in_sync > 1
    if not several or strategy.extended.outer is not None:
        return own(model, *args, **kwargs)
    call = inspect.signature(own).bind(model, *args, **kwargs)
    as_dict = call.arguments.get("return_dict", False)
    call.arguments["return_dict"] = True
    logs = own(*call.args, **call.kwargs)
    arrays = {name: np.asarray(value) for name, value in _of_all_replicas(model, logs).items()}
    logs = {name: value if value.ndim else float(value) for name, value in arrays.items()}
    return logs if as_dict else keras_internals.metrics_in_order(model, logs)


def _metrics_or_logs(own: Function, model: Any, logs: Any) -> Any:
    """Returns the logs of an epoch: Keras takes the last step's from a `train_step` of a user's."""
    # Where training has resumed, and an epoch has no batch, Keras still has the last batch's.
    logs = logs or getattr(model.train_function, "logs", logs)
    strategy, found = model.distribute_strategy, own(model, logs)
    if isinstance(model.train_function, alike.CheckedFunction):
        model.train_function.begins = True
    several = step.is_ours(strategy) and strategy.num_replicas_in_sync > 1
    # Else Keras has read the metrics, of all replicas.
    are_of_step = found is logs and isinstance(logs, dict)
    return _of_all_replicas(model, logs) if several and are_of_step else found


def _of_all_replicas(model: Any, logs: dict[str, Any]) -> dict[str, Any]:
    """Replaces the means of the replicas' results of metrics by the results for all examples."""
    # A `train_step` may return a number by the name of a metric that it does not update.
    updated = [metric for metric in model.metrics if any(map(np.any, metric.variables))]
    pairs = [(metric, metric.result()) for metric in updated]
    results = dict(_numbers({metric.name: result for metric, result in pairs}))
    named = [(n, one) for metric, one in pairs for n in vars(metric).get(step.RETURNED_AS, ())]
    # `train_step` and `test_step` may return two metrics by one name.
    counts = collections.Counter(name for name, _ in named)
    results |= {name: result for name, result in named if counts[name] == 1}

    def replaced(logs: dict[str, Any]) -> dict[str, Any]:
        return {
            name: replaced(value) if isinstance(value, dict) else results.get(name, value)
            for name, value in logs.items()
        }

    return replaced(logs)


def _result(own: Function, metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for a metric's `result`, which a step of a user's may return by any name."""
    result = own(metric, *args, **kwargs)
    if (here := step.now.step) is not None:
        here.results[id(result)] = result, metric
    return result


def _numbers(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the names and numbers of metrics, as `train_on_batch` has them, also of dicts."""
    for name, value in results.items():
        yield from _numbers(value) if isinstance(value, dict) else [(name, value)]


def _with_common_parameters(own: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Uses or saves a model's parameters that all hosts have."""
    with diloco.common_parameters(model):
        return own(model, *args, **kwargs)


def _save(own: Function, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Saves a model's parameters that all hosts have; also if hosts save to one path."""
    joined = _session_of(model.distribute_strategy)
    # Keras may ask before it overwrites a file, or save several.
    is_plain = not args and kwargs in ({}, {"overwrite": True})
    if joined is None or not is_plain or not str(filepath).endswith((".keras", ".h5")):
        return _with_common_parameters(own, model, filepath, *args, **kwargs)
    folder, slash, name = str(filepath).rpartition("/")  # It may be of a cloud.
    of_host = f"{folder}{slash}.{joined.cluster.index}-{name}"
    _with_common_parameters(own, model, of_host, **kwargs)
    return tf.io.gfile.rename(of_host, filepath, overwrite=True)


def _with_data(own: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluates or predicts with a model's parameters that all hosts have, in the same way."""
    with _with_other_hosts(own, model, args, kwargs):
        return _with_common_parameters(own, model, *args, **kwargs)


def _begin_outer_again(own: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a model other parameters, from which all hosts begin."""
    result = own(model, *args, **kwargs)
    for state in diloco.states_of_model(model):
        state.begin_again()
    return result


def _make(name: str, own: Function, model: Any, force: bool = False) -> Any:
    """Makes a function as Keras does; XLA compiles the step on each replica, not the whole."""
    before = getattr(model, f"{name}_function")
    if not step.is_ours(model.distribute_strategy):
        return own(model, force)
    several = model.distribute_strategy.num_replicas_in_sync > 1
    if several and name != "predict":
        kind, line = "metric of the variable", "that calls model.compile"
        for variable in model.metrics_variables:
            updates.check_variable(variable, model.distribute_strategy, kind, line)
        for metric in model.metrics:
            keras_internals.extend_class_of(metric, "result", _result)
    if several and model.jit_compile and name != "predict" and (before is None or force):
        keras_internals.make_function(model, name, jit.jit_compile(getattr(model, f"{name}_step")))
    else:
        own(model, force)
    function = getattr(model, f"{name}_function")
    if function is not before:
        extended = model.distribute_strategy.extended
        if several:
            function = functools.partial(_run_settled, function, model)
        if extended.outer is not None and name == "train":  # What a step returns is this host's.
            function = step.during(host_alone=True)(function)
        # An own loop may run a model's `train_step`, too.
        function = step.during(method="predict" if name == "predict" else "fit")(function)
        if extended.checks_in_sync:
            function = alike.CheckedFunction(function, model, name)
        setattr(model, f"{name}_function", function)
    if name != "train":
        statistics.synchronize(model)
    return None


def _run_settled(function: Function, model: Any, /, *args: Any) -> Any:
    """Calls a function of all replicas, of which an earlier one may have ended with an error."""
    joined = session.current()
    if joined is not None:
        joined.watch.go_on()
    try:
        return function(*args)
    except BaseException as error:
        if joined is not None:
            joined.watch.has_failed = True
        if not isinstance(error, (StopIteration, tf.errors.OutOfRangeError)):  # The end of data.
            _give_all_the_first_ones(model)
        raise


def _give_all_the_first_ones(model: Any) -> None:
    """Gives all replicas of this host the first one's variables, where all should be equal."""
    # An error ends a step when some have drawn random numbers, or updated, and others have not.
    for variable in [*model.variables, *keras_internals.variables_of_optimizers(model)]:
        own, value = step.components(variable), keras_internals.value_of(variable)
        is_equal = len(own) > 1 and not isinstance(value, tf_internals.SyncOnReadVariable)
        if is_equal and all(one.is_initialized() for one in own):  # Not if tracing has failed.
            step.assign(variable, [own[0].read_value()] * len(own))


def _in_order_of_replicas(own: Function, v: Any, strategy: tf.distribute.Strategy) -> Any:
    """Concatenates all hosts' results in the order of the replicas."""
    # Keras expects the first replicas' parts of all hosts before the second replicas', which is how
    # TensorFlow deals a batch. Here each host has one part of a batch: see `parts.cut`.
    if step.is_ours(strategy):
        return strategy.gather(v, axis=0)
    return own(v, strategy)
