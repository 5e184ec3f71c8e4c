"""Runs examples/ray_train.py, longer, on a small cluster of this machine: nodes of one CPU.

    python ray_training.py FOLDER

Each worker writes a line to FOLDER/events in each run: its process and the number of replicas.
FOLDER/faults gets a line for each fault.
"""

from __future__ import annotations

import os
import pathlib
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "ray_train.py"
_EPOCHS = 16
_PAUSE_SECONDS = 0.2  # After each step, until there is no more fault to come.
# A worker is killed, a node is lost with its worker, or a node joins; each once all workers have
# trained for a while. There is one worker at first.
FAULTS = ("join", "kill", "kill", "lose", "kill", "join", "kill", "kill")


def _example() -> dict[str, Any]:
    """Returns the names of the example, which trains longer."""
    names = runpy.run_path(str(_EXAMPLE))
    names["train_one_worker"].__globals__["EPOCHS"] = _EPOCHS
    return names


def train_one_worker(config: dict[str, Any]) -> None:
    """The example's function, whose steps take longer."""
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import keras

    fit = keras.Model.fit
    folder = pathlib.Path(config["folder"])

    class Slow(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.steps += 1
            if self.steps == 12:
                replicas = self.model.distribute_strategy.num_replicas_in_sync
                with (folder / "events").open("a") as file:
                    file.write(f"{os.getpid()} {replicas}\n")
            if not (folder / "no more faults").exists():
                time.sleep(_PAUSE_SECONDS)

    def slow_fit(model: Any, data: Any, *, callbacks: list[Any], **arguments: Any) -> Any:
        return fit(model, data, callbacks=[*callbacks, Slow()], **arguments)

    with mock.patch.object(keras.Model, "fit", slow_fit):
        _example()["train_one_worker"](config)


def train_on_one_device(folder: pathlib.Path) -> None:
    """The same training without Ray and without tfcdo's strategy."""
    import tensorflow as tf

    import tfcdo

    example = _example()
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


def disturb(folder: pathlib.Path, address: str, nodes: list[subprocess.Popen[bytes]]) -> None:
    """Makes all faults, one in each run."""
    drawn = random.Random(7)
    events, seen, size = folder / "events", 0, 1
    for fault in FAULTS:
        while len(started := _lines(events)[seen:]) < size:
            time.sleep(0.1)
        seen += size
        time.sleep(drawn.random())  # Inside a step, or between two.
        if fault == "join":
            nodes.append(start_node(address))
        elif fault == "lose":
            os.killpg(nodes[-1].pid, signal.SIGKILL)
        else:
            os.kill(int(drawn.choice(started).split()[0]), signal.SIGKILL)
        size += {"join": 1, "lose": -1, "kill": 0}[fault]
        with (folder / "faults").open("a") as file:
            file.write(f"{time.time():.0f} {fault}\n")
    (folder / "no more faults").touch()


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def main(name: str) -> None:
    """Trains on a cluster of one node at first, and disturbs the training."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    folder = pathlib.Path(name)
    os.environ["RAY_health_check_initial_delay_ms"] = "1000"  # noqa: SIM112 - Ray's name
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        threading.Thread(target=disturb, args=(folder, cluster.address, nodes), daemon=True).start()
        trainer = TensorflowTrainer(
            train_one_worker,
            train_loop_config={"folder": str(folder)},
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
