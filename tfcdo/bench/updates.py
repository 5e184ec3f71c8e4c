"""Times all-reduce plus update of an optimizer: TensorFlow, tfcdo, and tfcdo with a sharded state.

Each runs in a process of its own, so that its peak memory can be told, and takes a step in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfcdo.bench import measure, worker_pool

NAMES: Mapping[str, str] = {
    "tf": "tf.distribute.MirroredStrategy",
    "tfcdo": "tfcdo.MirroredStrategy",
    "sharded": "shard_optimizer_state=True",
}
# A convolutional and fully connected mixture of large and small variables: 69 MB in float32.
SHAPES = (
    *[(1024, 1024)] * 12,
    *[(1024,)] * 12,
    *[(3, 3, 256, 256)] * 8,
    *[(256,)] * 40,
)
_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class UpdateMeasurement:
    """Steps of all-reduce plus update under one strategy.

    Attributes:
      optimizer: the optimizer's name.
      num_devices: the number of devices.
      name: what the tables call it.
      kind: "tf", "tfcdo" or "sharded".
      seconds: the median time of a step.
      spread: the distance between the quartiles, in seconds.
      first_step: the time of the first step, with tracing, in seconds.
      state_bytes: the bytes of the optimizer's state on all devices.
      peak_memory: the most bytes that the process has held; on GPUs, that the fullest GPU has held.
      difference: the largest difference from the weights of tfcdo without sharding.
      alike: whether all devices hold the same bits.
    """

    optimizer: str
    num_devices: int
    name: str
    kind: str
    seconds: float
    spread: float
    first_step: float
    state_bytes: int
    peak_memory: int
    difference: float
    alike: bool

    @property
    def wrong(self) -> bool:
        """Returns whether weights are not what they should be."""
        return self.kind != "tf" and (not self.alike or self.difference > 1e-6)


def run(
    optimizer: str,
    num_devices: int,
    iterations: int,
    warmup: int,
    track: measure.Track = measure.silently,
) -> list[UpdateMeasurement]:
    """Takes steps under each strategy, in turn."""
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    times: dict[str, list[float]] = {kind: [] for kind in NAMES}
    with contextlib.ExitStack() as stack:
        pools: dict[str, worker_pool.WorkerPool] = {}

        def ask(kind: str, do: str) -> Any:
            return pools[kind].request({"do": do}, _TIMEOUT)[0]

        for kind in NAMES:
            command = [sys.executable, "-m", "tfcdo.bench.updates_worker", kind]
            command += [str(num_devices), optimizer]
            pools[kind] = stack.enter_context(worker_pool.start_workers(command, [variables]))
        first = {kind: ask(kind, "step") for kind in track(list(NAMES), description="first steps")}
        for number in track(range(warmup + iterations), description="steps"):
            for kind in NAMES:
                seconds = ask(kind, "step")
                if number >= warmup:
                    times[kind].append(seconds)
        reports = {kind: ask(kind, "report") for kind in NAMES}
    found = []
    for kind, name in NAMES.items():
        lower, median, upper = np.quantile(times[kind], (0.25, 0.5, 0.75)).tolist()
        report = reports[kind]
        difference = np.abs(np.subtract(report["weights"], reports["tfcdo"]["weights"])).max()
        found.append(
            UpdateMeasurement(
                optimizer,
                num_devices,
                name,
                kind,
                median,
                upper - lower,
                first[kind],
                report["state_bytes"],
                report["peak_memory"],
                float(difference),
                report["alike"],
            )
        )
    return found
