"""`tfcdo demo --workers`: trains the demo's model on several processes of this host.

Each of them runs this file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from tfcdo.bench import worker_pool
from tfcdo.cli import demo_training
from tfcdo.launch import cluster

if TYPE_CHECKING:
    import numpy as np

_TIMEOUT = 1800.0


def train_on_workers(
    num_workers: int, num_devices: int, ops_name: str, epochs: int
) -> tuple[list[np.ndarray], set[str]]:
    """Returns the weights in the end, and digests of all devices' copies of them."""
    import numpy as np

    command = [sys.executable, "-m", "tfcdo.cli.demo_workers"]
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
    weights = [np.array(weight, np.float32) for weight in answers[0]["weights"]]
    return weights, {digest for answer in answers for digest in answer["digests"]}


def _train(request: Mapping[str, Any]) -> Any:
    """Trains together with the other workers; returns weights and their digests."""
    import tfcdo

    strategy = tfcdo.MultiWorkerMirroredStrategy(
        cross_device_ops=demo_training.find_cross_device_ops_class(request["ops"])(),
        devices_per_worker=request["devices"],
    )
    model = demo_training.train(
        demo_training.load_digits(), strategy.num_replicas_in_sync, request["epochs"], strategy, 2
    )
    copies = zip(
        *(strategy.experimental_local_results(weight.value) for weight in model.weights),
        strict=True,
    )
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "digests": [
            hashlib.sha256(b"".join(copy.numpy().tobytes() for copy in weights)).hexdigest()
            for weights in copies
        ],
    }


if __name__ == "__main__":
    worker_pool.serve(_train)
