"""Opens the one door to TensorFlow's private modules.

Everything that tfcdo needs from `tensorflow.python` is imported here and given a name of ours, so a
new TensorFlow version is the work of one file. Nothing here reduces anything: these are the value
classes that `tf.distribute.MirroredStrategy` hands over, the spelling of device names, and the
registry of kernels.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcdo import private_names

private_names.check(__spec__, "TensorFlow")

from tensorflow.python.autograph.core import ag_ctx as _ag_ctx
from tensorflow.python.autograph.core import config as _ag_config
from tensorflow.python.autograph.impl import api as _autograph
from tensorflow.python.data.ops import multi_device_iterator_ops as _device_iterators
from tensorflow.python.distribute import collective_all_reduce_strategy as _collective_strategy
from tensorflow.python.distribute import device_util as _device_util
from tensorflow.python.distribute import input_lib as _input_lib
from tensorflow.python.distribute import input_util as _input_util
from tensorflow.python.distribute import mirrored_strategy as _mirrored_strategy
from tensorflow.python.distribute import values as _values
from tensorflow.python.distribute import values_util as _values_util
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import record as _record
from tensorflow.python.framework import kernels as _kernels
from tensorflow.python.framework import none_tensor as _none_tensor
from tensorflow.python.framework import op_def_registry as _op_def_registry
from tensorflow.python.framework import tensor_util as _tensor_util
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from tensorflow.python.trackable import base as _trackable

DistributedValues = _values.DistributedValues
SyncOnReadVariable: type[Any] = _values.SyncOnReadVariable
# An object that a checkpoint saves: it has variables, or other such objects, by name.
Trackable: type[Any] = _trackable.Trackable
# The half of TensorFlow's MultiWorkerMirroredStrategy that does the work.
MirroredExtended: type[Any] = _mirrored_strategy.MirroredExtended
MultiWorkerExtended: type[Any] = _collective_strategy.CollectiveAllReduceExtended
# Tells the tapes that record now how to compute a gradient.
record_operation = _record.record_operation

# All that tfcdo's subclasses override, call through `super()` or read of these classes. The tests
# compare this list with the subclasses.
_STEP = ("self", "fn", "args", "kwargs")
_REDUCED = ("self", "reduce_op", "value")
_REDUCED_TO = ("self", "reduce_op", "per_replica_value", "destinations", "options")
_REDUCED_PAIRS = ("self", "reduce_op", "value_destination_pairs", "options")
_OF_BOTH: Mapping[str, tuple[str, ...]] = {
    "_batch_gather_to": ("self", "value_destination_pairs", "axis", "options"),
    "_call_for_each_replica": _STEP,
    "_container_strategy": ("self",),
    "_create_variable": ("self", "next_creator"),
    "_cross_device_ops": (),
    "_default_device": (),
    "_distribute_datasets_from_function": ("self", "dataset_fn", "options"),
    "_experimental_distribute_dataset": ("self", "dataset", "options"),
    "_get_cross_device_ops": ("self", "value"),
    "_get_local_replica_id": ("self", "replica_id_in_sync_group"),
    "_get_replica_id_in_sync_group": ("self", "replica_id"),
    "_in_multi_worker_mode": ("self",),
    "_input_workers_with_options": ("self", "options"),
    "_local_results": ("self", "val"),
    "_num_replicas_in_sync": (),
    "_replica_ctx_all_reduce": (*_REDUCED, "options"),
    "_use_merge_call": ("self",),
    "batch_reduce_to": ("self", "reduce_op", "value_destination_pairs"),
    "call_for_each_replica": ("self", "fn", "args"),
    "reduce_to": (*_REDUCED, "destinations"),
    "worker_devices": (),
}
_OF_SEVERAL_HOSTS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("self", "container_strategy", "cluster_resolver", "communication_options"),
    "_batch_reduce_to": _REDUCED_PAIRS,
    "_enable_check_health": (),
    "_get_variable_creator_initial_value": ("self", "replica_id", "device", "primary_var"),
    "_initialize_local_devices": ("self", "cluster_resolver", "worker_device"),
    "_reduce_to": (*_REDUCED, "destinations", "options"),
    "_std_server_started": (),
    "should_checkpoint": (),
}
_OF_CROSS_DEVICE_OPS: Mapping[str, tuple[str, ...]] = {
    "_gather_implementation": ("self", "per_replica_value", "destinations", "axis", "options"),
    "batch_reduce": _REDUCED_PAIRS,
    "batch_reduce_implementation": _REDUCED_PAIRS,
    "broadcast_implementation": ("self", "tensor", "destinations"),
    "reduce": _REDUCED_TO,
    "reduce_implementation": _REDUCED_TO,
}
OVERRIDES: tuple[private_names.Member, ...] = (
    (tf.distribute.Strategy, "run", (*_STEP, "options")),
    (tf.distribute.Strategy, "reduce", (*_REDUCED, "axis")),
    (tf.distribute.Strategy, "gather", ("self", "value", "axis")),
    *((MirroredExtended, *member) for member in _OF_BOTH.items()),
    *((MultiWorkerExtended, *member) for member in (*_OF_BOTH.items(), *_OF_SEVERAL_HOSTS.items())),
    (SyncOnReadVariable, "__init__", ("self", "strategy", "values", "aggregation")),
    *((SyncOnReadVariable, f"assign{end}", ("self", "value")) for end in ("", "_add", "_sub")),
    (SyncOnReadVariable, "read_value", ("self",)),
    *(
        (SyncOnReadVariable, f"scatter_{name}", ("self",))
        for name in ("add", "div", "max", "min", "mul", "sub", "update")
    ),
    (_values.MirroredVariable, "_update_replica", ("self", "update_fn", "value")),
    (Trackable, "_track_trackable", ("self", "trackable", "name", "overwrite")),
    (_input_lib.DistributedDatasetAndIteratorSpec, "_serialize", ("self",)),
    (_input_lib.DistributedDatasetAndIteratorSpec, "sanity_check_type", ("self", "other")),
    (_input_lib.DistributedDatasetAndIteratorSpec, "_cardinality", ()),
    (_input_lib.DistributedDatasetAndIteratorSpec, "_enable_get_next_as_optional", ()),
    *((tf.distribute.CrossDeviceOps, *member) for member in _OF_CROSS_DEVICE_OPS.items()),
)
private_names.check_members("TensorFlow", tf.__version__, OVERRIDES)

_WRITE_SECONDS = 10.0


def saves_one_replica() -> bool:
    """Returns whether a model is being saved, as one that is not distributed."""
    return bool(_values_util.is_saving_non_distributed())


def replica_on_host() -> int:
    """Returns the index, on this host, of the replica that runs."""
    return int(_values_util.get_current_replica_id_as_int())


def is_compiled(function: Any) -> bool:
    """Returns whether XLA compiles a `tf.function` as a whole."""
    return bool(function._jit_compile)


def with_python_function(function: Any, python_function: Callable[..., Any]) -> Any:
    """Returns a `tf.function` with the arguments of another one, of another Python function."""
    return function._clone(python_function=python_function)


# A `tf.function` rewrites the Python that it calls, for tensors in `if` and `for`. tfcdo has none,
# as Keras and TensorFlow, so rewriting it would only make tracing slow.
_ag_config.CONVERSION_RULES += (_ag_config.DoNotConvert("tfcdo"),)


def converted(users: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a user's function, which AutoGraph rewrites if it does so with its caller."""
    context = _ag_ctx.control_status_ctx()
    function: Callable[..., Any] = _autograph.tf_convert(users, context, convert_by_default=False)
    return function


