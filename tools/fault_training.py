"""A small training on several hosts, all processes of this machine, that may be disturbed.

    tfcdo launch --workers 2 tools/fault_training.py FOLDER

runs it; `Training` starts, watches and ends it. See `faults`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

from tfcdo import environment
from tfcdo.launch import cluster

SEED = 7
EPOCHS = 4
STEPS = 10
# What takes longer hangs. Most of the time goes into the import of TensorFlow by each process.
LIMIT_SECONDS = 300
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tensorflow", "keras", "tfcdo.keras"])
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+Error): ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Number of hosts that train, and of devices of each."""

    count: int
    devices: int

    def __str__(self) -> str:
        return f"{self.count} x {self.devices}"


class HangError(RuntimeError):
    """Something did not end within `LIMIT_SECONDS`."""


class _Host:
    """A host that was started by hand, as `subprocess.Popen` has it.

    It is forked from a process that has imported TensorFlow, which takes ten times as long as all
    else that a host does here.
    """

    def __init__(self, folder: pathlib.Path, log: pathlib.Path, variables: dict[str, str]) -> None:
        arguments = (folder, log, {**environment_of_a_host(), **variables})
        self._process = _FORKING.Process(target=_work_forked, args=arguments, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


class Training:
    """A training in a folder of its own, whose processes end when the block does."""

    def __init__(self, hosts: Hosts, folder: pathlib.Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self._processes: dict[int, subprocess.Popen[bytes] | _Host] = {}
        self._addresses: tuple[str, ...] = ()

    def start(self, *indices: int) -> None:
        """Starts some hosts by hand, each with its TF_CONFIG."""
        for index in indices:
            self.progress_file(index).unlink(missing_ok=True)
            variables = {
                "TF_CONFIG": cluster.tf_config(self._addresses, index),
                environment.DEVICES_PER_WORKER: str(self.hosts.devices),
            }
            self._processes[index] = _Host(self.folder, self.folder / f"log-{index}", variables)

    def launch(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts all hosts with `tfcdo launch`."""
        command = [
            *(sys.executable, "-m", "tfcdo.cli.main", "launch"),
            *("--workers", str(self.hosts.count), "--devices-per-worker", str(self.hosts.devices)),
            *("--grace", "3", *arguments, __file__, str(self.folder)),
        ]
        with (self.folder / "log-launch").open("wb") as log:
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of_a_host(),
            )
        # By the key of no host.
        self._processes[-1] = launcher
        return launcher

    def wait_all(self) -> dict[int, int | None]:
        """Waits for all hosts that were started; returns their statuses."""
        return self.wait_for(*self._processes)

    def wait_for(self, *indices: int) -> dict[int, int | None]:
        """Waits for some hosts; returns their statuses."""
        processes = [self._processes[index] for index in indices]
        wait_until(lambda: all(one.poll() is not None for one in processes), "end")
        return {index: self._processes[index].returncode for index in indices}

    def send(self, index: int, number: int) -> None:
        """Sends a signal to a host."""
        self._processes[index].send_signal(number)

    def pid(self, index: int) -> int | None:
        """Returns the process of a host that `tfcdo launch` has started, if it has."""
        path = self.folder / f"pid-{index}"
        return int(path.read_text()) if path.exists() else None

    def progress_file(self, index: int) -> pathlib.Path:
        """Where a host writes the number of each step that it has ended, one a line."""
        return self.folder / f"progress-{index}"

    def steps_done(self, index: int) -> list[int]:
        """Returns the numbers of the steps that a host has ended since it was started."""
        path = self.progress_file(index)
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def error(self, index: int) -> str:
        """Returns the name of the error that ended a host, or "" if none did."""
        found = _ERROR.findall(self.log(str(index)))
        return found[-1] if found else ""

    def log(self, name: str) -> str:
        """Returns what a host, or the launcher, has printed."""
        return (self.folder / f"log-{name}").read_text(errors="replace")

    def weights(self, index: int) -> list[np.ndarray]:
        """Returns the weights that a host has in the end."""
        with np.load(self.folder / f"weights-{index}.npz") as arrays:
            return [arrays[name] for name in arrays.files]

    def kill(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            # The launcher's workers end when it does.
            process.kill()
            process.wait()
        self._processes.clear()

    @contextlib.contextmanager
    def with_ports(self) -> Iterator[None]:
        """Holds ports for hosts that are started by hand."""
        with cluster.reserved_ports(self.hosts.count) as self._addresses:
            yield


def environment_of_a_host() -> dict[str, str]:
    """Returns the environment variables of a process that finds tfcdo and no GPU."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


@contextlib.contextmanager
def training(hosts: Hosts) -> Iterator[Training]:
    """Gives a training that has not begun; ends all its processes at the end."""
    with tempfile.TemporaryDirectory() as folder:
        one = Training(hosts, pathlib.Path(folder))
        with one.with_ports():
            try:
                yield one
            finally:
                one.kill()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise HangError(f"no {what} within {LIMIT_SECONDS} s")
        time.sleep(0.05)


def _work_forked(folder: pathlib.Path, log: pathlib.Path, variables: dict[str, str]) -> None:
    """One host of a training, in a process that has imported TensorFlow already."""
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(variables)
    work(folder)


def work(folder: pathlib.Path) -> None:
    """One host of a training: a small Keras model, on batches that are the same in each run."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    (folder / f"pid-{index}.new").write_text(str(os.getpid()))
    (folder / f"pid-{index}.new").rename(folder / f"pid-{index}")
    progress = (folder / f"progress-{index}").open("w", buffering=1)

    import keras
    import tensorflow as tf

    import tfcdo
    import tfcdo.keras

    class Progress(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            progress.write(f"{self.epoch * STEPS + batch}\n")
            # So that most moments are in the training and not in the start.
            time.sleep(0.05)

    strategy = tfcdo.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input([16]),
                keras.layers.Dense(32, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    drawn = np.random.default_rng(SEED)
    features = drawn.normal(size=(STEPS * 24, 16)).astype(np.float32)
    targets = features.sum(axis=1, keepdims=True)
    model.fit(
        tf.data.Dataset.from_tensor_slices((features, targets)).batch(24),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[tfcdo.keras.BackupAndRestore(folder / "backup"), Progress()],
    )
    np.savez(folder / f"weights-{index}.npz", *model.get_weights())


if __name__ == "__main__":
    work(pathlib.Path(sys.argv[1]))
