"""Asks a probe one thing at a time, each with a time limit, and collects the answers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

from tfcdo.bench import worker_pool
from tfcdo.cluster import config
from tfcdo.launch import cluster as launch_cluster
from tfcdo.topology.topology import Topology

# The pairs of classes that are compared, tfcdo's and TensorFlow's; what a strategy that is given no
# cross-device ops uses is TensorFlow's way to choose by itself.
COMPARED = (
    ("tfcdo.AutoAllReduce", "tf.CollectiveAllReduce"),
    ("tfcdo.HierarchicalCopyAllReduce", "tf.HierarchicalCopyAllReduce"),
    ("tfcdo.ReductionToOneDevice", "tf.ReductionToOneDevice"),
    ("tfcdo.NcclAllReduce", "tf.NcclAllReduce"),
)
# The strategies under which a tiny model trains.
STRATEGIES = ("tfcdo.MirroredStrategy", "tf.distribute.MirroredStrategy")
# Seconds for each question.
_LIMITS = {"versions": 120.0, "machine": 120.0, "pair": 15.0, "sum": 60.0, "fit": 120.0}
# Seconds until a host that does not answer counts as not reached.
_SECONDS_OF_A_HOST = 3.0
# Number of hanging pairs after which the rest are skipped: each costs a time-out and a new start.
_MOST_HANGING = 3

# Asks a question with its arguments. Raises `worker_pool.WorkerError` if no answer comes.
Ask = Callable[..., Any]
Tell = Callable[[str], object]
# The indices of the sending and of the receiving device.
Pair = tuple[int, int]
_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error instead of an answer; the probe may hang instead."""

    error: str
    hangs: bool = False


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions of packages, None where there is none; why this TensorFlow cannot be used, if so."""

    tfcdo: str
    python: str
    tensorflow: str | None = None
    keras: str | None = None
    numpy: str | None = None
    cuda: str | None = None  # That TensorFlow was built with.
    without_kernels: Sequence[str] = ()  # GPUs for which this TensorFlow has no compiled kernels.
    problem: str = ""
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a machine, and tfcdo's choices for them."""

    physical: Sequence[str]  # Names of the devices that TensorFlow sees.
    logical: Sequence[str]  # Names of the devices that they are used as.
    examined: Sequence[str]  # Full names.
    description: str  # The examined devices'.
    on_cpu: bool
    gpus_of_nvidia_smi: Sequence[str]
    topology: str  # JSON.
    topology_reason: str  # How it was found.
    nccl_problem: str = ""
    nccl_remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """A check that has ended: what was incorrect, if anything, and whether it could run here."""

    problem: str = ""
    ran: bool = True


@dataclasses.dataclass(frozen=True)
class Host:
    """One host of the cluster as this one sees it; a refused connection is an answer."""

    name: str
    is_here: bool
    reached: bool
    status: str


@dataclasses.dataclass(frozen=True)
class TfConfig:
    """Content of TF_CONFIG, its problem if it has one, and the hosts that train together."""

    text: str
    problem: str = ""
    hosts: tuple[Host, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """All answers; None, or empty, where the doctor did not come that far."""

    versions: Versions | Failure
    machine: Machine | Failure | None = None
    tf_config: TfConfig = TfConfig("")
    pairs: Mapping[Pair, Check | Failure] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, Check | Failure] = dataclasses.field(default_factory=dict)
    fits: Mapping[str, Check | Failure] = dataclasses.field(default_factory=dict)

    @property
    def examined(self) -> Sequence[str]:
        """Returns the names of the devices that are examined; none if they cannot be used."""
        return self.machine.examined if isinstance(self.machine, Machine) else ()

    @functools.cached_property
    def topology(self) -> Topology | None:
        """Returns the topology of the devices."""
        if not isinstance(self.machine, Machine):
            return None
        return Topology.from_json(self.machine.topology)


