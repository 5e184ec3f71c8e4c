"""Opens the one door to Keras's private names.

Everything that tfcdo reads or extends in Keras under a private name is here; other files use what
this one offers. `NAMES` lists what must exist, and is compared with the installed Keras at import.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcdo import log, private_names, version

private_names.check(__spec__, "Keras")

from keras.src.backend.common import global_state as _global_state
from keras.src.backend.common import variables as _variables
from keras.src.backend.tensorflow import random as _random
from keras.src.backend.tensorflow import trainer as _trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as _loss
from keras.src.optimizers import base_optimizer as _optimizers
from keras.src.random import seed_generator as _seed_generator
from keras.src.trainers import compile_utils as _compile_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.utils import tracking as _tracking

try:  # Since Keras 3.16.
    from keras.src.backend.tensorflow.ops import nn as _nn
except ImportError:
    from keras.src.backend.tensorflow import nn as _nn

# Keras 3.16 has another name for it.
_TRAINERS = ("TensorFlowTrainer", "Trainer")
Trainer = next(vars(_trainer)[name] for name in _TRAINERS if name in vars(_trainer))
EpochIterator = _trainer.TFEpochIterator
BaseOptimizer = _optimizers.BaseOptimizer
NUM_STEPS = "_tfcdo_num_steps"  # What asks for the steps of data that each host has for itself.

# Optimizers that pass gradients to other optimizers; Keras has the second one since 3.15.
WRAPPERS = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)
# Settings that processes need not have alike: names are counted by each, seeds and first values are
# the chief's, and a function's values of its own may name the host.
_OF_PROCESS = re.compile("name|dtype|seed|.*_initializer|closure|defaults")
_LONG = 100  # Of longer lists in a saved layer, such as vocabularies, the lengths are compared.
# Since Keras 3.12.
DISTILLERS = (keras.distillation.Distiller,) if hasattr(keras, "distillation") else ()
# What is read or called; `extend_all` knows what is extended.
NAMES: tuple[private_names.Member, ...] = (
    (BaseOptimizer, "apply_gradients", ("self", "grads_and_vars")),
    (BaseOptimizer, "_accumulated_gradients", ()),
    (BaseOptimizer, "_check_variables_are_known", ("self", "variables")),
    (BaseOptimizer, "_get_variable_index", ("self", "variable")),
    (BaseOptimizer, "_iterations", ()),
    (BaseOptimizer, "_model_variables_moving_average", ()),
    (BaseOptimizer, "_trainable_variables", ()),
    (BaseOptimizer, "_update_model_variables_moving_average", ("self", "trainable_variables")),
    (TFOptimizer, "_overwrite_model_variables_with_average_value", ("self", "trainable_variables")),
    (TFOptimizer, "_apply_weight_decay", ("self", "variables")),
    (
        TFOptimizer,
        "_backend_update_step",
        ("self", "grads", "trainable_variables", "learning_rate"),
    ),
    (TFOptimizer, "_distribution_strategy", ()),
    (keras.Layer, "_flatten_layers", ("self", "include_self")),
    (Trainer, "fit", ("self", "x")),
    (Trainer, "train_on_batch", ("self", "return_dict")),
    (Trainer, "test_on_batch", ("self", "return_dict")),
    (Trainer, "_flatten_metrics_in_order", ("self", "logs")),
    (Trainer, "_compile_config", ()),
    (Trainer, "_compile_loss", ()),
    (Trainer, "_initial_epoch", ()),
    (Trainer, "_make_function", ("self", "step_function")),
    (Trainer, "_symbolic_build", ("self", "data_batch")),
    (_trainer.TFEpochIterator, "_distributed_dataset", ()),
    (_trainer.TFEpochIterator, "_current_iterator", ()),
    (_trainer.TFEpochIterator, "_num_batches", ()),
    (_trainer.TFEpochIterator, "_steps_seen", ()),
    (_trainer.TFEpochIterator, "data_adapter", ()),
    (_trainer.TFEpochIterator, "steps_per_epoch", ()),
    (_global_state, "GLOBAL_STATE_TRACKER", ()),
    (_variables, "AutocastScope", ("dtype",)),
    (_seed_generator, "global_seed_generator", ()),
    (TFDatasetAdapter, "_dataset", ()),
    (ArrayDataAdapter, "_shuffle", ()),
    (PyDatasetAdapter, "py_dataset", ()),
    (PyDatasetAdapter, "shuffle", ()),
    (_random, "_cast_seed", ("seed",)),
)
private_names.check_members("Keras", keras.__version__, NAMES)


# The owner and name of one of Keras's functions, and ours, which gets that as its first argument.
Extension = tuple[Any, str, Callable[..., Any]]


def extended_members(extensions: Iterable[Extension]) -> list[private_names.Member]:
    """Returns what Keras must have for functions to stand before its own: all that these name."""
    members: list[private_names.Member] = []
    for owner, name, function in extensions:
        known = inspect.signature(function).parameters.values()
        _, *own = [one.name for one in known if one.kind is one.POSITIONAL_OR_KEYWORD]
        members.append((owner, name, ("self", *own[1:]) if inspect.isclass(owner) else (*own,)))
    return members


def extend_all(extensions: Sequence[Extension]) -> None:
    """Puts functions before Keras's own, unless Keras lacks some of these."""
    private_names.check_members("Keras", keras.__version__, extended_members(extensions))
    for extension in extensions:
        extend(*extension)


