"""Runs examples/ray_train.py slowly, on a small cluster of this machine: two nodes of one CPU.

    python ray_training.py FOLDER

Each worker writes a line to FOLDER/events for its first steps: its rank, process and replicas.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import subprocess
import sys
import time
from typing import Any
from unittest import mock

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "ray_train.py"


def train_one_worker(config: dict[str, Any]) -> None:
    """The example's function, whose steps take longer."""
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import keras

    fit = keras.Model.fit

    class Slow(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.steps += 1
            if self.steps == 12:
                replicas = self.model.distribute_strategy.num_replicas_in_sync
                with pathlib.Path(config["folder"], "events").open("a") as file:
                    file.write(f"{os.getpid()} {replicas}\n")
            time.sleep(config["pause"])

    def slow_fit(model: Any, data: Any, *, callbacks: list[Any], **arguments: Any) -> Any:
        return fit(model, data, callbacks=[*callbacks, Slow()], **arguments)

    example = runpy.run_path(str(EXAMPLE))
    with mock.patch.object(keras.Model, "fit", slow_fit):
        example["train_one_worker"](config)


def train_on_one_device(folder: pathlib.Path) -> None:
    """The same training without Ray and without tfcdo's strategy."""
    import tensorflow as tf

    import tfcdo

    example = runpy.run_path(str(EXAMPLE))
    default = tf.distribute.get_strategy
    with (
        mock.patch.object(tfcdo, "MultiWorkerMirroredStrategy", default),
        mock.patch.object(example["train"], "report"),
        mock.patch.object(example["train"].Checkpoint, "from_directory"),
    ):
        example["train_one_worker"]({"folder": str(folder)})


def start_node(address: str) -> subprocess.Popen[bytes]:
    """Starts a node with one CPU, in a process group of its own."""
    ray = [sys.executable, "-c", "import ray.scripts.scripts; ray.scripts.scripts.main()"]
    return subprocess.Popen(
        [*ray, "start", "--address", address, "--num-cpus", "1", "--block"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )


def main(folder: str) -> None:
    """Trains with two workers; the second node is killed with its worker, and comes back."""
    import signal
    import threading

    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    os.environ["RAY_health_check_initial_delay_ms"] = "1000"  # noqa: SIM112 - Ray's name
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes = [start_node(cluster.address)]
    events = pathlib.Path(folder, "events")

    def wait_for(replicas: list[str]) -> None:
        while not events.exists() or replicas != [
            line.split()[1] for line in events.read_text().splitlines()
        ]:
            time.sleep(0.1)

    def disturb() -> None:
        wait_for(["2", "2"])
        os.killpg(nodes[0].pid, signal.SIGKILL)
        wait_for(["2", "2", "1"])
        nodes.append(start_node(cluster.address))

    try:
        ray.init(address=cluster.address, log_to_driver=False)
        while ray.cluster_resources().get("CPU", 0) < 2:
            time.sleep(0.1)
        threading.Thread(target=disturb, daemon=True).start()
        trainer = TensorflowTrainer(
            train_one_worker,
            train_loop_config={"folder": folder, "pause": 0.3},
            scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=3),
            run_config=RunConfig(
                storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=-1)
            ),
        )
        print(trainer.fit().metrics)
    finally:
        ray.shutdown()
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGTERM)
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
