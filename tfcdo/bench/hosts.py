"""Measures TensorFlow's and tfcdo's multi-worker strategies in turn, on processes of this host."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

import numpy as np

from tfcdo.bench import link, measure, worker_pool
from tfcdo.launch import cluster

_ALONE = "computing alone"
# Seconds. Tracing takes a minute on a busy machine; a step takes a second.
_BUILD_TIMEOUT = 900.0
_STEP_TIMEOUT = 300.0


@dataclasses.dataclass(frozen=True)
class HostsSettings:
    """Numbers of processes, of virtual CPU devices of each, of samples, and of the model's blocks.

    Each block has 4.9 MB of gradients. One strategy sends them as `wire_between`.
    """

    num_workers: int
    num_devices: int
    iterations: int = 10
    warmup: int = 3
    num_blocks: int = 6
    wire_between: str = "bfloat16"

    @property
    def names(self) -> dict[str, str]:
        """Returns what results are called, by their names in requests, as in `hosts_worker`."""
        return {
            "tfcdo": "tfcdo.MultiWorkerMirroredStrategy",
            f"tfcdo {self.wire_between}": f"the same, wire_between={self.wire_between!r}",
            "tf": "tf.distribute.MultiWorkerMirroredStrategy",
            _ALONE: _ALONE,
        }


@dataclasses.dataclass(frozen=True)
class HostsMeasurement:
    """Measurement of training steps under one strategy.

    Attributes:
      name: the strategy's, or "computing alone" for steps that drop their gradients.
      kind: a key of `HostsSettings.names`.
      rate: the limit of the link between the processes as tc writes it; None if it has none.
      gradient_bytes: bytes of one replica's gradients.
      seconds: median time of a step, to the end of the last worker's.
      spread: distance between the quartiles of these times, in seconds.
      bytes_sent: bytes that crossed the link in a step, on average.
      wrong: number of elements of an all-reduce that differ from numpy's; None without one.
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


def least_bytes(num_workers: int, gradient_bytes: int) -> int:
    """Returns the bytes that workers must send each other at least to sum their gradients.

    Patarasuk and Yuan 2009: each of N workers sends at least 2 (N - 1) / N times its data.
    """
    return 2 * (num_workers - 1) * gradient_bytes


def run(
    settings: HostsSettings, opened: link.Loopback, track: measure.Track = measure.silently
) -> list[HostsMeasurement]:
    """Trains the same model on the same data under each strategy, a step of each in turn."""
    with _workers(settings, opened) as pool:
        gradient_bytes, *_ = pool.request({"do": "count bytes"}, _BUILD_TIMEOUT)
        wrong = {
            kind: sum(pool.request({"do": "count wrong", "name": kind}, _BUILD_TIMEOUT))
            for kind in track(
                [kind for kind in settings.names if kind != _ALONE], description="checking"
            )
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in settings.names}
        sent: dict[str, list[int]] = {kind: [] for kind in settings.names}
        for number in track(range(settings.warmup + settings.iterations), description="steps"):
            for kind in settings.names:
                before = opened.count_bytes()
                timeout = _STEP_TIMEOUT if number else _BUILD_TIMEOUT
                times = pool.request({"do": "step", "name": kind}, timeout)
                if number >= settings.warmup:
                    seconds[kind].append(max(times))
                    sent[kind].append(opened.count_bytes() - before)
    measurements = []
    for kind, name in settings.names.items():
        lower, median, upper = np.quantile(seconds[kind], (0.25, 0.5, 0.75)).tolist()
        measurements.append(
            HostsMeasurement(
                name=name,
                kind=kind,
                num_workers=settings.num_workers,
                num_devices=settings.num_devices,
                rate=opened.rate.text if opened.rate else None,
                gradient_bytes=gradient_bytes,
                seconds=median,
                spread=upper - lower,
                bytes_sent=float(np.mean(sent[kind])),
                wrong=wrong.get(kind),
            )
        )
    return measurements


@contextlib.contextmanager
def _workers(settings: HostsSettings, opened: link.Loopback) -> Iterator[worker_pool.WorkerPool]:
    command = [
        *opened.command,
        *(sys.executable, "-m", "tfcdo.bench.hosts_worker"),
        *(str(settings.num_devices), str(settings.num_blocks), settings.wire_between),
    ]
    with (
        cluster.reserved_ports(settings.num_workers) as addresses,
        worker_pool.start_workers(command, worker_pool.variables_of(addresses)) as pool,
    ):
        yield pool
