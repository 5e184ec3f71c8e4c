"""Asks a probe one thing at a time, each with a time limit, and collects the answers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfcdo.bench import worker_pool
from tfcdo.doctor import tf_config

# The pairs of classes that are compared, tfcdo's and TensorFlow's; what a strategy that is given no
# cross-device ops uses is TensorFlow's way to choose by itself.
COMPARED = (
    ("tfcdo.AutoAllReduce", "tf.CollectiveAllReduce"),
    ("tfcdo.HierarchicalCopyAllReduce", "tf.HierarchicalCopyAllReduce"),
    ("tfcdo.ReductionToOneDevice", "tf.ReductionToOneDevice"),
    ("tfcdo.NcclAllReduce", "tf.NcclAllReduce"),
)
SMALL_MODEL, LARGE_MODEL = "mobilenet", "bert-base"

# All pairs of devices together are tested for so many seconds.
_SECONDS_OF_PAIRS = 3.0
# After so many that hang, each of which costs a time-out and a new start, the rest are left out.
_MOST_HANGING = 3

# Takes a question; returns the answer. Raises `worker_pool.WorkerError` if none comes.
Ask = Callable[[Mapping[str, Any], float], Any]
Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many seconds the probe may take for an answer.

    Attributes:
      start: to import TensorFlow, and to start it.
      plan: to plan one model's all-reduce.
      pair: for the copies between two devices.
      sum: for one implementation's sums.
    """

    start: float = 120.0
    plan: float = 120.0
    pair: float = 15.0
    sum: float = 60.0


@dataclasses.dataclass
class Report:
    """All answers; None, or empty, where the doctor did not come that far.

    Attributes:
      versions: see `probe.versions`.
      devices: see `self_test.Patient.devices`.
      all_reduces: see `self_test.Patient.all_reduces`.
      topology: see `self_test.Patient.topology`.
      models: see `self_test.Patient.auto`, for a small model and a large one.
      tf_config: what TF_CONFIG says.
      pairs: see `self_test.Patient.pair`, with `source` and `target`, indices of devices.
      sums: see `self_test.Patient.sum`, by the name of the implementation.

    An answer that did not come, or that is an error, is `{"error": text}`, with `"hangs": True`
    where there was no end to be waited for. A pair that was not tried has the reason in `skipped`.
    """

    versions: dict[str, Any] = dataclasses.field(default_factory=dict)
    devices: dict[str, Any] | None = None
    all_reduces: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    topology: dict[str, Any] | None = None
    models: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tf_config: tf_config.TfConfig = dataclasses.field(
        default_factory=lambda: tf_config.TfConfig("")
    )
    pairs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sums: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


class Probes:
    """Keeps one probe running: after one that hung or crashed, the next question starts another.

    Args:
      count: how many devices to examine; see `self_test.Patient`.
      limits: the time limits.
    """

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
            # What TF_CONFIG says is looked at on this side; the probe is a process on its own.
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
    """Examines this machine.

    Args:
      ask: asks the probe.
      count: how many devices to examine; see `self_test.Patient`.
      limits: the time limits.
      tell: is told what comes next.

    Returns:
      The report; it ends early where nothing further can be found out.
    """
    report = Report()
    tell("Looking at TF_CONFIG")
    report.tf_config = tf_config.examine_tf_config()
    tell("Starting TensorFlow")
    report.versions = _answer(ask, {"question": "versions"}, limits.start)
    if report.versions.get("problem") or "error" in report.versions:
        return report
    report.devices = _answer(ask, devices_question(count), limits.start)
    if "error" in report.devices:
        return report
    found = _answer(ask, {"question": "all_reduces"}, limits.plan)
    report.all_reduces = found if isinstance(found, list) else [found]
    tell("Looking at the topology")
    report.topology = _answer(ask, {"question": "topology"}, limits.plan)
    for model in (SMALL_MODEL, LARGE_MODEL):
        tell(f"Planning for {model}")
        answer = _answer(ask, {"question": "auto", "model": model}, limits.plan)
        report.models.append({"model": model, **answer})
    report.pairs = list(_pairs(ask, len(report.devices["examined"]), limits, tell))
    for name in itertools.chain.from_iterable(COMPARED):
        tell(f"Summing with {name}")
        report.sums[name] = _answer(ask, {"question": "sum", "name": name}, limits.sum)
    return report


def _pairs(ask: Ask, count: int, limits: Limits, tell: Tell) -> Iterator[dict[str, Any]]:
    """Tests each ordered pair of devices, until too many hang."""
    pairs = list(itertools.permutations(range(count), 2))
    hanging = 0
    for source, target in pairs:
        tell(f"Copying from device {source} to {target}")
        pair = {"source": source, "target": target}
        if hanging >= _MOST_HANGING:
            yield {**pair, "skipped": f"{hanging} others hang"}
            continue
        question = {"question": "pair", **pair, "seconds": _SECONDS_OF_PAIRS / len(pairs)}
        answer = _answer(ask, question, limits.pair)
        hanging += bool(answer.get("hangs"))
        yield {**pair, **answer}


def _answer(ask: Ask, question: Mapping[str, Any], seconds: float) -> Any:
    try:
        return ask(question, seconds)
    except worker_pool.WorkerTimeoutError:
        return {"error": f"no end within {seconds:g} s", "hangs": True}
    except worker_pool.WorkerError as error:
        return {"error": str(error).strip(), "hangs": False}
