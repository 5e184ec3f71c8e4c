"""TensorFlow's strategies with tfcdo's all-reduces, for Keras 3."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcdo import checks, log, tf_internals, version, virtual_devices
from tfcdo.cluster import config, rendezvous, session, worker
from tfcdo.cluster.watch import HostDelay
from tfcdo.cross_device_ops import (
    AllReduceCrossDeviceOps,
    AutoAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from tfcdo.exchange.casts import check_exchange
from tfcdo.exchange.diloco import DiLoCo
from tfcdo.exchange.protocol import SUM, Exchange, identity
from tfcdo.execute import between, nccl
from tfcdo.execute.request import brief, check_options, different_devices
from tfcdo.plan.decide import BetweenHosts
from tfcdo.plan.plan import ValueSpec
from tfcdo.topology.detection import detect, num_cores
from tfcdo.topology.topology import Topology
from tfcdo.training import alike, diloco, models, step
from tfcdo.training.extended import ReducesStructures, ReplicaExtended

models.install()

_TIMEOUT_SECONDS = 600.0
# Once all hosts have met, the start of TensorFlow's servers takes less than a second.
_SERVER_START_SECONDS = 120.0
_HEARTBEAT_SECONDS = 10.0  # As TensorFlow has it.


class MirroredStrategy(ReducesStructures, tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy` for Keras 3: trains as one device, with tfcdo's all-reduces.

    Args:
      devices: the devices' names, one replica each; None for all GPUs, or all (virtual) CPU devices
        where there are none.
      cross_device_ops: how to reduce; None for `NcclAllReduce` where NCCL can run, else
        `AutoAllReduce`.
      shard_optimizer_state: whether the optimizer's state for each variable, such as Adam's two
        moments, is on one device only, which updates the variable and sends it to the others.
        Adam then needs 8 + 8/K bytes per parameter on K devices, instead of 16.
      synchronize_batch_norm: whether each `BatchNormalization` that is made in the scope
        normalizes over the whole batch, as with Keras's `synchronized=True`; this sends two small
        vectors per layer and step, and as many for the gradients. By default it normalizes over
        each replica's part, which is what Keras does.

    Raises:
      TypeError: if an argument is of another type, or `cross_device_ops` cannot shard.
      ValueError: if one of `devices` does not exist or comes twice, or TF_CONFIG cannot be read.

    Example:
      >>> strategy = MirroredStrategy(["/cpu:0"])
      >>> float(strategy.reduce("SUM", {"loss": tf.constant(2.0)}, axis=None)["loss"])
      2.0
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        *,
        shard_optimizer_state: bool = False,
        synchronize_batch_norm: bool = False,
    ) -> None:
        # An empty list means None: scripts pass tf.config.list_logical_devices("GPU").
        names = checks.items_of(devices)
        if names is None and devices is not None:
            raise TypeError(f"devices must be a list of device names or None; got {devices!r}")
        if not names and session.current() is not None:  # TensorFlow would take all hosts' devices.
            names = virtual_devices.names_here()
        devices = None if names is None else different_devices(names)
        # TensorFlow accepts anything, even a class, and fails in the first reduction.
        if cross_device_ops is not None and not isinstance(
            cross_device_ops, tf.distribute.CrossDeviceOps
        ):
            raise TypeError(
                "cross_device_ops must be an object such as tfcdo.AutoAllReduce(), or None; "
                f"got {brief(cross_device_ops)}"
            )
        checks.check_bool("shard_optimizer_state", shard_optimizer_state)
        checks.check_bool("synchronize_batch_norm", synchronize_batch_norm)
        hosts = config.num_training_hosts()  # Its errors say more than TensorFlow's.
        if hosts > 1 and session.current() is None:
            log.warn_once(
                f"MirroredStrategy trains on this host alone, and TF_CONFIG names {hosts} hosts, "
                "each of which then trains a model of its own: use "
                "tfcdo.MultiWorkerMirroredStrategy() to train one model on all of them"
            )
        # TensorFlow's own __init__ would make its own extended class.
        extended = _MirroredExtended(self, devices, cross_device_ops)
        tf.distribute.Strategy.__init__(self, extended)
        if cross_device_ops is None:
            extended._cross_device_ops = _default_ops(extended.worker_devices)
        _set_up(extended, shard_optimizer_state, synchronize_batch_norm)


class MultiWorkerMirroredStrategy(ReducesStructures, tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` for Keras 3, with tfcdo's all-reduces.

    Inside a host, values are summed as `cross_device_ops` says; between hosts, one device a host
    exchanges each pack. Where NCCL can run, and neither `implementation` nor `cross_device_ops`
    asks for another way, dense values are instead all-reduced by one NCCL collective over all
    GPUs of all hosts. (This has never been seen on GPUs: the tests do it with rings, on virtual CPU
    devices.) Create it before anything else of TensorFlow runs.

    Args:
      cluster_resolver: says which hosts there are and which this is; None to read TF_CONFIG.
      communication_options: `implementation` and `bytes_per_pack` (by default 4 MiB) are those
        between hosts; `timeout_seconds` (by default 600) is how long to wait for another host,
        when it starts and in each collective.
      cross_device_ops: how to reduce inside a host, one of tfcdo's classes; None for
        `NcclAllReduce` where NCCL can run, else `AutoAllReduce`.
      devices_per_worker: how many devices of this host to use, as many on each host; None for what
        `tfcdo launch` says, else all GPUs, or all (virtual) CPU devices that are configured.
      exchange: how hosts add up gradients of float32 and float64: "bfloat16" or "float16" to send
        them in half of the bytes or less, "int8" for about a quarter, an object of
        `tfcdo.exchange` or a class of your own, or a function to one from a variable's path (None
        for a value that no Keras optimizer reduces) and a `ValueSpec`. None for exact sums.
        docs/wire-numerics.md has the bounds of the error. Packs under 4 KiB, values that are
        reduced alone (losses, metrics, statistics), values whose size is not known while a function
        is traced, rows and gathered values are exact. NCCL then does not all-reduce over all GPUs.
        Its state, such as rounding errors, is in variables, saved with
        `tf.train.Checkpoint(ops=strategy.cross_device_ops)`.
      outer: a `tfcdo.exchange.DiLoCo`: hosts train alone, and exchange the differences of their
        parameters, as `exchange` says, after a number of updates. `strategy.run` is then one
        host's: losses are divided by its own batch. None to sum the gradients of all hosts in each
        step.
      shard_optimizer_state: see `MirroredStrategy`; the state is sharded within each host.
      synchronize_batch_norm: see `MirroredStrategy`.
      check_in_sync: whether Keras's `fit` compares digests of the weights of all replicas after
        each of its first three steps, and the first of each epoch, as `evaluate` and `predict` do
        after their first, and raises a RuntimeError if hosts differ. Own loops are not checked.

    Raises:
      ValueError: if TF_CONFIG or the cluster resolver contradicts itself or this machine, or
        `exchange` is the name of another dtype.
      TypeError: if an argument is of another type.
      RuntimeError: if TensorFlow has already started, or there are fewer devices.
      ClusterError: (a RuntimeError) if a host does not come in time, cannot be reached or is set up
        differently, or if this host's port is in use; the message names it.

    Example:
      >>> # Without TF_CONFIG, one host on its own.
      >>> strategy = MultiWorkerMirroredStrategy(devices_per_worker=1)
      >>> strategy.num_replicas_in_sync
      1
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        cross_device_ops: AllReduceCrossDeviceOps | ReductionToOneDevice | None = None,
        devices_per_worker: int | None = None,
        exchange: str | Exchange | Callable[[str | None, ValueSpec], Exchange] | None = None,
        outer: DiLoCo | None = None,
        shard_optimizer_state: bool = False,
        synchronize_batch_norm: bool = False,
        check_in_sync: bool = True,
    ) -> None:
        if communication_options is None:
            communication_options = tf.distribute.experimental.CommunicationOptions()
        check_options(communication_options, "communication_options")
        if cross_device_ops is not None and not isinstance(
            cross_device_ops, (AllReduceCrossDeviceOps, ReductionToOneDevice)
        ):
            raise TypeError(
                "cross_device_ops must be one of tfcdo's, such as "
                f"tfcdo.HierarchicalCopyAllReduce(), or None; got {cross_device_ops!r}"
            )
        if devices_per_worker is not None:
            checks.check_int("devices_per_worker", devices_per_worker, at_least=1)
        is_function = callable(exchange) and not isinstance(exchange, (type, Exchange))
        if not is_function:  # A function is asked for each variable.
            exchange = SUM if exchange is None else check_exchange("exchange", exchange)
        if outer is not None and not isinstance(outer, DiLoCo):
            raise TypeError(f"outer must be a tfcdo.exchange.DiLoCo or None; got {outer!r}")
        switches = {
            "shard_optimizer_state": shard_optimizer_state,
            "synchronize_batch_norm": synchronize_batch_norm,
            "check_in_sync": check_in_sync,
        }
        for name, value in switches.items():
            checks.check_bool(name, value)
        # TensorFlow's own __init__ would make its own extended class.
        tf.distribute.Strategy.__init__(
            self,
            _MultiWorkerExtended(
                self,
                cluster_resolver,
                communication_options,
                cross_device_ops,
                devices_per_worker or worker.devices_per_worker(),
                exchange,
                outer,
                switches,
            ),
        )
        _set_up(self.extended, shard_optimizer_state, synchronize_batch_norm)

    @property
    def cross_device_ops(self) -> AllReduceCrossDeviceOps | ReductionToOneDevice:
        """The object that reduces: yours, connected to the other hosts.

        It has the state of `exchange`, for checkpoints and `reset_error_feedback`.

        Returns:
          An object of the class that was given, or of the default one.

        Example:
          >>> type(MultiWorkerMirroredStrategy().cross_device_ops).__name__
          'AutoAllReduce'
        """
        ops: AllReduceCrossDeviceOps | ReductionToOneDevice = self.extended._cross_device_ops
        return ops

    def exchange_parameters(self, optimizer: Any) -> None:
        """Exchanges what hosts have trained since the last exchange of `outer`.

        `Model.fit` calls it at its end; a loop of your own and `train_on_batch` must, for all hosts
        to have the same model. All hosts must call it, outside of a `tf.function`. Nothing is sent
        if there were no steps since the last exchange.

        Args:
          optimizer: the Keras optimizer that was made in this strategy's scope.

        Raises:
          ValueError: if the strategy has no `outer`.
          TypeError: if `optimizer` is not an optimizer.

        Example:
          >>> import keras
          >>> MultiWorkerMirroredStrategy().exchange_parameters(keras.optimizers.SGD())
          Traceback (most recent call last):
          ...
          ValueError: outer must be a tfcdo.exchange.DiLoCo to exchange parameters; got None
        """
        checks.check_optimizer(optimizer)
        if self.extended.outer is None:
            raise ValueError(
                "outer must be a tfcdo.exchange.DiLoCo to exchange parameters; got None"
            )
        diloco.finish(self, diloco.states_of(optimizer))

    def host_delays(self) -> tuple[HostDelay, ...]:
        """Says how far each host was behind the others in the last 10 to 20 steps.

        The host that enters a collective last waits least in it, so hosts compare their waits.

        Returns:
          One for each host, in their order; empty on one host, without 10 recent steps, and when
          the first host has ended.

        Example:
          >>> MultiWorkerMirroredStrategy().host_delays()  # Without TF_CONFIG.
          ()
        """
        joined = session.current()
        with contextlib.suppress(tf.errors.UnavailableError):  # The first host keeps the numbers.
            return joined.watch.host_delays() if joined else ()
        return ()


def set_distribution(distribution: Any) -> None:
    """Trains all models of this process with a distribution, on each backend of Keras.

    On TensorFlow's backend, `keras.distribution.set_distribution` ignores what it accepts: models
    train on one device. There this function makes tfcdo's strategy the process's, as
    `tf.distribute.experimental_set_strategy` does: `MirroredStrategy` over the distribution's
    devices, or `MultiWorkerMirroredStrategy` where TF_CONFIG names several hosts. On other backends
    it calls Keras's function.

    Args:
      distribution: a `keras.distribution.DataParallel`; or that class itself, for all devices, as
        several hosts need it, because it looks for devices when an object is made; or None, for
        none.

    Raises:
      TypeError: on TensorFlow, if `distribution` is something else, such as a `ModelParallel`.
      ValueError: on several hosts of TensorFlow, if it is an object with devices of its own.
      RuntimeError: on several hosts of TensorFlow, as `MultiWorkerMirroredStrategy`.

    Example:
      >>> import keras
      >>> set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
      >>> tf.distribute.get_strategy().num_replicas_in_sync
      1
      >>> set_distribution(None)
    """
    data_parallel = keras.distribution.DataParallel
    if keras.backend.backend() != "tensorflow":
        made = distribution() if distribution is data_parallel else distribution
        keras.distribution.set_distribution(made)
        return
    is_object = isinstance(distribution, data_parallel)
    if not is_object and distribution not in (None, data_parallel):
        raise TypeError(
            "distribution must be a keras.distribution.DataParallel or None on TensorFlow's "
            f"backend, which has no model parallelism; got {distribution!r}: to divide the "
            "optimizer's state, use tfcdo.MirroredStrategy(shard_optimizer_state=True)"
        )
    strategy = None
    if distribution is not None and config.num_training_hosts() > 1:
        if is_object:
            raise ValueError(
                "distribution must be the class keras.distribution.DataParallel on several hosts, "
                "so that hosts meet before TensorFlow looks for devices; got an object of it"
            )
        strategy = MultiWorkerMirroredStrategy()
    elif distribution is not None:
        made = distribution if is_object else distribution()
        strategy = MirroredStrategy([f"/{name}" for name in made.device_mesh.devices.flat])
    tf.distribute.experimental_set_strategy(strategy)


def is_chief() -> bool:
    """Tells whether this process is the one that writes checkpoints, models and logs.

    Returns:
      Whether this host is the first one of the current strategy, else of TF_CONFIG; True for a
      process that trains alone.

    Raises:
      ValueError: if TF_CONFIG is not valid.

    Example:
      >>> is_chief()
      True
    """
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return bool(strategy.extended.should_checkpoint)
    joined = session.current()
    cluster = config.from_tf_config() if joined is None else joined.cluster
    return cluster is None or cluster.is_chief


def _default_ops(devices: Sequence[str]) -> AllReduceCrossDeviceOps:
    """Returns the fastest way of reducing on some devices of one host."""
    return NcclAllReduce() if nccl.nccl_status(devices).can_run else AutoAllReduce()


def _set_up(
    extended: _MirroredExtended | _MultiWorkerExtended, shard: bool, synchronize: bool
) -> None:
    ops = extended._cross_device_ops
    if shard and not isinstance(ops, AllReduceCrossDeviceOps):
        raise TypeError(
            "shard_optimizer_state=True needs cross_device_ops that is one of tfcdo's all-reduce "
            f"classes, such as tfcdo.AutoAllReduce(), or None; got {ops!r}"
        )
    extended.shard_optimizer_state = shard
    extended.synchronize_batch_norm = synchronize


class _MirroredExtended(ReplicaExtended, tf_internals.MirroredExtended):
    """Does the strategy's work for TensorFlow: as its own does, but for moving statistics."""