class Probes(contextlib.ExitStack):
    """Keeps one probe running: after one that hung or ended, the next question starts another."""

    _command = (sys.executable, "-m", "tfcdo.doctor.probe")
    _pool: worker_pool.WorkerPool | None = None

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self._count = count

    def ask(self, question: str, **arguments: Any) -> Any:
        """Asks the probe; see `Ask`."""
        try:
            if self._pool is None:
                # TF_CONFIG is examined in this process; the probe is a separate process.
                variables = {"TF_CONFIG": "{}", "TF_CPP_MIN_LOG_LEVEL": "2"}
                variables["KERAS_BACKEND"] = "tensorflow"
                workers = worker_pool.start_workers(self._command, [variables])
                self._pool = self.enter_context(workers)
                if question not in ("versions", "machine"):
                    self._pool.call("machine", _LIMITS["machine"], count=self._count)
            return self._pool.call(question, _LIMITS[question], **arguments)[0]
        except worker_pool.WorkerLostError:
            self._pool = None
            self.close()
            raise


def examine(ask: Ask, count: int | None, tell: Tell = lambda message: None) -> Report:
    """Examines this machine."""
    tell("Looking at TF_CONFIG")
    given = examine_tf_config()
    tell("Starting TensorFlow")
    versions = _answer(Versions, ask, "versions")
    if isinstance(versions, Failure) or versions.problem:
        return Report(versions, tf_config=given)
    tell("Looking at the devices")
    machine = _answer(Machine, ask, "machine", count=count)
    if isinstance(machine, Failure):
        return Report(versions, machine, given)
    pairs = dict(_pairs(ask, len(machine.examined), tell))
    sums, fits = {}, {}
    for name in itertools.chain.from_iterable(COMPARED):
        tell(f"Summing with {name}")
        sums[name] = _answer(Check, ask, "sum", name=name)
    for name in STRATEGIES if versions.keras else ():
        tell(f"Training under {name}")
        fits[name] = _answer(Check, ask, "fit", name=name)
    return Report(versions, machine, given, pairs, sums, fits)


def examine_tf_config() -> TfConfig:
    """Reads TF_CONFIG and tries to reach each host that it names."""
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return TfConfig("")
    try:
        cluster = config.from_tf_config()
    except ValueError as error:
        return TfConfig(text, str(error))
    if cluster is None:
        return TfConfig(text)
    with futures.ThreadPoolExecutor(len(cluster.tasks)) as pool:
        hosts = pool.map(lambda index: _reach(cluster, index), range(len(cluster.tasks)))
    return TfConfig(text, hosts=tuple(hosts))


def _reach(cluster: config.Cluster, index: int) -> Host:
    address = cluster.tasks[index].address
    is_here = index == cluster.index
    try:
        if is_here:
            launch_cluster.check_port_is_free(address)
            reached, status = True, "this process's own; the port is free"
        else:
            socket.create_connection(
                config.split_address(address), timeout=_SECONDS_OF_A_HOST
            ).close()
            reached, status = True, "a worker listens there"
    except ConnectionRefusedError:
        reached, status = True, "the machine answers; no worker listens there yet"
    except OSError as error:
        # A name that nobody knows, no route, or silence, as behind a firewall.
        problem = "this process's own port cannot be used" if is_here else "not reached"
        reached, status = False, f"{problem}: {error.strerror or error}"
    return Host(cluster.name(index), is_here, reached, status)


def _pairs(ask: Ask, count: int, tell: Tell) -> Iterator[tuple[Pair, Check | Failure]]:
    """Tests each ordered pair of devices, until too many hang."""
    hanging = 0
    for source, target in itertools.permutations(range(count), 2):
        if hanging == _MOST_HANGING:
            return
        tell(f"Copying from device {source} to {target}")
        answer = _answer(Check, ask, "pair", source=source, target=target)
        hanging += isinstance(answer, Failure) and answer.hangs
        yield (source, target), answer


def _answer(kind: type[_Kind], ask: Ask, question: str, **arguments: Any) -> _Kind | Failure:
    try:
        return kind(**ask(question, **arguments))
    except worker_pool.WorkerTimeoutError:
        return Failure(f"no end within {_LIMITS[question]:g} s", hangs=True)
    except worker_pool.WorkerError as error:
        return Failure(str(error).strip())
