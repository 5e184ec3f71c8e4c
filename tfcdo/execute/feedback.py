"""Error feedback: the rounding errors of one step are added to the values of the next one.

The residuals are variables, one for each tensor that a device casts, and those that exchanges
between hosts keep: they are where they were lost, and saved in checkpoints. Whose residuals they
are is known by the structure of the batch, the function that reduces it, and how often it has
reduced such a batch before. A function is known by its name and the trainable variables that it
reads, so that it keeps its residuals when it is traced again, or made again for the same model.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals

# Limit on batch structures, for eager calls and for each function: ever-changing shapes would pile
# up residuals that are never reused.
MAX_STRUCTURES = 32
# All who trace must get the same variables.
_lock = threading.RLock()


class Residuals:
    """The rounding errors of a batch, and the state of its exchanges, by name."""

    def __init__(
        self, name: str, devices: Sequence[str], add: Callable[[str, tf.Variable], None]
    ) -> None:
        self._name, self._devices = name, tuple(devices)
        self._add = add  # Gets a name and each new variable, to save it in checkpoints.
        self.variables: dict[str, tf.Variable] = {}
        self._initial: dict[str, Callable[[], Any]] = {}
        # Functions that run eagerly with these residuals: they live as long as these.
        self.functions: dict[Any, Any] = {}
        # The variables, or the graph, of the function that uses them; none for eager use.
        self._holders: list[weakref.ref[Any]] = []
        self._restored = -1  # The value of `_last_restored` when a holder went last.

    def variable(self, device: int, name: str, initial: Callable[[], Any]) -> tf.Variable:
        """Returns the variable of a name on a device; a new one has the initial value."""
        with _lock:
            key = f"{self._name}_device{device}_{name}"
            if key not in self.variables:
                self._initial[key] = initial
                with tf.init_scope(), tf_internals.plain_variables(self._devices[device]):
                    self.variables[key] = tf.Variable(initial)
                    self._add(key, self.variables[key])
            return self.variables[key]

    def reset(self) -> None:
        """Sets all variables to their initial values."""
        for key, variable in self.variables.items():
            with tf.device(variable.device):
                variable.assign(self._initial[key]())

    def assign_holders(self, holders: Sequence[Any]) -> None:
        """Makes these the objects without which no function uses the residuals."""
        self._holders = [weakref.ref(holder, self._remember_restored) for holder in holders]

    def is_free(self) -> bool:
        """Returns whether the function that used them is gone."""
        return bool(self._holders) and not any(holder() is not None for holder in self._holders)

    def is_stale(self) -> bool:
        """Returns whether no checkpoint has restored them since their function went."""
        return self._restored == self._last_restored

    @property
    def _last_restored(self) -> int:
        return max(map(tf_internals.last_restored, self.variables.values()), default=-1)

    def _remember_restored(self, _: Any) -> None:
        self._restored = self._last_restored


class ErrorFeedback(tf_internals.Trackable):
    """Keeps the residuals of all batches that an object reduces."""

    def __init__(self) -> None:
        # By structure; then by the function that uses them and, of several such batches in it,
        # which one this is.
        self._kept: dict[str, dict[tuple[Hashable, int], Residuals]] = {}
        # Values from a backup, for variables that do not exist yet.
        self._restored: dict[str, Any] = {}
        # For each graph, counts the batches of each structure that it has reduced so far.
        self._turns: weakref.WeakKeyDictionary[
            Any, collections.defaultdict[str, itertools.count[int]]
        ] = weakref.WeakKeyDictionary()

    @property
    def by_name(self) -> dict[str, tf.Variable]:
        """Returns the variables of all residuals; the names are the same in another process."""
        with _lock:
            return {name: one for each in self._all() for name, one in each.variables.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ErrorFeedback:
        """Makes one without residuals: an error is to be added once only."""
        return ErrorFeedback()

    def restore(self, values: Mapping[str, Any]) -> None:
        """Sets residuals by name, also those that are made later; all others begin again."""
        with _lock:
            self.reset()
            self._restored = dict(values)
            for residuals in self._all():
                # The function that takes free ones gets their values.
                if not residuals.is_free():
                    self._give_restored(residuals.variables)

    def reset(self) -> None:
        """Sets all residuals to their initial values."""
        for residuals in self._all():
            residuals.reset()

    def _all(self) -> Iterator[Residuals]:
        return itertools.chain.from_iterable(kept.values() for kept in self._kept.values())

    def residuals(self, key: str, devices: Sequence[str]) -> Residuals:
        """Returns the rounding errors of the batch that is being reduced on some devices."""
        # The key is the same for the same batch in different steps and processes.
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError("error_feedback needs TensorFlow 2; got a graph of TensorFlow 1")
        if not all(devices):
            raise ValueError(
                "error_feedback needs values whose devices are known while a function is traced, "
                "such as strategy.run makes; got arguments of the function"
            )
        with _lock:
            if tf.executing_eagerly():
                return self._of(key, (None, 0), [], devices)
            function, holders = tf_internals.function_being_traced()
            graph = tf_internals.graph_of_function()
            turns = self._turns.setdefault(graph, collections.defaultdict(itertools.count))
            return self._of(key, (function, next(turns[key])), holders, devices)

    def _of(
        self, key: str, place: tuple[Hashable, int], holders: Sequence[Any], devices: Sequence[str]
    ) -> Residuals:
        kept = self._kept.setdefault(key, {})
        if place in kept:
            return kept[place]
        self._check_number(place[0])
        free = next((old for old, residuals in kept.items() if residuals.is_free()), None)
        if free is None:
            found = Residuals(f"batch_{key}_{len(kept)}", devices, self._add)
        else:
            found = kept.pop(free)
            if found.is_stale():
                # Residuals restored from a checkpoint are kept for the next function.
                with tf.init_scope():
                    found.reset()
                    self._give_restored(found.variables)
        kept[place] = found
        found.assign_holders(holders)
        return found

    def _add(self, name: str, variable: tf.Variable) -> None:
        self._track_trackable(variable, name)
        self._give_restored({name: variable})

    def _give_restored(self, variables: Mapping[str, tf.Variable]) -> None:
        for name, variable in variables.items():
            if name in self._restored:
                value = self._restored.pop(name)
                with tf.device(variable.device):
                    variable.assign(value.view(variable.dtype.as_numpy_dtype))

    def _check_number(self, function: Hashable) -> None:
        used = sum(any(one == function for one, _ in kept) for kept in self._kept.values())
        if used >= MAX_STRUCTURES:
            who = "eager calls" if function is None else "one tf.function"
            raise ValueError(
                f"error_feedback keeps what is lost for the next batch of the same structure; got "
                f"{used + 1} structures (shapes, dtypes, devices) in {who}: reduce batches of the "
                "same shapes in each step, or use another object, without error_feedback, for those"
            )
