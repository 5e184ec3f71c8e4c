"""Measures TensorFlow's and tfcdo's multi-worker strategies in turn, on processes of this host."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

import numpy as np

from tfcdo.bench import link, tracking, worker_pool
from tfcdo.launch import cluster

# The names in requests, and what results are called. `hosts_worker` has the same: importing it
# would start TensorFlow.
_TENSORFLOW, _TFCDO, _ALONE = "tf", "tfcdo", "computing alone"


def names(wire_between: str) -> dict[str, str]:
    """Returns the strategies that are measured, by the kinds that requests have."""
    return {
        _TFCDO: "tfcdo.MultiWorkerMirroredStrategy",
        f"tfcdo {wire_between}": f"the same, wire_between={wire_between!r}",
        _TENSORFLOW: "tf.distribute.MultiWorkerMirroredStrategy",
        _ALONE: "computing alone",
    }


# Seconds. Tracing takes a minute on a busy machine; a step takes a second.
_BUILD_TIMEOUT = 900.0
_STEP_TIMEOUT = 300.0


@dataclasses.dataclass(frozen=True)
class HostsSettings:
    """Numbers of processes, of virtual CPU devices of each, of samples, and of the model's blocks.

    Each block has 4.9 MB of gradients. `wire_between` is the dtype of the strategy that casts.
    """

    num_workers: int
    num_devices: int
    iterations: int = 10
    warmup: int = 3
    num_blocks: int = 6
    wire_between: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class HostsMeasurement:
    """Measurement of training steps under one strategy.

    Attributes:
      name: the strategy's, or "computing alone" for steps that drop their gradients.
      kind: `"tfcdo"`, `"tfcdo bfloat16"` or another dtype, `"tf"` or `"computing alone"`.
      rate: the limit of the link between the processes as tc writes it; None if it has none.
      gradient_bytes: bytes of one replica's gradients.
      seconds: median time of a step, to the end of the last worker's.
      spread: distance between the quartiles of these times, in seconds.
      bytes_sent: bytes that crossed the link in a step, on average.
      wrong: number of elements of an all-reduce that differ from numpy's; None without one.
      distinct_copies: number of different copies of the weights in the end; None likewise.
    """

    name: str
    kind: str
    num_workers: int
    num_devices: int
    rate: str | None
    gradient_bytes: int
    seconds: float
    spread: float
    bytes_sent: float
    wrong: int | None
    distinct_copies: int | None


@dataclasses.dataclass(frozen=True)
class HostsResult:
    """All measurements of a run.

    Attributes:
      weight_difference: largest difference of a weight between tfcdo's and TensorFlow's training,
        with nothing cast.
      least_sending_seconds: least time that the link needs for the gradients; 0 if it has no rate.
    """

    measurements: tuple[HostsMeasurement, ...]
    weight_difference: float
    least_sending_seconds: float

    def of_kind(self, kind: str) -> HostsMeasurement:
        """Returns the measurement of one kind."""
        (found,) = (one for one in self.measurements if one.kind == kind)
        return found

    @property
    def limit(self) -> float:
        """Returns the least seconds of a step: the longer of computing and sending."""
        return max(self.of_kind(_ALONE).seconds, self.least_sending_seconds)


def least_bytes(num_workers: int, gradient_bytes: int) -> int:
    """Returns the bytes that workers must send each other at least to sum their gradients.

    Patarasuk and Yuan 2009: each of N workers sends at least 2 (N - 1) / N times its data.
    """
    return 2 * (num_workers - 1) * gradient_bytes


def run(
    settings: HostsSettings, opened: link.Loopback, track: tracking.Track = tracking.silently
) -> HostsResult:
    """Trains the same model on the same data under both strategies, a step of each in turn."""
    compared = names(settings.wire_between)
    with _workers(settings, opened) as pool:
        (description, *_) = pool.request({"do": "describe"}, _BUILD_TIMEOUT)
        wrong = {
            kind: sum(pool.request({"do": "count wrong", "name": kind}, _BUILD_TIMEOUT))
            for kind in track([kind for kind in compared if kind != _ALONE], description="checking")
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in compared}
        sent: dict[str, list[int]] = {kind: [] for kind in compared}
        for number in track(range(settings.warmup + settings.iterations), description="steps"):
            for kind in compared:
                before = opened.count_bytes()
                timeout = _STEP_TIMEOUT if number else _BUILD_TIMEOUT
                times = pool.request({"do": "step", "name": kind}, timeout)
                if number >= settings.warmup:
                    seconds[kind].append(max(times))
                    sent[kind].append(opened.count_bytes() - before)
        answers = pool.request({"do": "compare"}, _STEP_TIMEOUT)
    measurements = []
    for kind, name in compared.items():
        digests = {digest for answer in answers for digest in answer["digests"].get(kind, ())}
        lower, median, upper = np.quantile(seconds[kind], (0.25, 0.5, 0.75)).tolist()
        measurements.append(
            HostsMeasurement(
                name=name,
                kind=kind,
                num_workers=settings.num_workers,
                num_devices=settings.num_devices,
                rate=opened.rate.text if opened.rate else None,
                gradient_bytes=description["gradient_bytes"],
                seconds=median,
                spread=upper - lower,
                bytes_sent=float(np.mean(sent[kind])),
                wrong=wrong.get(kind),
                distinct_copies=len(digests) or None,
            )
        )
    least = least_bytes(settings.num_workers, description["gradient_bytes"])
    return HostsResult(
        tuple(measurements),
        weight_difference=max(answer["difference"] for answer in answers),
        least_sending_seconds=least / opened.rate.bytes_per_second if opened.rate else 0.0,
    )


@contextlib.contextmanager
def _workers(settings: HostsSettings, opened: link.Loopback) -> Iterator[worker_pool.WorkerPool]:
    with cluster.reserved_ports(settings.num_workers) as addresses:
        variables = [
            {
                "TF_CONFIG": cluster.tf_config(addresses, index),
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "CUDA_VISIBLE_DEVICES": "",
            }
            for index in range(settings.num_workers)
        ]
        command = [
            *opened.command,
            *(sys.executable, "-m", "tfcdo.bench.hosts_worker"),
            *(str(settings.num_devices), str(settings.num_blocks), settings.wire_between),
        ]
        with worker_pool.start_workers(command, variables) as pool:
            yield pool