# For elements such as `(x, y, None)`: a step of `fit` makes an empty value of each spec, for a
# replica without data.
_none_tensor.NoneTensorSpec._create_empty_value = lambda self: None


# A variable of one device has these, as for `float(optimizer.learning_rate)` in a callback.
_values.DistributedVariable.__array__ = lambda self, *_, **__: np.array(self.numpy())
_values.DistributedVariable.__int__ = lambda self: int(self.read_value())
_values.DistributedVariable.__float__ = lambda self: float(self.read_value())
_update_replica = _values.MirroredVariable._update_replica


def _update_alone(self: Any, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
    """Writes a variable as a replica that works alone has it: the others write the same."""
    extended = self.distribute_strategy.extended
    if getattr(extended, "sums_once", False) and not extended._use_merge_call():
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)
    return _update_replica(self, update_fn, value, **kwargs)


_values.MirroredVariable._update_replica = _update_alone
_Spec = _input_lib.DistributedDatasetAndIteratorSpec
_serialize, _check_type = _Spec._serialize, _Spec.sanity_check_type


def _end_of(spec: Any) -> tuple[Any, ...]:
    """Returns by what a traced function takes elements otherwise: where the data may end."""
    kinds = (tf.data.INFINITE_CARDINALITY, 0)
    known = spec._cardinality if spec._cardinality in kinds else None
    return known, spec._enable_get_next_as_optional


