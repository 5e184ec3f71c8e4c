"""Asks a probe one thing at a time, each with a time limit, and collects the answers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from tfcdo.bench import worker_pool
from tfcdo.doctor import answers, tf_config
from tfcdo.doctor.answers import CopiesAnswer, Failure, ModelPlan, NoAnswer, Skipped, SumsAnswer

# The pairs of classes that are compared, tfcdo's and TensorFlow's; what a strategy that is given no
# cross-device ops uses is TensorFlow's way to choose by itself.
COMPARED = (
    ("tfcdo.AutoAllReduce", "tf.CollectiveAllReduce"),
    ("tfcdo.HierarchicalCopyAllReduce", "tf.HierarchicalCopyAllReduce"),
    ("tfcdo.ReductionToOneDevice", "tf.ReductionToOneDevice"),
    ("tfcdo.NcclAllReduce", "tf.NcclAllReduce"),
)
SMALL_MODEL, LARGE_MODEL = "mobilenet", "bert-base"

# Seconds for the tests of all pairs of devices together.
_SECONDS_OF_PAIRS = 3.0
# Number of hanging pairs after which the rest are skipped: each costs a time-out and a new start.
_MOST_HANGING = 3

# Takes a question; returns the answer. Raises `worker_pool.WorkerError` if none comes.
Ask = Callable[[Mapping[str, Any], float], Any]
Tell = Callable[[str], None]
# The indices of the sending and of the receiving device.
Pair = tuple[int, int]

_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that the probe may take to start, to plan, to copy between two devices, to sum."""

    start: float = 120.0
    plan: float = 120.0
    pair: float = 15.0
    sum: float = 60.0


@dataclasses.dataclass(frozen=True)
class Report:
    """All answers; None, or empty, where the doctor did not come that far."""

    versions: answers.Versions | Failure
    devices: answers.SeenDevices | Failure | None = None
    all_reduces: tuple[answers.AllReduce | Failure, ...] = ()
    topology: answers.FoundTopology | Failure | None = None
    models: Mapping[str, ModelPlan | Failure] = dataclasses.field(default_factory=dict)
    tf_config: tf_config.TfConfig = dataclasses.field(
        default_factory=lambda: tf_config.TfConfig("")
    )
    pairs: Mapping[Pair, CopiesAnswer] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, SumsAnswer] = dataclasses.field(default_factory=dict)

    @property
    def examined(self) -> tuple[str, ...]:
        """Returns the names of the devices that are examined; none if they cannot be used."""
        return self.devices.examined if isinstance(self.devices, answers.SeenDevices) else ()

    def planned_bandwidth(self, pair: Pair) -> float | None:
        """Returns what the topology says of a link, in bytes per second; None for no limit."""
        links = self.topology.links if isinstance(self.topology, answers.FoundTopology) else ()
        found = (link.bandwidth for link in links if (link.source, link.target) == pair)
        return next(found, None)


class Probes:
    """Keeps one probe running: after one that hung or crashed, the next question starts another."""

    _command = (sys.executable, "-m", "tfcdo.doctor.probe")

    def __init__(self, count: int | None, limits: Limits) -> None:
        self._count = count
        self._limits = limits
        self._running = contextlib.ExitStack()
        self._pool: worker_pool.WorkerPool | None = None

    def __enter__(self) -> Probes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._running.close()

    def ask(self, question: Mapping[str, Any], seconds: float) -> Any:
        """Asks the probe; see `Ask`."""
        try:
            return self._started(question).request(question, seconds)[0]
        except worker_pool.WorkerError:
            self._running.close()
            self._pool = None
            raise

    def _started(self, question: Mapping[str, Any]) -> worker_pool.WorkerPool:
        if self._pool is None:
            # TF_CONFIG is examined in this process; the probe is a separate process.
            variables = {"TF_CONFIG": "{}", "TF_CPP_MIN_LOG_LEVEL": "2"}
            self._pool = self._running.enter_context(
                worker_pool.start_workers(self._command, [variables])
            )
            if question["question"] not in ("versions", "devices"):
                self._pool.request(devices_question(self._count), self._limits.start)
        return self._pool


