"""Asks a probe one thing at a time, each with a time limit, and makes findings of the answers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

from tfcdo.bench import worker_pool
from tfcdo.cluster import config, rendezvous
from tfcdo.topology.topology import Topology

# Classes that are compared: tfcdo's, and TensorFlow's, whose own choice is a strategy's default.
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
_SECONDS_OF_A_HOST = 3.0  # Until one that does not answer counts as not reached.
_MOST_HANGING = 3  # After these pairs the rest are skipped: each costs a time-out and a new start.

OK, NOTE, WRONG = "ok", "note", "wrong"
_MOST_NAMED = 12  # Pairs in one finding.
_REPORT = "please report this, with the output of `tfcdo doctor`"

# Asks a question with its arguments; returns the answer or a `Failure`.
Ask = Callable[..., Any]
Tell = Callable[[str], object]
Pair = tuple[int, int]  # The indices of the sending and of the receiving device.


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
    topology: Topology
    topology_reason: str  # How it was found.
    nccl_problem: str = ""
    nccl_remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """A check that has ended: what was incorrect, if anything, and whether it could run here."""

    problem: str = ""
    ran: bool = True


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: `WRONG` makes the exit status 1, `NOTE` is worth knowing."""

    severity: str
    text: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class TfConfig:
    """Content of TF_CONFIG, its problem if it has one, and the hosts that train together."""

    text: str
    problem: str = ""
    hosts: tuple[Finding, ...] = ()  # Whether this one reaches each; a refusal is an answer.


@dataclasses.dataclass(frozen=True)
class Report:
    """All answers; None, or empty, where the doctor did not come that far."""

    versions: Versions | Failure
    machine: Machine | Failure | None = None
    tf_config: TfConfig = TfConfig("")
    pairs: Mapping[Pair, Check | Failure] = dataclasses.field(default_factory=dict)
    # Sums of each of `COMPARED`, and metrics of `fit` under `STRATEGIES`.
    checks: Mapping[str, Check | Failure] = dataclasses.field(default_factory=dict)

    @property
    def examined(self) -> Sequence[str]:
        """Returns the names of the devices that are examined; none if they cannot be used."""
        return self.machine.examined if isinstance(self.machine, Machine) else ()


class Probes(contextlib.ExitStack):
    """Keeps one probe running: after one that hung or ended, the next question starts another."""

    # Not by -m, which would import a file of the current folder named as a module.
    _command = (sys.executable, str(pathlib.Path(__file__).with_name("probe.py")))
    _pool: worker_pool.WorkerPool | None = None

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self._count = count

    def ask(self, question: str, **arguments: Any) -> Any:
        """Asks the probe; see `Ask`."""
        try:
            if self._pool is None:
                # TF_CONFIG is examined in this process; the probe is a separate process.
                own = {"TF_CONFIG": "{}", "TF_CPP_MIN_LOG_LEVEL": "2", **worker_pool.KERAS_DEFAULTS}
                self._pool = self.enter_context(worker_pool.start_workers(self._command, [own]))
                if question not in ("versions", "machine"):
                    self._pool.call("machine", _LIMITS["machine"], count=self._count)
            return self._pool.call(question, _LIMITS[question], **arguments)[0]
        except worker_pool.WorkerError as error:
            if isinstance(error, worker_pool.WorkerLostError):
                self._pool = None
                self.close()
            if isinstance(error, worker_pool.WorkerTimeoutError):
                return Failure(f"no end within {_LIMITS[question]:g} s", hangs=True)
            return Failure(str(error).strip())


def examine(ask: Ask, count: int | None, tell: Tell) -> Report:
    """Examines this machine."""
    tell("Looking at TF_CONFIG")
    given = examine_tf_config()
    tell("Starting TensorFlow")
    versions = ask("versions")
    if isinstance(versions, Failure) or versions.problem:
        return Report(versions, tf_config=given)
    tell("Looking at the devices")
    machine = ask("machine", count=count)
    if isinstance(machine, Failure):
        return Report(versions, machine, given)
    pairs = dict(_pairs(ask, len(machine.examined), tell))
    checks = {}
    for name in itertools.chain.from_iterable(COMPARED):
        tell(f"Summing with {name}")
        checks[name] = ask("sum", name=name)
    for name in STRATEGIES if versions.keras else ():
        tell(f"Training under {name}")
        checks[name] = ask("fit", name=name)
    return Report(versions, machine, given, pairs, checks)


def examine_tf_config() -> TfConfig:
    """Reads TF_CONFIG and tries to reach each host that it names."""
    text = os.environ.get("TF_CONFIG", "").strip()
    try:
        cluster = config.from_tf_config()
    except ValueError as error:
        return TfConfig(text, str(error))
    if cluster is None:
        return TfConfig(text)
    with futures.ThreadPoolExecutor(len(cluster.tasks)) as pool:
        hosts = pool.map(lambda index: _reach(cluster, index), range(len(cluster.tasks)))
    return TfConfig(text, hosts=tuple(hosts))