def _check_end(self: Any, other: Any) -> None:
    _check_type(self, other)
    if _end_of(self) != _end_of(other):
        raise ValueError(f"no TypeSpec is compatible with both {self} and {other}")


# TensorFlow calls a function that was traced for endless data for all data of the same shapes. It
# then fails where these end, and amid an execution of several steps of `fit`.
_Spec._serialize = lambda self: (*_serialize(self), *_end_of(self))
_Spec.sanity_check_type = _check_end


_create_device_dataset, _untuned = _device_iterators._create_device_dataset, tf.data.Options()
_untuned.autotune.enabled = False


def _create_untuned(*args: Any) -> tf.data.Dataset:
    """Returns what brings elements to a replica, of which nothing can be tuned."""
    # The thread that tunes an iterator may keep it from ending for a minute, and so an epoch.
    return _create_device_dataset(*args).with_options(_untuned)


_device_iterators._create_device_dataset = _create_untuned


def distributed_dataset(
    extended: Any, dataset: tf.data.Dataset, cardinality: int, options: Any
) -> Any:
    """Returns a distributed dataset whose elements are handed to this host's replicas in turn."""
    distributed = _input_util.get_distributed_dataset(
        dataset,
        extended._input_workers_with_options(options),
        extended._container_strategy(),
        num_replicas_in_sync=None,
        # Without one, TensorFlow may copy the dataset, and the values of its variables.
        input_context=tf.distribute.InputContext(),
        options=options,
    )
    distributed._cardinality = cardinality  # In batches of all replicas.
    return distributed


def spec_of_component(spec: Any) -> Any:
    """Returns the spec of the first replica's component of a distributed value; others as it is."""
    return spec._value_specs[0] if isinstance(spec, _values.PerReplicaSpec) else spec


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset is made from."""
    return list(dataset._inputs())


def seeds_of(dataset: tf.data.Dataset) -> list[Any]:
    """Returns what a dataset's own order follows: two seeds, zeros for none; hashes of its values.

    Those are the first ones of its arrays, and the number of its shard.
    """
    seeds = [(int(dataset._seed), int(dataset._seed2))] if hasattr(dataset, "_seed2") else []
    if dataset.options().deterministic is False or getattr(dataset, "_deterministic", 0) == "false":
        seeds = [(0, 0)]
    own = filter(tf.is_tensor, [*getattr(dataset, "_tensors", ()), getattr(dataset, "_index", 0)])
    first = [tf.reshape(one, [-1])[:1000] for one in own if one.dtype != tf.variant]
    as_text = map(tf.io.serialize_tensor, first)
    return [*seeds, *(int(tf.strings.to_hash_bucket_fast(text, 2**62)) for text in as_text)]


def has_global_seed() -> bool:
    """Returns whether a program has set a seed for all random numbers of TensorFlow."""
    if not tf.executing_eagerly():
        return tf.compat.v1.get_default_graph().seed is not None
    return _context.global_seed() is not None


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Returns how many elements a dataset puts into each of its own; None if it does not batch."""
    size = getattr(dataset, "_batch_size", None)
    return None if size is None else int(size)


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset draws another order each time, or datasets in its functions."""
    own = getattr(dataset, "_reshuffle_each_iteration", False) is not False
    return own or any(node.attr["reshuffle_each_iteration"].b for node in nodes_of(dataset))


def nodes_of(dataset: tf.data.Dataset) -> list[Any]:
    """Returns the nodes of a dataset's functions, and of the functions in these."""
    nodes: list[Any] = []
    for wrapper in dataset._functions():
        if hasattr(wrapper.function, "graph"):  # Not in tf.data's debug mode.
            graph = wrapper.function.graph.as_graph_def()
            nodes += graph.node
            for function in graph.library.function:
                nodes += function.node_def
    return nodes