def devices_question(count: int | None) -> dict[str, Any]:
    """Returns the question that must come before all others but that for versions."""
    return {"question": "devices", "count": count}


def examine(
    ask: Ask, count: int | None, limits: Limits, tell: Tell = lambda message: None
) -> Report:
    """Examines this machine."""
    tell("Looking at TF_CONFIG")
    config = tf_config.examine_tf_config()
    tell("Starting TensorFlow")
    versions = _answer(ask, {"question": "versions"}, limits.start, answers.Versions)
    if isinstance(versions, Failure) or versions.problem:
        return Report(versions, tf_config=config)
    devices = _answer(ask, devices_question(count), limits.start, answers.SeenDevices)
    if isinstance(devices, Failure):
        return Report(versions, devices, tf_config=config)
    all_reduces = _answer(
        ask, {"question": "all_reduces"}, limits.plan, tuple[answers.AllReduce, ...]
    )
    tell("Looking at the topology")
    topology = _answer(ask, {"question": "topology"}, limits.plan, answers.FoundTopology)
    return Report(
        versions,
        devices,
        (all_reduces,) if isinstance(all_reduces, Failure) else all_reduces,
        topology,
        dict(_models(ask, limits, tell)),
        config,
        dict(_pairs(ask, len(devices.examined), limits, tell)),
        dict(_sums(ask, limits, tell)),
    )


def _models(ask: Ask, limits: Limits, tell: Tell) -> Iterator[tuple[str, ModelPlan | Failure]]:
    for model in (SMALL_MODEL, LARGE_MODEL):
        tell(f"Planning for {model}")
        yield model, _answer(ask, {"question": "auto", "model": model}, limits.plan, ModelPlan)


def _pairs(ask: Ask, count: int, limits: Limits, tell: Tell) -> Iterator[tuple[Pair, CopiesAnswer]]:
    """Tests each ordered pair of devices, until too many hang."""
    pairs = list(itertools.permutations(range(count), 2))
    hanging = 0
    for source, target in pairs:
        tell(f"Copying from device {source} to {target}")
        if hanging >= _MOST_HANGING:
            yield (source, target), Skipped(f"{hanging} others hang")
            continue
        seconds = _SECONDS_OF_PAIRS / len(pairs)
        question = {"question": "pair", "source": source, "target": target, "seconds": seconds}
        answer = _answer(ask, question, limits.pair, answers.Copies)
        hanging += answers.hangs(answer)
        yield (source, target), answer


def _sums(ask: Ask, limits: Limits, tell: Tell) -> Iterator[tuple[str, SumsAnswer]]:
    for name in itertools.chain.from_iterable(COMPARED):
        tell(f"Summing with {name}")
        found = _ask(ask, {"question": "sum", "name": name}, limits.sum)
        if not isinstance(found, Failure):
            found = msgspec.convert(found, Skipped if found["skipped"] else answers.Sums)
        yield name, found


def _answer(
    ask: Ask, question: Mapping[str, Any], seconds: float, kind: type[_Kind]
) -> _Kind | Failure:
    found = _ask(ask, question, seconds)
    return found if isinstance(found, Failure) else msgspec.convert(found, kind)


def _ask(ask: Ask, question: Mapping[str, Any], seconds: float) -> Any:
    """Returns a failure, or what else the probe has answered, as JSON has it."""
    try:
        found = ask(question, seconds)
    except worker_pool.WorkerTimeoutError:
        return NoAnswer(f"no end within {seconds:g} s", hangs=True)
    except worker_pool.WorkerError as error:
        return NoAnswer(str(error).strip(), hangs=False)
    return Failure(found["error"]) if "error" in found else found