def _reach(cluster: config.Cluster, index: int) -> Finding:
    address = config.split_address(cluster.tasks[index].address)
    try:
        if index == cluster.index:
            rendezvous.listen(cluster).close()
            status = "this process's own; the port is free"
        else:
            socket.create_connection(address, timeout=_SECONDS_OF_A_HOST).close()
            status = "a worker listens there"
    except rendezvous.RendezvousError as error:
        problem, _, remedy = str(error).partition("; ")
        return Finding(WRONG, problem, remedy)
    except ConnectionRefusedError:
        status = "the machine answers; no worker listens there yet"
    except (OSError, UnicodeError) as error:
        # A name that nobody knows, or has an empty part, no route, or silence, as of a firewall.
        problem = f"{cluster.name(index)}: not reached: {getattr(error, 'strerror', None) or error}"
        return Finding(WRONG, problem, "check the name, the port, the route and the firewalls")
    return Finding(OK, f"{cluster.name(index)}: {status}")


def _pairs(ask: Ask, count: int, tell: Tell) -> Iterator[tuple[Pair, Check | Failure]]:
    """Tests each ordered pair of devices, until too many hang."""
    hanging = 0
    for source, target in itertools.permutations(range(count), 2):
        if hanging == _MOST_HANGING:
            return
        tell(f"Copying from device {source} to {target}")
        answer = ask("pair", source=source, target=target)
        hanging += isinstance(answer, Failure) and answer.hangs
        yield (source, target), answer


def findings_of(report: Report) -> list[Finding]:
    """Lists the findings of a report."""
    parts = (_about_tf_config, _about_versions, _about_machine, _about_pairs, _about_checks)
    return [finding for part in parts for finding in part(report)]


def _about_tf_config(report: Report) -> Iterator[Finding]:
    config = report.tf_config
    if config.problem:
        remedy = 'set it as in {"cluster": {"worker": ["a:2222", "b:2222"]}, '
        remedy += '"task": {"type": "worker", "index": 0}}, or use `tfcdo launch`'
        yield Finding(WRONG, config.problem, remedy)
    yield from config.hosts


def _about_versions(report: Report) -> Iterator[Finding]:
    found = report.versions
    if isinstance(found, Failure):
        remedy = "run `python -c 'import tensorflow'` and see what it prints; reinstall TensorFlow"
        yield Finding(WRONG, f"TensorFlow does not start: {found.error}", remedy)
    elif found.problem:
        yield Finding(WRONG, found.problem, found.remedy)
    else:
        yield Finding(OK, f"TensorFlow {found.tensorflow} can be used")
        if found.without_kernels:
            text = (
                f"TensorFlow {found.tensorflow} has no compiled kernels for "
                f"{', '.join(found.without_kernels)}: compiling them at the first run takes up to "
                "30 minutes, or fails (tensorflow/tensorflow#97387)"
            )
            yield Finding(NOTE, text, "install a TensorFlow that was built for these GPUs")


def _about_machine(report: Report) -> Iterator[Finding]:
    machine = report.machine
    if machine is None:
        return
    if isinstance(machine, Failure):
        remedy = "choose fewer with -g, or see what TensorFlow says of its devices"
        yield Finding(WRONG, f"the devices cannot be used: {machine.error}", remedy)
        return
    num_gpus = sum("GPU" in name for name in machine.physical)
    num_driver_gpus = len(machine.gpus_of_nvidia_smi)
    if num_driver_gpus > num_gpus:
        remedy = "pip install 'tensorflow[and-cuda]', and see whether CUDA_VISIBLE_DEVICES is set"
        seen = f"nvidia-smi shows {num_driver_gpus} GPUs, and TensorFlow {num_gpus or 'none'}"
        yield Finding(NOTE, seen, remedy)
    if machine.on_cpu:
        none = "" if num_gpus else "TensorFlow sees no GPU: "
        yield Finding(
            NOTE,
            f"{none}what follows is about {machine.description}",
            "none needed to try things; to train on several GPUs, run this where they are",
        )
    else:
        yield Finding(OK, f"{machine.description} are examined")
    if machine.nccl_problem:
        text = f"tfcdo.NcclAllReduce cannot run here: {machine.nccl_problem}"
        yield Finding(NOTE, text, machine.nccl_remedy)
    if "pass topology=" in machine.topology_reason:
        text = f"the topology is assumed to be {machine.topology.name!r}: {machine.topology_reason}"
        remedy = "tfcdo.AutoAllReduce(topology=tfcdo.topology.Topology.from_nvidia_smi(text))"
        yield Finding(NOTE, text, remedy)


# Symptoms of failed copies, and remedies.
_HANG, _FAIL, _LIE = "hang", "fail", "arrive corrupted"
_BIOS = "switch IOMMU and ACS off in the BIOS"
_TROUBLES = {_HANG: _BIOS, _FAIL: "see what the driver logged (`dmesg`)", _LIE: _BIOS}