def components(value: Any) -> tuple[Any, ...]:
    """Returns a value's component on each device; the value itself if it is not distributed."""
    return value.values if isinstance(value, DistributedValues) else (value,)


def per_replica(values: Sequence[Any]) -> Any:
    """Wraps one value per replica as `MirroredStrategy` does for values that may differ."""
    return _values.PerReplica(tuple(values))


def mirrored(values: Sequence[Any]) -> Any:
    """Wraps equal values, one per device, as a strategy does; a single value stays as it is."""
    return values[0] if len(values) == 1 else _values.Mirrored(tuple(values))


def canonical_device(device: str) -> str:
    """Spells a device name in full, missing parts filled in from the current device scope."""
    name: str = _device_util.resolve(device)
    return name


def current_device() -> str:
    """Returns the device that a `tf.device` around names; empty without one."""
    return _device_util.current() or ""


def is_variable(value: Any) -> bool:
    """Returns whether `value` is a variable that lives on one device."""
    return bool(_resource_variable_ops.is_resource_variable(value))


def known_device(value: Any) -> str:
    """Returns the device of a tensor; `""` if it has none yet, or only a host's name."""
    # Where replicas meet, TensorFlow places new tensors on the host, until the graph runs. A numpy
    # array has a device too, "cpu", which says nothing about where it is to go.
    device = str(getattr(value, "device", ""))
    return device if "/device:" in device else ""


def devices_of_values(value: Any) -> tuple[str, ...]:
    """Returns the devices of a distributed value's components, in the order of the replicas."""
    return tuple(map(known_device, value.values))


def replicas_of_plain_value() -> int:
    """Returns how many replicas a value stands for that is not distributed."""
    # In cross-replica context, MirroredStrategy passes one plain tensor if all replicas hold the
    # same object. Where several hosts train together, such a value is its host's.
    if not tf.distribute.in_cross_replica_context():
        return 1
    strategy = tf.distribute.get_strategy()
    return 1 if strategy.extended._in_multi_worker_mode() else strategy.num_replicas_in_sync


def device_types_with_kernel(op_name: str) -> frozenset[str]:
    """Returns the device types, such as "GPU", with a kernel of an op in this process."""
    kernel_list = _kernels.get_registered_kernels_for_op(op_name)
    return frozenset(kernel.device_type for kernel in kernel_list.kernel)


@functools.cache
def dtypes_of_op(op_name: str) -> frozenset[tf.DType]:
    """Returns the dtypes that an op allows for its attribute T; empty if it takes any dtype."""
    definition = _op_def_registry.get(op_name)
    return frozenset(
        tf.as_dtype(number)
        for known in (definition.attr if definition else ())
        if known.name == "T"
        for number in known.allowed_values.list.type
    )


