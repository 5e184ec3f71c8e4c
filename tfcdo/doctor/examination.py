"""Asks a probe one thing at a time, each with a time limit, and collects the answers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tfcdo.bench import worker_pool
from tfcdo.doctor import tf_config
from tfcdo.doctor.answers import Copies, Failure, Machine, Sums, Versions
from tfcdo.topology.topology import Topology

# The pairs of classes that are compared, tfcdo's and TensorFlow's; what a strategy that is given no
# cross-device ops uses is TensorFlow's way to choose by itself.
COMPARED = (
    ("tfcdo.AutoAllReduce", "tf.CollectiveAllReduce"),
    ("tfcdo.HierarchicalCopyAllReduce", "tf.HierarchicalCopyAllReduce"),
    ("tfcdo.ReductionToOneDevice", "tf.ReductionToOneDevice"),
    ("tfcdo.NcclAllReduce", "tf.NcclAllReduce"),
)
# Seconds for each question; that for the machine plans for two models, too.
_LIMITS = {"versions": 120.0, "machine": 240.0, "pair": 15.0, "sum": 60.0}
# Seconds for the tests of all pairs of devices together.
_SECONDS_OF_PAIRS = 3.0
# Number of hanging pairs after which the rest are skipped: each costs a time-out and a new start.
_MOST_HANGING = 3

# Asks a question with its arguments. Raises `worker_pool.WorkerError` if no answer comes.
Ask = Callable[..., Any]
Tell = Callable[[str], object]
# The indices of the sending and of the receiving device.
Pair = tuple[int, int]
_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True)
class Report:
    """All answers; None, or empty, where the doctor did not come that far."""

    versions: Versions | Failure
    machine: Machine | Failure | None = None
    tf_config: tf_config.TfConfig = tf_config.TfConfig("")  # noqa: RUF009 - it is immutable
    pairs: Mapping[Pair, Copies | Failure] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, Sums | Failure] = dataclasses.field(default_factory=dict)

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
    config = tf_config.examine_tf_config()
    tell("Starting TensorFlow")
    versions = _answer(Versions, ask, "versions")
    if isinstance(versions, Failure) or versions.problem:
        return Report(versions, tf_config=config)
    tell("Looking at the devices")
    machine = _answer(Machine, ask, "machine", count=count)
    if isinstance(machine, Failure):
        return Report(versions, machine, config)
    pairs = dict(_pairs(ask, len(machine.examined), tell))
    return Report(versions, machine, config, pairs, dict(_sums(ask, tell)))


def _pairs(ask: Ask, count: int, tell: Tell) -> Iterator[tuple[Pair, Copies | Failure]]:
    """Tests each ordered pair of devices, until too many hang."""
    pairs = list(itertools.permutations(range(count), 2))
    seconds = _SECONDS_OF_PAIRS / len(pairs)
    hanging = 0
    for source, target in pairs:
        if hanging == _MOST_HANGING:
            return
        tell(f"Copying from device {source} to {target}")
        answer = _answer(Copies, ask, "pair", source=source, target=target, seconds=seconds)
        hanging += isinstance(answer, Failure) and answer.hangs
        yield (source, target), answer


def _sums(ask: Ask, tell: Tell) -> Iterator[tuple[str, Sums | Failure]]:
    for name in itertools.chain.from_iterable(COMPARED):
        tell(f"Summing with {name}")
        yield name, _answer(Sums, ask, "sum", name=name)


def _answer(kind: type[_Kind], ask: Ask, question: str, **arguments: Any) -> _Kind | Failure:
    try:
        return kind(**ask(question, **arguments))
    except worker_pool.WorkerTimeoutError:
        return Failure(f"no end within {_LIMITS[question]:g} s", hangs=True)
    except worker_pool.WorkerError as error:
        return Failure(str(error).strip())