def extend(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Puts a function before one of Keras's, which is its first argument."""
    keras_own = getattr(owner, name)
    if hasattr(keras_own, "tfcdo_extends"):
        return  # This module was loaded again.

    @functools.wraps(keras_own)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return function(keras_own, *args, **kwargs)

    extended.tfcdo_extends = keras_own  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def extend_class_of(one: Any, name: str, function: Callable[..., Any]) -> None:
    """Puts a function before a method of an object, in the class that defines it."""
    extend(next(owner for owner in type(one).__mro__ if name in vars(owner)), name, function)


# Optimizers


def value_of(variable: Any) -> Any:
    """Returns TensorFlow's variable of a Keras variable; another one as it is."""
    if not isinstance(variable, keras.Variable):
        return variable
    with _variables.AutocastScope(None):  # A layer of mixed precision reads a tensor.
        return variable.value


def path_of(variable: Any) -> str:
    """Returns the path of a Keras variable; the name of another one."""
    return str(getattr(variable, "path", variable.name))


def leaves(optimizer: Any) -> list[Any]:
    """Returns the optimizers that update variables by themselves, in order."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return leaves(optimizer.inner_optimizer)
    if hasattr(optimizer, "optimizers"):
        return [leaf for part in optimizer.optimizers for leaf in leaves(part)]
    return [optimizer]


def compiled_with(model: Any) -> dict[str, Any]:
    """Returns the arguments of a model's `compile` by name; none before it."""
    return dict(getattr(getattr(model, "_compile_config", None), "config", {}))


def settings_of(one: Any) -> Any:
    """Returns the class of a layer, loss, metric or optimizer, and what is set; a word as it is."""
    if one is None or isinstance(one, (str, int, float)) or hasattr(one, "__name__"):
        return str(getattr(one, "__name__", one))
    config: dict[str, Any] = {}
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # Of a lambda.
        # A user's may fail, which only saving shows. A model's layers are compared themselves.
        saved = {} if isinstance(one, keras.Model) else one.get_config()
        # Some losses save no arguments of their function.
        config = {**saved, **getattr(one, "_fn_kwargs", {})}
    dtype = getattr(getattr(one, "dtype_policy", None), "name", "")
    return {"class": type(one).__name__, "dtype": dtype, **_comparable(config)}


def _comparable(setting: Any) -> Any:
    """Returns of a saved setting what all processes of a program have alike."""
    if isinstance(setting, dict) and "class_name" in setting:  # A saved object, or a function.
        config = _comparable(setting.get("config"))
        settings = config if isinstance(config, dict) else {"name": config}
        return {"class": setting["class_name"], **settings}
    if isinstance(setting, dict):
        return {
            str(name): _comparable(one)
            for name, one in setting.items()
            # A learning rate is the chief's; a schedule is not.
            if not (_OF_PROCESS.fullmatch(str(name)) or one is None)
            and not (name == "learning_rate" and isinstance(one, float))
        }
    if isinstance(setting, (list, tuple)):
        return [*map(_comparable, setting)] if len(setting) < _LONG else f"{len(setting)} values"
    # Other words may be texts, or paths.
    is_word = isinstance(setting, str) and setting.isidentifier()
    return setting if is_word or isinstance(setting, (int, float)) else type(setting).__name__


def layers_of(model: Any) -> list[Any]:
    """Returns the layers of a model, and the layers in them."""
    return list(model._flatten_layers(include_self=False))


def optimizers_of(model: Any) -> dict[str, Any]:
    """Returns the optimizers of a model and of models in it, by attribute, or place in one."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def find(name: str, value: Any) -> None:
        if not isinstance(value, (BaseOptimizer, list, tuple, dict)) or id(value) in seen:
            return
        seen.add(id(value))  # A list may be one of its own elements.
        if isinstance(value, BaseOptimizer):
            found[name] = value
            return
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            find(f"{name}.{key}", part)

    for at, part in enumerate(model._flatten_layers()):  # The model itself is the first.
        if isinstance(part, keras.Model):
            for name in sorted(vars(part), key=lambda name: (name != "optimizer", name)):
                find(f"{at}.{name}" if at else name, vars(part)[name])
    return found


def variables_of_optimizers(model: Any) -> list[Any]:
    """Returns the variables of all of a model's optimizers."""
    return [variable for one in optimizers_of(model).values() for variable in one.variables]


def strategy_of(optimizer: Any) -> Any:
    """Returns the strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def trainable_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that a built optimizer updates."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def check_known(leaf: Any, variables: Sequence[Any]) -> None:
    """Raises Keras's error for variables that an optimizer was not built with."""
    leaf._check_variables_are_known(variables)


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer's variables in its strategy, outside of a step that is traced."""
    # A function that makes mirrored variables is traced twice, and run with a branch for each of
    # them that makes it if it is not there: most of the time of a first step.
    if not optimizer.built:
        name = keras.name_scope(optimizer.name, caller=optimizer)
        with tf.init_scope(), strategy_of(optimizer).scope(), name:
            optimizer.build(list(variables))
        optimizer.built = True


def is_overwritten(variable: Any) -> bool:
    """Returns whether Keras overwrites a variable with its gradient, as the scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def accumulators(leaf: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the variables in which an optimizer accumulates the gradients of some variables."""
    return [leaf._accumulated_gradients[leaf._get_variable_index(one)] for one in variables]


def has_own(one: Any, name: str, base: type = BaseOptimizer) -> bool:
    """Returns whether an object's class has a method of its own in place of its base's."""
    return inspect.unwrap(getattr(type(one), name)) is not inspect.unwrap(getattr(base, name))


def accumulates_parts(leaf: Any) -> bool:
    """Returns whether each replica accumulates its own gradients, to be summed for an update."""
    # A user's own `apply`, which need not be linear, gets the sum of each step.
    own = has_own(leaf, "apply") or has_own(leaf, "apply_gradients")
    return bool(leaf.gradient_accumulation_steps) and not own


def is_update_due(leaf: Any) -> tf.Tensor:
    """Returns whether the next step of an optimizer that accumulates gradients updates weights."""
    return tf.equal((leaf._iterations + 1) % leaf.gradient_accumulation_steps, 0)


def changes_all_rows(leaf: Any, variable: Any) -> bool:
    """Returns whether an update of some rows of a table may also change others."""
    return (
        bool(leaf.weight_decay or leaf.ema_overwrite_frequency)
        or getattr(variable, "constraint", None) is not None
        or has_own(leaf, "_apply_weight_decay", TFOptimizer)
    )


def averages(leaf: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the moving average of each of some variables; none without `use_ema`."""
    of_all = leaf._model_variables_moving_average if leaf.use_ema else ()
    return [value_of(of_all[leaf._get_variable_index(one)]) for one in variables if of_all]


def apply_to_own(leaf: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Applies gradients on a replica that owns some of the variables, or none."""
    if all(map(is_overwritten, variables)):  # Keras's `apply` would leave all of this out.
        leaf._backend_update_step([], [], leaf.learning_rate)  # Nadam has a product of its own.
        if leaf.use_ema:
            _update_averages(leaf)
    if grads:
        leaf.apply(grads, variables)
    else:
        leaf._iterations.assign_add(1)


def _update_averages(leaf: Any) -> None:
    known = leaf._trainable_variables
    leaf._update_model_variables_moving_average(known)
    if leaf.ema_overwrite_frequency:
        is_due = tf.equal((leaf.iterations + 1) % leaf.ema_overwrite_frequency, 0)
        overwrite = leaf._overwrite_model_variables_with_average_value
        tf.cond(is_due, lambda: overwrite(known), lambda: None)


# Models

_running_fits = 0
_iterators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_at_end: weakref.WeakKeyDictionary[Any, list[Callable[[], Any]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def fitting(model: Any) -> Iterator[None]:
    """Notes that a `fit` runs; ends what `BackupAndRestore` has set for it, also after an error."""
    global _running_fits
    _running_fits += 1
    _iterators.pop(model, None)
    try:
        yield
    except SystemExit as error:
        # An iterator waits for a generator's next element, which may come from another process:
        # it must end before Python does, which ends those processes first.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise
    finally:
        _running_fits -= 1
        for function in _at_end.pop(model, ()):
            function()
        model.train_function = getattr(model.train_function, "stands_for", model.train_function)


def metrics_in_order(model: Any, logs: Mapping[str, Any]) -> Any:
    """Returns metrics as `train_on_batch` does without `return_dict`: a list, or one number."""
    return model._flatten_metrics_in_order(logs)


def _has_own_step(model: Any) -> bool:
    return any(has_own(model, name, Trainer) for name in ("train_step", "test_step"))


def is_built_by_step(model: Any) -> bool:
    """Returns whether a model has layers that only a step of the user's builds."""
    return _has_own_step(model) and not all(one.built for one in model._flatten_layers())


@contextlib.contextmanager
def building(model: Any) -> Iterator[None]:
    """Builds a model before its first step, unless only a step of the user's can."""
    optimizer = getattr(model, "optimizer", None)
    was_built = getattr(optimizer, "built", None)
    try:
        with warnings.catch_warnings():  # Such a step may not call the model, or not with its data.
            of_model = f".*layer '{re.escape(model.name)}'.*unbuilt state"
            warnings.filterwarnings("ignore", f"The structure of `inputs`|{of_model}")
            yield
    except (RuntimeError, TypeError, ValueError):
        # Such a step makes the variables, as on one device. And a model that has been called may
        # take no dense tensors. An error of an optimizer's own `build` would not come again.
        has_changed = getattr(optimizer, "built", None) != was_built
        if has_changed or not (_has_own_step(model) or model.built):
            raise


def has_mask(values: Any) -> bool:
    """Returns whether a layer has given a mask with one of some outputs."""
    return any(getattr(one, "_keras_mask", None) is not None for one in tf.nest.flatten(values))


def take_added(layer: Any) -> list[Any]:
    """Returns the losses that a layer has from `add_loss`, which it no longer has then."""
    losses = list(layer._losses)
    layer._losses.clear()
    return losses


def is_fitting() -> bool:
    """Returns whether a `fit` runs in this process."""
    return _running_fits > 0


def end_with_all_data(own: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Ends an epoch where the data of all hosts ends, not this host's own, whose length differs."""
    own(iterator, *args, **kwargs)
    if (num_steps := getattr(iterator._distributed_dataset, NUM_STEPS, None)) is not None:
        iterator._num_batches = num_steps()


def note_iterator(model: Any, iterator: Any) -> None:
    """Remembers by which object a model's running `fit` takes its batches: the first one."""
    _iterators.setdefault(model, weakref.ref(iterator))  # A callback may call `evaluate`.


def epoch_iterator(model: Any) -> Any:
    """Returns the object by which a model's running `fit` takes its batches; None without one."""
    found = _iterators.get(model)
    return None if found is None else found()


def make_function(model: Any, name: str, step: Callable[..., Any]) -> None:
    """Makes a model's train or test function of a step that XLA compiles on each replica."""
    model.jit_compile = False  # Not the whole, around the steps of all replicas.
    try:
        setattr(model, f"{name}_function", model._make_function(step))
    finally:
        model.jit_compile = True


def element_spec(iterator: Any) -> Any:
    """Returns the spec of the batches of a model's iterator."""
    dataset = getattr(iterator, "_distributed_dataset", None)
    return getattr(dataset, "element_spec", None)


def dataset_of(iterator: Any) -> Any:
    """Returns the dataset that a model's iterator was made of; None for other data."""
    return getattr(iterator.data_adapter, "_dataset", None)


def is_shuffled(adapter: Any) -> bool:
    """Returns whether Keras shuffles the data of an adapter, such as `EpochIterator`'s."""
    return bool(getattr(adapter, "_shuffle", getattr(adapter, "shuffle", False)))


def notes_epochs(iterator: Any) -> bool:
    """Returns whether the data of a model's iterator is a PyDataset that is told of epochs."""
    data = getattr(iterator.data_adapter, "py_dataset", None)
    names = ("on_epoch_begin", "on_epoch_end")
    return data is not None and any(
        getattr(type(data), name, None) is not getattr(keras.utils.PyDataset, name, None)
        for name in names
    )


def batches_given(iterator: Any) -> int:
    """Returns how many batches a model's iterator has given that goes on in the next epoch."""
    goes_on = iterator.steps_per_epoch and iterator._current_iterator is not None
    batches: int = iterator._steps_seen if goes_on else 0
    return batches


def count_batches(iterator: Any, batches: int) -> None:
    """Notes that a model's iterator has given batches, so that it begins again where data ends."""
    iterator._steps_seen += batches


def at_end_of_fit(model: Any, function: Callable[[], Any]) -> None:
    """Calls a function at the end of a model's running `fit`, also after an error."""
    if is_fitting():
        _at_end.setdefault(model, []).append(function)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Sets the epoch that a model's running `fit` begins with, in place of its argument's."""
    model._initial_epoch = epoch
    at_end_of_fit(model, lambda: setattr(model, "_initial_epoch", None))


@contextlib.contextmanager
def _without(name: str, model: Any) -> Iterator[None]:
    """Takes away an attribute of a model for a while, which Keras does not notice."""
    value, vars(model)[name] = getattr(model, name), None
    try:
        yield
    finally:
        vars(model)[name] = value


without_loss = functools.partial(_without, "_compile_loss")


def symbolic_build(model: Any, spec: Any) -> None:
    """Makes all variables of a model from the spec of a batch, but not its optimizer's."""
    with _without("optimizer", model), building(model), model.distribute_strategy.scope():
        model._symbolic_build(data_batch=spec)


# Random numbers


# Keras keeps the generator that is used without a seed by this name.
_SHARED_SEED = _seed_generator.global_seed_generator.__name__


def state_of_thread() -> dict[str, Any]:
    """Returns what Keras keeps for this thread, to be used by others."""
    state: dict[str, Any] = vars(_global_state.GLOBAL_STATE_TRACKER)
    return state


def seed_generator(seed: Any, state: dict[str, Any]) -> Any:
    """Returns a generator of seeds; for None the one that a thread's functions share."""
    if seed is None:
        if not has_shared_seed_generator(state):
            state[_SHARED_SEED] = keras.random.SeedGenerator()
        return state[_SHARED_SEED]
    return seed


def has_shared_seed_generator(state: dict[str, Any]) -> bool:
    """Returns whether functions of a thread have drawn random numbers without a seed."""
    return state.get(_SHARED_SEED) is not None


def move_here(generator: Any) -> None:
    """Gives a generator of seeds a state in the current strategy, with the same numbers."""
    state, numbers = generator.state, np.asarray(generator.state.value)
    generator.state = keras.Variable(
        lambda shape, dtype: tf.constant(numbers, dtype),
        shape=state.shape,
        dtype=state.dtype,
        trainable=False,
        name=state.name,
    )


def seed_of(seed: Any) -> tf.Tensor:
    """Draws the two int32 of a random op from a seed of Keras."""
    return _random._cast_seed(_random.draw_seed(seed))


RANDOM, NN, LOSSES, TRACKING = _random, _nn, _loss, _tracking
TRAINER, COMPILE_UTILS, OPTIMIZERS = _trainer, _compile_utils, _optimizers
CompileLoss = _compile_utils.CompileLoss
adds_metrics_twice = version.adds_metrics_twice(keras.__version__)

if keras.backend.backend() != "tensorflow":
    log.info_once(
        f"Keras uses the backend {keras.backend.backend()}: tfcdo's strategies train Keras models "
        "on the TensorFlow backend only"
    )