def compiled_by_xla() -> bool:
    """Returns whether a function is being traced that XLA compiles as a whole."""
    return bool(_control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def constant_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value that a graph's constants give a tensor; None if it depends on others."""
    value: np.ndarray | None = _tensor_util.try_evaluate_constant(tensor)
    return value


def captured(tensor: tf.Tensor) -> tf.Tensor:
    """Captures an eager tensor in the graph that is being built, in bodies of loops too."""
    # TensorFlow does so by itself but in the gradient of a `tf.while_loop`, whose body knows only
    # the tensors of the graph around it.
    graph = tf.compat.v1.get_default_graph()
    if not getattr(graph, "is_control_flow_graph", False):
        return tensor
    with graph.outer_graph.as_default():
        tensor = captured(tensor)
        tensor = tf.compat.v1.get_default_graph().capture(tensor)
    return tensor


@contextlib.contextmanager
def plain_variables(device: str) -> Iterator[None]:
    """Has variables that are made within be plain ones on a device, in a strategy's scope too."""

    def create(_: Any, initial_value: Any = None, **options: Any) -> tf.Variable:
        with tf.init_scope(), tf.device(device):
            return _resource_variable_ops.ResourceVariable(
                initial_value, trainable=False, name=options["name"], dtype=options["dtype"]
            )

    with tf.variable_creator_scope(create):
        yield


def last_restored(variable: tf.Variable) -> int:
    """Returns the number of the last restoring of a checkpoint that set a variable; -1 for none."""
    number: int = variable._update_uid
    return number


def graph_of_function() -> tf.Graph | None:
    """Returns the graph of the function that is being traced, around loops in it; None for none."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def tensors_of_graph(structure: Any) -> list[tf.Tensor]:
    """Returns the tensors in a structure that the graph being built makes; none if run eagerly."""
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    leaves = tf.nest.flatten(structure, expand_composites=True)
    # A variable of several replicas also says that it is a tensor, and has a graph.
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is graph
    ]


def function_being_traced() -> tuple[Hashable, list[Any]]:
    """Returns a key of the function that is being traced, and objects that it cannot outlive."""
    # The key is the same when the function is traced again: its name, and the trainable variables
    # that it has read so far. A function that has read none is known by its graph.
    graph: Any = graph_of_function()
    variables = [variable for variable in graph._watched_variables if variable.trainable]
    if not variables:
        return weakref.ref(graph), [graph]
    return (graph.name, frozenset(variable._unique_id for variable in variables)), variables


def run_before_function_returns(op: tf.Operation) -> None:
    """Makes a function that is being traced wait for an op before it returns."""
    # TensorFlow does so by itself for each op that writes, but in the functions that it makes to go
    # backward through a `tf.function`.
    graph: Any = op.graph
    if graph.experimental_acd_manager is None and hasattr(graph, "control_outputs"):
        graph.control_outputs.append(op)


def tensor_around(placeholder: tf.Tensor) -> Any:
    """Returns the tensor around a function that a placeholder stands for; None for an argument."""
    captures = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is placeholder), None)


def id_on_replicas(tensor: tf.Tensor) -> int:
    """Returns the `id` of a tensor; for a variable's handle, of the variable, if it is mirrored."""
    variable = getattr(tensor, "_distributed_container", lambda: None)()
    return id(variable if isinstance(variable, _values.MirroredVariable) else tensor)


def value_at_call_time(
    make: Callable[[], tf.Tensor], spec: tf.TensorSpec, key: Any = None
) -> tf.Tensor:
    """Returns a tensor that is made again, eagerly, each time the outermost function is called."""
    graph: Any = graph_of_function()
    if graph is None:
        return make()
    captures = graph._function_captures
    key = object() if key is None else key  # Names the tensor in each graph around.
    if key in captures.by_ref_internal:
        return captures.by_ref_internal[key]
    with graph.as_default():
        value = graph.capture_call_time_value(make, spec, key)
    tensorflows = captures.by_ref_external[key]

    def at_call() -> Any:
        # TensorFlow would leave the placeholder in a condition or loop that calls this function,
        # where nothing feeds it.
        if tf.executing_eagerly():
            return tensorflows()
        return [value_at_call_time(make, spec, key)]

    at_call.output_spec = tensorflows.output_spec  # type: ignore[attr-defined]
    captures.by_ref_external[key] = at_call
    return value


def configure_coordination(
    leader: str, jobs: Mapping[str, int], start_seconds: float, heartbeat_seconds: float
) -> None:
    """Sets up the coordination service as TensorFlow's strategy does, with a limit to its start."""
    # By default, TensorFlow waits for an hour, with Python's lock held, for a host that has ended
    # while the servers started. After `start_seconds`, a `tf.errors.DeadlineExceededError` names
    # the missing hosts. A host that is silent for `heartbeat_seconds` is taken for dead: all others
    # get a `tf.errors.UnavailableError`.
    make_job = _context.coordination_config_pb2.CoordinatedJob
    _context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=round(start_seconds * 1000),
        heartbeat_timeout_in_ms=round(heartbeat_seconds * 1000),
        coordinated_jobs=[make_job(name=job, num_tasks=count) for job, count in jobs.items()],
    )
    # Registers all hosts or none, so that from then on their heartbeats tell which host has ended.
    # Older versions lack it: with them, a host that ends while servers start is waited for.
    config = _context.context().coordination_service
    if "cluster_register_with_barrier" in config.DESCRIPTOR.fields_by_name:
        config.cluster_register_with_barrier = True


