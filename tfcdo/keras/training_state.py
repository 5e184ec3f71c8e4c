"""The state of a training: read from a model between two steps, and given to a model again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcdo import keras_internals, log, tf_internals
from tfcdo.cluster import protocol, session
from tfcdo.keras import backup_folder
from tfcdo.training import diloco, step

Arrays = dict[str, np.ndarray]
Values = Mapping[str, tf.Tensor | np.ndarray]
FORMAT = 2
_CHUNK = 64 << 20  # Bytes that hosts exchange at once; 4 divides it.

# How values of replicas become values of another number of replicas.
_SAME = "same"  # All replicas hold the same.
_MEAN = "mean"
_SUM = "sum"
_OWN = "own"  # Each has its own, which nothing adds up.
_OF_HOST = "host"  # Hosts train alone; all replicas of a host hold the same.
_SUM_OF_HOST = "sum of host"  # Hosts train alone; a host's replicas hold parts of a sum.

_SHARED_SEED = "seed"  # Key of the state of the generator for `keras.random` without a seed.


@dataclasses.dataclass(frozen=True)
class _StateEntry:
    """One variable: a component for each replica of this host; others if it is on one device."""

    name: str
    combine: str
    components: tuple[tf.Variable, ...]

    @property
    def signature(self) -> list[Any]:
        component = self.components[0]
        return [self.name, component.shape.as_list(), component.dtype.name]


def copy(model: keras.Model, with_metrics: bool) -> tuple[dict[str, Any], Values]:
    """Takes a copy of all state, as JSON and values for `fetch`; all hosts must call it at once."""
    strategy = model.distribute_strategy
    host, hosts = host_of(strategy)
    built = _built(model)
    slots = _slots(model, built)
    metrics = _metric_slots(model) if with_metrics else []
    shared, own = {}, {}
    for key, slot in [*_keyed("v", slots), *_keyed("m", metrics)]:
        if slot.combine == _SAME:
            shared[key] = _value(slot.components[0])
            continue
        components = slot.components[:1] if slot.combine == _OF_HOST else slot.components
        for index, component in enumerate(components, host * len(components)):
            own[f"{key}.{index}"] = _value(component)
    feedback = _feedback(strategy)
    for name, variable in ({} if feedback is None else feedback.by_name).items():
        own[f"r.{host}.{name}"] = _value(variable)
    if keras_internals.has_shared_seed_generator(keras_internals.state_of_thread()):
        shared[_SHARED_SEED] = _value(_shared_seed()[0])
    header = {
        "format": FORMAT,
        "hosts": hosts,
        "replicas": strategy.num_replicas_in_sync,
        "optimizer": _optimizer_names(model),
        "built": built,
        "variables": [[*slot.signature, slot.combine] for slot in slots],
        "metrics": [[*slot.signature, slot.combine] for slot in metrics],
    }
    if hosts == 1:
        return header, {**shared, **own}
    # Each host keeps the values of all, so that any of them can be lost.
    gathered: Arrays = {}
    for part in gather(strategy, backup_folder.pack(fetch(own))):
        gathered.update(backup_folder.unpack(part))
    return header, {**shared, **gathered}


def fetch(values: Values) -> Arrays:
    """Returns arrays, without replicas' values that equal the first replica's, bit for bit."""
    arrays = {key: np.asarray(value) for key, value in values.items()}
    kept = {}
    for key, array in arrays.items():
        name, _, replica = key.partition(".")
        first = arrays.get(f"{name}.0")
        if replica in ("", "0") or first is None or array.tobytes() != first.tobytes():
            kept[key] = array
    return kept


def host_of(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Returns the number of this host, and of all hosts, of a strategy."""
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return 0, 1
    hosts = replicas // len(strategy.extended.worker_devices)
    joined = session.current()
    return (joined.cluster.index if joined is not None and hosts > 1 else 0), hosts


