"""`tfcdo demo --workers`: trains the demo's model on several processes of this host."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import click

from tfcdo.bench import worker_pool
from tfcdo.launch import cluster

if TYPE_CHECKING:
    import numpy as np

_TIMEOUT = 1800.0


@dataclasses.dataclass(frozen=True)
class WorkersResult:
    """The state of workers that have trained together.

    Attributes:
      weights: the model's weights.
      digests: a digest of the weights on each device of each worker.
    """

    weights: list[np.ndarray]
    digests: list[str]


def train_on_workers(
    num_workers: int, num_devices: int, ops_name: str, epochs: int
) -> WorkersResult:
    """Trains the demo's model under tfcdo.MultiWorkerMirroredStrategy."""
    import numpy as np

    command = [sys.executable, "-m", "tfcdo.cli.demo_worker"]
    request = {"devices": num_devices, "ops": ops_name, "epochs": epochs}
    with cluster.reserved_ports(num_workers) as addresses:
        variables = [
            {"TF_CONFIG": cluster.tf_config(addresses, index), "CUDA_VISIBLE_DEVICES": ""}
            for index in range(num_workers)
        ]
        try:
            with worker_pool.start_workers(command, variables) as pool:
                answers = pool.request(request, _TIMEOUT)
        except worker_pool.WorkerError as error:
            raise click.ClickException(str(error)) from error
    return WorkersResult(
        [np.array(weight, np.float32) for weight in answers[0]["weights"]],
        [digest for answer in answers for digest in answer["digests"]],
    )
