"""examples/ray_train.py, longer, on a Ray cluster of this machine: nodes of one CPU.

Workers are killed, and the size of the cluster changes: `python ray_test.py FOLDER` is a program
that does this. Each worker writes a line to FOLDER/events: its process and the number of replicas.
"""

import importlib.util
import itertools
import os
import pathlib
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from typing import Any
from unittest import mock

import keras
import numpy as np
import psutil
import tensorflow as tf
from absl.testing import absltest

import tfcdo

_EXAMPLE = pathlib.Path(__file__).absolute().parents[2] / "examples" / "ray_train.py"
_EPOCHS = 16
_PAUSE_SECONDS = 0.2  # After each step, until there is no more fault to come.
_SECONDS = 1200  # Alone on a machine with two cores it takes about five minutes.
# A worker is killed, or a node is lost or joins, when all workers, at first one, have trained.
_FAULTS = ("join", "kill", "kill", "lose", "kill", "join", "kill", "kill")


def _example() -> dict[str, Any]:
    """Returns the names of the example, which trains longer."""
    names = runpy.run_path(str(_EXAMPLE))
    names["train_one_worker"].__globals__["EPOCHS"] = _EPOCHS
    return names


def _train_one_worker(config: dict[str, Any]) -> None:
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


def _train_on_one_device(folder: pathlib.Path) -> None:
    """The same training without Ray and without tfcdo's strategy."""
    example = _example()
    default = tf.distribute.get_strategy
    with (
        mock.patch.object(tfcdo, "MultiWorkerMirroredStrategy", default),
        mock.patch.object(example["train"], "report"),
        mock.patch.object(example["train"].Checkpoint, "from_directory"),
    ):
        example["train_one_worker"]({"folder": str(folder)})


def _start_node(address: str) -> subprocess.Popen[bytes]:
    ray = [sys.executable, "-c", "import ray.scripts.scripts; ray.scripts.scripts.main()"]
    return subprocess.Popen(
        [*ray, "start", "--address", address, "--num-cpus", "1", "--block"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )


def _disturb(folder: pathlib.Path, address: str, nodes: list[subprocess.Popen[bytes]]) -> None:
    """Makes all faults, one in each run."""
    drawn = random.Random(7)
    seen, size = 0, 1
    for fault in _FAULTS:
        while len(started := _events(folder)[seen:]) < size:
            time.sleep(0.1)
        seen += size
        time.sleep(drawn.random())  # Inside a step, or between two.
        if fault == "join":
            nodes.append(_start_node(address))
        elif fault == "lose":
            os.killpg(nodes[-1].pid, signal.SIGKILL)
        else:
            os.kill(int(drawn.choice(started)[0]), signal.SIGKILL)
        size += {"join": 1, "lose": -1, "kill": 0}[fault]
    (folder / "no more faults").touch()


def _events(folder: pathlib.Path) -> list[list[str]]:
    """Returns the process and the number of replicas of each worker of each run."""
    path = folder / "events"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _main(folder: pathlib.Path) -> None:
    """Trains on a cluster of one node at first, and disturbs the training."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    os.environ["RAY_health_check_initial_delay_ms"] = "1000"  # noqa: SIM112 - Ray's name
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        arguments = (folder, cluster.address, nodes)
        threading.Thread(target=_disturb, args=arguments, daemon=True).start()
        trainer = TensorflowTrainer(
            _train_one_worker,
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


@unittest.skipUnless(importlib.util.find_spec("ray"), "needs Ray: pip install '.[ray]'")
class RayTest(absltest.TestCase):
    def test_five_kills_and_three_changes_of_size_end_with_the_weights_of_one_device(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        )
        try:
            log, _ = process.communicate(timeout=_SECONDS)
        finally:
            self._end(process)
        self.assertEqual(process.returncode, 0, log)
        self.assertTrue((folder / "no more faults").exists())
        replicas = [size for _, size in _events(folder)]
        self.assertEqual([size for size, _ in itertools.groupby(replicas)], ["1", "2", "1", "2"])
        self.assertLen(replicas, 1 + 3 * 2 + 2 * 1 + 3 * 2)
        self.assertIn("'replicas': 2", log)

        alone = folder / "alone"
        alone.mkdir()
        _train_on_one_device(alone)
        weights = [
            keras.models.load_model(path / "model" / "model.keras", compile=False).get_weights()
            for path in (folder, alone)
        ]
        for own, expected in zip(*weights):
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5)

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Ends Ray's processes: the session of `process`, and its descendants."""
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    if pathlib.Path(sys.argv[-1]).is_dir():
        _main(pathlib.Path(sys.argv[-1]))
    else:
        absltest.main()