class KeyValueStore:
    """Reads and writes the key-value store of TensorFlow's coordination service."""

    # TensorFlow would wait without end for a chief that is stopped, or cut off from the network. So
    # a thread of its own writes; callers get a `tf.errors.DeadlineExceededError`.

    def __init__(self) -> None:
        # From the beginning, because Python starts no threads at its end, when hosts say goodbye.
        self._writes: queue.SimpleQueue[tuple[Callable[[], None], concurrent.futures.Future[None]]]
        self._writes = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tfcdo store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Writes a new key."""
        self._write(lambda: _context.context().set_config_key_value(f"tfcdo/{key}", value))

    def get(self, key: str, timeout: float) -> str | None:
        """Waits up to `timeout` seconds for a key; returns its value, or None."""
        return _read(f"tfcdo/{key}", timeout)

    def delete(self, key: str) -> None:
        """Removes a key, so that it can be written again."""
        self._write(lambda: _context.context().delete_config_key_value(f"tfcdo/{key}"))

    def check_hosts(self, jobs: Mapping[str, int]) -> None:
        """Raises TensorFlow's error if the chief is silent, or a task of these jobs is dead."""
        # Only collectives get that error. A wait for a key would last for its whole time.
        self.delete("none")  # Which ends, if it gets no answer.
        states = _context.context().get_task_states(list(jobs.items())) if jobs else []
        tasks = [f"/job:{job}/task:{task}" for job, count in jobs.items() for task in range(count)]
        gone = [task for task, state in zip(tasks, states, strict=True) if state is not None]
        if gone:
            message = f"TensorFlow gets no heartbeats any more from {', '.join(gone)}"
            raise tf.errors.UnavailableError(None, None, message)

    def _write(self, call: Callable[[], None]) -> None:
        written: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._writes.put((call, written))
        try:
            written.result(_WRITE_SECONDS)
        except concurrent.futures.TimeoutError:
            message = f"the chief has not answered for {_WRITE_SECONDS:g} s"
            raise tf.errors.DeadlineExceededError(None, None, message) from None

    def _run(self) -> None:
        while True:
            call, written = self._writes.get()
            try:
                written.set_result(call())
            except Exception as error:
                written.set_exception(error)


def has_preemption_notice(timeout: float) -> bool:
    """Returns whether TensorFlow has given notice that a host will be taken away."""
    return _read("TF_DEFAULT_PREEMPTION_NOTICE_KEY", timeout) is not None


def _read(key: str, timeout: float) -> str | None:
    milliseconds = max(1, round(timeout * 1000))  # 0 would wait without end.
    try:
        return str(_context.context().get_config_key_value(key, milliseconds))
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def abort_collectives(late: bool, reason: str) -> None:
    """Ends all collective ops of this process, those to come too, with an error and its message."""
    code = tf.errors.DEADLINE_EXCEEDED if late else tf.errors.FAILED_PRECONDITION
    _context.context().abort_collective_ops(code, reason)


def read_profile(path: str) -> Any:
    """Reads an `XSpace`, the planes of lines of events that TensorFlow's profiler has written."""
    # Only a trace needs it, and it takes a while to import.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    with open(path, "rb") as file:  # noqa: PTH123 - the path comes from TensorFlow's profiler
        space.ParseFromString(file.read())
    return space


def tensorflow_has_started() -> bool:
    """Returns whether TensorFlow has made its devices, after which no server can be set up."""
    return _context.context()._context_handle is not None