def gather(strategy: tf.distribute.Strategy, data: bytes) -> list[bytes]:
    """Returns the bytes of each host, in order, on every host; all must call it."""
    host, hosts = host_of(strategy)
    if hosts == 1:
        return [data]
    lengths = np.zeros(hosts, np.int64)
    lengths[host] = len(data)
    ends = np.cumsum(np.frombuffer(_joined(strategy, lengths.view(np.uint8)), np.int64)).tolist()
    start = ends[host] - len(data)
    whole = bytearray()
    for begin in range(0, ends[-1], _CHUNK):
        chunk = np.zeros(min(_CHUNK, ends[-1] - begin), np.uint8)
        own = data[max(0, begin - start) : max(0, begin + _CHUNK - start)]
        chunk[max(0, start - begin) :][: len(own)] = np.frombuffer(own, np.uint8)
        whole += _joined(strategy, chunk)
    return [bytes(whole[begin:end]) for begin, end in itertools.pairwise([0, *ends])]


def gather_json(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """Returns the JSON value of each host, in order, on every host."""
    return [json.loads(data) for data in gather(strategy, json.dumps(value).encode())]


def _joined(strategy: tf.distribute.Strategy, own: np.ndarray) -> bytes:
    """Returns all hosts' bytes; `own` has this host's, and zeros elsewhere."""
    # Sums of integers are exact.
    own = np.concatenate([own, np.zeros(-len(own) % 4, np.uint8)]).view(np.int32)
    values = step.of_host(tf.constant(own), strategy.extended.worker_devices)
    joined: bytes = strategy.reduce("SUM", values, axis=None).numpy().tobytes()
    return joined


def build(model: keras.Model, header: Mapping[str, Any]) -> None:
    """Makes the variables of the optimizers of a saved state, as that training's steps have."""
    weights = model.weights
    for name, indices in header["built"].items():
        optimizer = keras_internals.optimizers_of(model).get(name)
        if optimizer is not None and max(indices or [0]) < len(weights):
            known = [weights[i] for i in indices or ()]
            keras_internals.build(optimizer, known or model.trainable_variables)


def _built(model: keras.Model) -> dict[str, list[int] | None]:
    """Returns for each optimizer that has been built the weights that it updates."""
    index = {id(variable): at for at, variable in enumerate(model.weights)}
    built: dict[str, list[int] | None] = {}
    for name, optimizer in keras_internals.optimizers_of(model).items():
        if optimizer.built:
            leaves = keras_internals.leaves(optimizer)
            known = [v for leaf in leaves for v in keras_internals.trainable_variables(leaf)]
            at = [index.get(id(variable), -1) for variable in known]
            built[name] = None if -1 in at else at
    return built


def check_same_model(model: keras.Model, header: Mapping[str, Any], source: str) -> None:
    """Raises a ValueError unless a saved state is one of this model and optimizer."""
    remedy = "give each training a backup_dir of its own, or remove this one"
    unbuilt = [layer.name for layer in model.layers if not layer.built]
    if unbuilt:  # A `train_step` of the user's makes their variables, after this.
        remedy += f"; if it is the same model, build its layer {unbuilt[0]!r} before fit"
    if header.get("format") != FORMAT:
        raise ValueError(
            f"the backup {source} has format {header.get('format')}, and this version of tfcdo "
            f"reads format {FORMAT}: continue with the version that wrote it; or {remedy}"
        )
    if header["optimizer"] != _optimizer_names(model):
        raise ValueError(
            f"the backup {source} is of another optimizer: it was made with "
            f"{'/'.join(header['optimizer']) or None}, and the model is compiled with "
            f"{'/'.join(_optimizer_names(model)) or None}; {remedy}"
        )
    saved = [tuple(map(str, variable[:3])) for variable in header["variables"]]
    present = [tuple(map(str, slot.signature)) for slot in _slots(model, header["built"])]
    differing = f"it has {len(saved)} variables, and the model with its optimizer {len(present)}"
    for index, (one, other) in enumerate(zip(saved, present, strict=False)):
        # The path of an optimizer's variable has the scopes in which it was built: a first step's,
        # or none here. Its name has the path of the model's variable.
        name = one[0] if "/" in other[0] else one[0].rpartition("/")[2]
        if (name, *one[1:]) != other:
            differing = f"its variable {index} is {' '.join(one)}, in the model {' '.join(other)}"
            break
    else:
        if len(saved) == len(present):
            return
    settings = keras_internals.settings_of(model.optimizer)
    noted = header.get("settings", settings)  # Not by an earlier tfcdo.
    both = {"optimizer": noted}, "the backup", {"optimizer": settings}, "the model"
    details = protocol.differences(*both)
    kind = f"another model, or setting of the optimizer ({details})" if details else "another model"
    raise ValueError(f"the backup {source} is of {kind}: {differing}; {remedy}")


def restore(model: keras.Model, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Gives a model and its optimizer a saved state, except for the metrics."""
    strategy = model.distribute_strategy
    _assign(strategy, _slots(model, header["built"]), "v", header, header["variables"], arrays)
    if _SHARED_SEED in arrays:  # The training has drawn without a seed.
        for component in _shared_seed():
            component.assign(arrays[_SHARED_SEED])
    feedback = _feedback(strategy)
    if feedback is None:
        return
    host, hosts = host_of(strategy)
    residuals = {key: array for key, array in arrays.items() if key.startswith("r.")}
    if residuals and not _is_alike(strategy, header):
        log.warn_once(
            "the state of error_feedback and exchange starts again, because the backup was made "
            f"with another number of devices: {header['replicas']} on "
            f"{log.format_count(header['hosts'], 'host')} instead of "
            f"{strategy.num_replicas_in_sync} on {log.format_count(hosts, 'host')}"
        )
        residuals = {}
    own = f"r.{host}."
    feedback.restore({k.removeprefix(own): v for k, v in residuals.items() if k.startswith(own)})


def restore_metrics(model: keras.Model, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Gives the metrics of a running epoch their saved values."""
    slots = _metric_slots(model)
    saved = [variable[:3] for variable in header["metrics"]]
    if saved != [slot.signature for slot in slots]:
        log.warn_once(
            "the metrics of this epoch count from the backup on, because the model has others now "
            "or makes them in its first step: compile it with the same metrics"
        )
        return
    _assign(model.distribute_strategy, slots, "m", header, header["metrics"], arrays)


def _assign(
    strategy: tf.distribute.Strategy,
    slots: Sequence[_StateEntry],
    prefix: str,
    header: Mapping[str, Any],
    saved: Sequence[Sequence[Any]],
    arrays: Arrays,
) -> None:
    host, hosts = host_of(strategy)
    for (key, slot), variable in zip(_keyed(prefix, slots), saved, strict=True):
        # A variable of one device is not distributed, and says nothing about replicas.
        combine = slot.combine if variable[3] == _SAME else variable[3]
        dtype = slot.components[0].dtype.as_numpy_dtype
        names, count = [key], 1
        if variable[3] != _SAME:
            count = header["hosts" if variable[3] == _OF_HOST else "replicas"]
            names = [f"{key}.{index}" for index in range(count)]
        saved_values = [arrays.get(name, arrays[names[0]]) for name in names]
        # Files have bits in place of numbers of dtypes that numpy does not have.
        values = [one if one.dtype == dtype else one.view(dtype) for one in saved_values]
        if variable[3] == _OF_HOST:  # Other hosts than in the backup begin with the mean.
            values = _for_replicas(values, _MEAN, hosts)
            own = [values[host]] * len(slot.components)
        elif variable[3] == _SUM_OF_HOST and not _is_alike(strategy, header):
            of_hosts = np.split(np.stack(values), header["hosts"])
            sums = [np.sum(parts, 0, dtype=dtype) for parts in of_hosts]
            values = _for_replicas(sums, _MEAN, hosts)
            own = _for_replicas([values[host]], _SUM, len(slot.components))
        else:
            values = _for_replicas(values, combine, strategy.num_replicas_in_sync)
            first = host * len(slot.components)
            own = values[first : first + len(slot.components)]
        for component, value in zip(slot.components, own, strict=True):
            with tf.device(component.device):
                component.assign(value)


def _is_alike(strategy: tf.distribute.Strategy, header: Mapping[str, Any]) -> bool:
    """Returns whether a backup was made on as many hosts and replicas."""
    replicas = strategy.num_replicas_in_sync
    return (host_of(strategy)[1], replicas) == (header["hosts"], header["replicas"])


def _for_replicas(values: list[np.ndarray], combine: str, count: int) -> list[np.ndarray]:
    """Returns a value for each of `count` replicas."""
    if len(values) == count:
        return values
    if combine == _SUM:
        total = values[0] if len(values) == 1 else np.sum(values, 0, dtype=values[0].dtype)
        return [total] + [np.zeros_like(total)] * (count - 1)
    if combine == _MEAN and len(values) > 1:
        mean = np.mean([value.astype(np.float64) for value in values], 0)
        return [np.asarray(mean, values[0].dtype)] * count
    return [values[0]] * count


def _slots(model: keras.Model, built: Iterable[str]) -> list[_StateEntry]:
    """Returns all state but metrics: weights, statistics, seeds, and variables of optimizers."""
    metrics = {id(variable) for variable in model.metrics_variables}
    optimizers = keras_internals.optimizers_of(model)
    of_all = [one for name in built if name in optimizers for one in optimizers[name].variables]
    models = [variable for variable in model.variables if id(variable) not in metrics]
    slots = [
        *(_slot(variable, is_state=not variable.trainable) for variable in models),
        *(_slot(variable, is_state=False, path=variable.name) for variable in of_all),  # Its own.
    ]
    states = diloco.states_of_model(model)
    if states:
        slots = [_of_host(slot) for slot in slots]
    for state in states:
        slots.append(_of_host(_slot(state.examples, False)))
        slots += [_slot(variable, is_state=False) for variable in state.variables_of_all]
    return slots


def _metric_slots(model: keras.Model) -> list[_StateEntry]:
    return [_slot(variable, is_state=True) for variable in model.metrics_variables]


def _slot(variable: keras.Variable, is_state: bool, path: str = "") -> _StateEntry:
    value = variable.value
    name = re.sub(r"_\d+(?=[/_]|$)", "", path or variable.path)  # Counted by process.
    if not isinstance(value, tf_internals.DistributedValues):
        return _StateEntry(name, _SAME, (value,))
    combine = _SAME
    if value.synchronization == tf.VariableSynchronization.ON_READ:
        known = {tf.VariableAggregation.MEAN: _MEAN, tf.VariableAggregation.SUM: _SUM}
        combine = known.get(value.aggregation, _OWN)
    elif is_state and value.aggregation == tf.VariableAggregation.NONE:
        combine = _OWN  # Each replica writes to its own, such as the state of a seed.
    return _StateEntry(name, combine, tuple(value.values))


def _shared_seed() -> tuple[tf.Variable, ...]:
    """Returns the replicas' states, all the same, of the generator that draws without a seed."""
    generator = keras_internals.seed_generator(None, keras_internals.state_of_thread())
    return step.components(generator.state)


def _of_host(slot: _StateEntry) -> _StateEntry:
    """Returns a variable as one of hosts that train alone."""
    of_host = {_SAME: _OF_HOST, _SUM: _SUM_OF_HOST}
    return dataclasses.replace(slot, combine=of_host.get(slot.combine, slot.combine))


def _keyed(prefix: str, slots: Iterable[_StateEntry]) -> list[tuple[str, _StateEntry]]:
    return [(f"{prefix}{index}", slot) for index, slot in enumerate(slots)]


def _optimizer_names(model: keras.Model) -> list[str]:
    if model.optimizer is None:
        return []
    return [type(leaf).__name__ for leaf in keras_internals.leaves(model.optimizer)]


def _value(variable: tf.Variable) -> tf.Tensor:
    """Returns a variable's value in the memory of the host."""
    value = variable.read_value()
    if "CPU:" in value.device:
        return value  # It never changes: while it is held, an update makes a new buffer.
    with tf.device("CPU:0"):
        return tf.identity(value)


def _feedback(strategy: tf.distribute.Strategy) -> Any:
    return getattr(getattr(strategy.extended, "_cross_device_ops", None), "_feedback", None)