class _MultiWorkerExtended(ReplicaExtended, tf_internals.MultiWorkerExtended):
    """Does the strategy's work for TensorFlow: devices, variables, and reductions."""

    _has_server = False  # Whether the process has one.
    # TensorFlow's own, which it has for a second strategy and an evaluator, knows no reasons.
    _enable_check_health = False

    def __init__(
        self,
        strategy: MultiWorkerMirroredStrategy,
        resolver: Any,
        options: Any,
        cross_device_ops: AllReduceCrossDeviceOps | ReductionToOneDevice | None,
        devices_per_worker: int | None,
        exchange: Any,
        outer: DiLoCo | None,
        switches: Mapping[str, bool],
    ) -> None:
        if resolver is None:
            config.from_tf_config()  # Its errors say more than TensorFlow's.
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        cluster = config.from_resolver(resolver)
        timeout = options.timeout_seconds or _TIMEOUT_SECONDS
        self._devices_wanted = devices_per_worker
        self._network: between.Network | None = None
        self.outer = outer
        # One host alone has nothing to compare.
        self.checks_in_sync = (
            switches["check_in_sync"] and cluster is not None and len(cluster.tasks) > 1
        )
        settings = {
            "devices_per_worker": devices_per_worker or virtual_devices.devices_here(None)[1],
            **_settings(options, cross_device_ops, exchange, outer),
            **{name: str(value) for name, value in switches.items()},
        }
        joined = session.current()
        if joined is not None:
            # TensorFlow's constructor would wait without end for hosts with another strategy.
            joined.agree({"what": "strategy", **settings})
        membership = ""
        if not tf_internals.tensorflow_has_started():
            membership = _prepare(cluster, settings, devices_per_worker, timeout)
        elif cluster is not None and not self._has_server:
            raise RuntimeError(
                "MultiWorkerMirroredStrategy must be made before anything else of TensorFlow runs, "
                "tf.config.list_logical_devices() included: create the strategy first"
            )
        # TensorFlow would set its server up again for another strategy, and data that hosts are
        # sending each other by then would never arrive.
        self._std_server_started = self._has_server
        super().__init__(strategy, cluster_resolver=resolver, communication_options=options)
        _MultiWorkerExtended._has_server |= cluster is not None
        ops = self._ops_alone = cross_device_ops or _default_ops(self.worker_devices)
        if cluster is not None and len(cluster.tasks) > 1:
            is_first = joined is None
            joined = session.join(
                cluster,
                tf_internals.KeyValueStore,
                tf_internals.abort_collectives,
                timeout,
                membership,
            )
            if is_first:
                alike.draw_as_chief(joined)
            hint = options.implementation.value.lower()
            devices = self.worker_devices
            flat = exchange == SUM and _runs_flat(hint, cross_device_ops, devices)
            settings["what"] = "machine of a strategy"
            settings["cross_device_ops in use"] = f"{type(ops).__name__}, {flat=}"
            # All hosts plan for the chief's machine, so that their packs are the same.
            text = joined.text_of_chief(settings, lambda: detect(devices).to_json())
            self._network = between.Network(
                joined, "nccl" if flat else hint, devices, Topology.from_json(text)
            )
            ops = ops._between(
                self._network,
                BetweenHosts(options.bytes_per_pack or BetweenHosts.bytes_per_pack, flat, exchange),
            )
        # Only now, because TensorFlow's constructor insists on its own.
        self._cross_device_ops = ops

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        kind, available = virtual_devices.devices_here(cluster_resolver, self._devices_wanted)
        count = self._devices_wanted or available
        if count > available:
            raise RuntimeError(
                f"devices_per_worker must be at most the number of {kind} devices that TensorFlow "
                f"has here, {available}; got {count}"
            )
        return tuple(f"{worker_device}/device:{kind}:{i}" for i in range(count)), kind

    @property
    def _cross_device_ops(self) -> Any:
        return self._ops_alone if step.now.host_alone else self._ops

    @_cross_device_ops.setter
    def _cross_device_ops(self, ops: Any) -> None:
        self._ops = ops

    @property
    def _num_replicas_in_sync(self) -> int:
        of_all: int = super()._num_replicas_in_sync
        return len(self.worker_devices) if step.now.host_alone else of_all

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        if step.now.host_alone:
            return replica_id
        of_all: int = super()._get_replica_id_in_sync_group(replica_id)
        return of_all

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        # TensorFlow also asks in the replica's thread, which does not know that the host is alone.
        return replica_id_in_sync_group % len(self.worker_devices)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        pairs = [(self._of_each(value), where) for value, where in value_destination_pairs]
        return super()._batch_reduce_to(reduce_op, pairs, options)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return super()._reduce_to(reduce_op, self._of_each(value), destinations, options)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        tensorflows = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
        if replica_id > 0 or self._network is None:
            return tensorflows
        network = self._network

        def initial_value() -> tf.Tensor:
            if not tf.executing_eagerly():
                return tensorflows()  # TensorFlow lifts this out of a function, keys and all.
            value = kwargs["initial_value"]
            with tf.device(device):
                value = value() if callable(value) else value
                value = getattr(value, "wrapped_value", value)  # A value from a checkpoint.
                value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            return between.copy_from_chief(network, value, device)

        return initial_value


