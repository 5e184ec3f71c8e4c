"""Trains the demo's model in one of several workers: `python -m tfcdo.cli.demo_worker`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tfcdo.bench import worker_pool
from tfcdo.cli import demo_training


def train(request: Mapping[str, Any]) -> Any:
    """Trains together with the other workers."""
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
    worker_pool.serve(train)