def _trouble(copy: Check | Failure) -> str:
    """Returns one of `_TROUBLES`; "" for a correct copy."""
    if isinstance(copy, Failure):
        return _HANG if copy.hangs else _FAIL
    return _LIE if copy.problem else ""


def _about_pairs(report: Report) -> Iterator[Finding]:
    pairs = report.pairs
    troubled = {
        trouble: {pair: copy for pair, copy in pairs.items() if _trouble(copy) == trouble}
        for trouble in _TROUBLES
    }
    names = [short_name(name) for name in report.examined]
    if pairs and not any(troubled.values()):
        yield Finding(OK, f"copies between all {len(pairs)} ordered pairs of devices are correct")
    for trouble, found in troubled.items():
        if found:
            named = ", ".join(f"{names[a]} to {names[b]}" for a, b in [*found][:_MOST_NAMED])
            more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            errors = dict.fromkeys(one.error for one in found.values() if isinstance(one, Failure))
            text = f"copies from {named}{more} {trouble}"
            text += f": {'; '.join(errors)}" if errors else ""
            remedy = f"{_TROUBLES[trouble]}, or leave devices out as in the line below"
            yield Finding(WRONG, text, remedy)
    missed = len(names) * (len(names) - 1) - len(pairs)
    if missed:
        text = f"{missed} pairs of devices were not tried, because others hang"
        yield Finding(NOTE, text, "fix those first and run this again")


def _about_checks(report: Report) -> Iterator[Finding]:
    for name, found in report.checks.items():
        subject = f"metrics of fit under {name}" if name in STRATEGIES else f"{name} sums"
        (ours,) = (pair[0] for pair in (*COMPARED, STRATEGIES) if name in pair)
        severity, remedy = NOTE, f"use {ours}"  # A fault of TensorFlow's is none of this machine.
        if name == ours:
            severity, remedy = WRONG, f"see the copies above; if all are correct, {_REPORT}"
        if isinstance(found, Failure):
            yield Finding(severity, f"{subject} fail: {found.error}", remedy)
        elif found.problem:
            yield Finding(severity, f"{subject} are incorrect: {found.problem}", remedy)
        elif found.ran:
            yield Finding(OK, f"{subject} are correct")


def script_line(report: Report) -> str:
    """Returns the line to paste into a training script."""
    if report.machine is None:
        remedy = report.versions.remedy if isinstance(report.versions, Versions) else ""
        return remedy or "pip install --force-reinstall tensorflow"
    if isinstance(report.machine, Failure):
        return "import tfcdo; strategy = tfcdo.MirroredStrategy()"
    ops = f"cross_device_ops={_best_class(report)}()"
    names, on_cpu = report.examined, report.machine.on_cpu
    usable = _usable_devices(report)
    by_default = 0 if on_cpu else sum("GPU" in name for name in report.machine.logical)
    if report.tf_config.hosts:
        each = f", devices_per_worker={len(usable)}" if len(usable) != by_default else ""
        seen = ""
        if len(usable) < len(names) and not on_cpu:  # It takes the first that TensorFlow sees.
            numbers = ", ".join(name.rpartition(":")[2] for name in usable)
            seen = "import tensorflow as tf; gpus = tf.config.list_physical_devices('GPU'); "
            seen += f"tf.config.set_visible_devices([gpus[i] for i in ({numbers},)], 'GPU'); "
        return f"{seen}import tfcdo; strategy = tfcdo.MultiWorkerMirroredStrategy({ops}{each})"
    devices = f"tfcdo.configure_virtual_cpus({len(names)}), " if on_cpu else ""
    if len(usable) < max(len(names), by_default):
        devices = f"{list(map(short_name, usable))}, "
    return f"import tfcdo; strategy = tfcdo.MirroredStrategy({devices}{ops})"


def _best_class(report: Report) -> str:
    """Returns the first class with correct sums, NCCL before all others."""
    for name, _ in (COMPARED[-1], *COMPARED[:-1]):
        found = report.checks.get(name)
        if isinstance(found, Check) and found.ran and not found.problem:
            return name
    return COMPARED[0][0]


def _usable_devices(report: Report) -> list[str]:
    """Leaves out devices until no pair that hangs, fails or lies is left, the worst first."""
    names = report.examined
    bad = [pair for pair, copies in report.pairs.items() if _trouble(copies)]
    left = set(range(len(names)))
    while bad:
        ends = list(itertools.chain.from_iterable(bad))
        # If several are equally bad, the last one: most scripts put other data on the first device.
        worst = max(left, key=lambda device: (ends.count(device), device))
        left.remove(worst)
        bad = [pair for pair in bad if worst not in pair]
    return [names[index] for index in sorted(left)]


def short_name(device: str) -> str:
    """Shortens the full name of a device."""
    return ":".join(device.split(":")[-2:])