def _settings(options: Any, ops: Any, exchange: Any, outer: DiLoCo | None) -> dict[str, Any]:
    """Returns the strategy's arguments by name, as hosts compare them."""
    of_outer = vars(outer).items() if outer else ()  # Its optimizer's own are compared later.
    return {
        **(ops.compared_among_hosts if ops else {"cross_device_ops": "by default"}),
        "communication_options.implementation": options.implementation.value,
        "communication_options.bytes_per_pack": str(options.bytes_per_pack),
        "exchange": identity(exchange),
        "outer": [f"{name}={identity(one)}" for name, one in of_outer] or "None",
    }


def _prepare(
    cluster: config.Cluster | None,
    own_settings: Mapping[str, Any],
    devices_per_worker: int | None,
    timeout: float,
) -> str:
    """Prepares the process before TensorFlow starts; returns the name of the hosts' membership."""
    has_gpus = bool(tf.config.get_visible_devices("GPU"))
    if devices_per_worker is not None and not has_gpus:
        virtual_devices.configure_virtual_cpus(devices_per_worker)
    if cluster is None:
        return ""
    config.connect_without_proxy(cluster)  # One host's server asks for itself, too.
    if len(cluster.tasks) == 1:
        return ""
    if not has_gpus:
        virtual_devices.configure_threads(own_settings["devices_per_worker"], num_cores())
    settings = {
        "cluster": [f"{task.job} {task.index} at {task.address}" for task in cluster.tasks],
        "version of tfcdo": version.__version__,
        "version of TensorFlow": tf.__version__,
        "version of Keras": keras.__version__,
        **own_settings,
    }
    membership = rendezvous.meet(cluster, settings, timeout, worker.cluster_token())
    tf_internals.configure_coordination(
        leader=cluster.tasks[0].device_prefix,
        jobs=collections.Counter(task.job for task in cluster.tasks),
        start_seconds=_SERVER_START_SECONDS,
        heartbeat_seconds=_HEARTBEAT_SECONDS,
    )
    return membership


def _runs_flat(hint: str, ops: Any, devices: Sequence[str]) -> bool:
    """Returns whether NCCL all-reduces over all devices of all hosts at once, or logs why not."""
    # One device a host: the collective between the hosts is over all devices already.
    if hint == "ring" or len(devices) == 1:
        return False
    status = nccl.nccl_status(devices)
    if ops is not None and not isinstance(ops, NcclAllReduce):
        problem = (
            f"cross_device_ops is {type(ops).__name__}, which sums inside each host; leave it out, "
            "or give tfcdo.NcclAllReduce(), for one collective over all devices"
        )
    elif status.can_run:
        return True
    else:
        problem = str(status)
    if hint == "nccl":
        log.warn_once(
            "NCCL is asked for between hosts, but instead of one collective over all devices of "
            f"all hosts, one device a host takes part for each pack: {problem}"
        )
    return False
