"""Kills, stops and delays hosts of small trainings; makes a table of what the others do.

    python tools/faults.py docs/faults.md

Each case is a training of two or three hosts, all processes of this machine. After the fault, all
hosts are started again, and the weights must be those of an undisturbed training, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfcdo import environment
from tfcdo.launch import cluster

SEED = 7
EPOCHS = 4
STEPS = 10
# A case that takes longer hangs. Most of it is the import of TensorFlow by each process.
LIMIT_SECONDS = 300
KINDS = {
    "start": "killed while starting, `tfcdo launch --max-restarts 1`",
    "launch": "killed, `tfcdo launch --max-restarts 1`",
    "kill": "killed, started by hand",
    "stop": "stopped (SIGSTOP), started by hand",
    "late": "late, started by hand",
}
# What TensorFlow and tfcdo raise when another host is gone or does not answer.
DOCUMENTED_ERRORS = (
    "UnavailableError",
    "DeadlineExceededError",
    "LateHostError",
    "DisagreementError",
    "RollCallError",
)
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tensorflow", "keras", "tfcdo.keras"])
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+Error): ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """How many hosts train, and with how many devices each."""

    count: int
    devices: int

    def __str__(self) -> str:
        return f"{self.count} x {self.devices}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
      kind: One of `KINDS`.
      hosts: Who trains.
      victim: Which host is killed, stopped or late.
      moment: When: the number of the step, of all epochs', or for "start" and "late" seconds since
        the start.
      delay: How many seconds after the beginning of that step.
    """

    kind: str
    hosts: Hosts
    victim: int
    moment: float
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened in one case.

    Attributes:
      moment: When the fault came, in words.
      others: How the other hosts ended.
      seconds: How long after the fault the last of them had ended; None if none had to.
      continued: The epoch with which the restarted training began; None without a restart.
      problem: What is wrong; empty if nothing is.
    """

    moment: str
    others: str
    seconds: float | None
    continued: int | None
    problem: str


class HangError(RuntimeError):
    """Something did not end within `LIMIT_SECONDS`."""


def draw_cases(kills: int = 20, stops: int = 5, lates: int = 5) -> list[Case]:
    """Draws the cases, always the same ones."""
    drawn = random.Random(SEED)
    cases = []
    for index in range(kills + stops):
        hosts = drawn.choice([Hosts(2, 2), Hosts(2, 2), Hosts(3, 1)])
        victim = drawn.randrange(hosts.count)
        if index < kills * 3 // 20:
            # While TensorFlow is imported, or the hosts meet.
            cases.append(Case("start", hosts, victim, drawn.uniform(0.0, 10.0)))
        else:
            kind = "launch" if index < kills // 2 else "kill" if index < kills else "stop"
            # Not so late that the training could end before the fault comes.
            step = drawn.randrange(EPOCHS * STEPS - 4)
            cases.append(Case(kind, hosts, victim, step, drawn.uniform(0.0, 0.3)))
    for _ in range(lates):
        hosts = drawn.choice([Hosts(2, 2), Hosts(3, 1)])
        cases.append(Case("late", hosts, drawn.randrange(hosts.count), drawn.uniform(3.0, 20.0)))
    return cases


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
            *("--grace", "3", *arguments, __file__, "--worker", str(self.folder)),
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
        _wait_until(lambda: all(one.poll() is not None for one in processes), "end")
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


def undisturbed_weights(hosts: Hosts) -> list[np.ndarray]:
    """Returns the weights that a training without faults ends with."""
    with training(hosts) as one:
        one.start(*range(hosts.count))
        problem = _check_end(one, None)
        if problem:
            raise RuntimeError(f"a training without faults failed: {problem}\n{one.log('0')}")
        return one.weights(0)


def run_case(case: Case, expected: list[np.ndarray]) -> Outcome:
    """Runs one case.

    Args:
      case: What to do.
      expected: The weights of an undisturbed training.
    """
    run = {"start": _launch, "launch": _launch, "kill": _kill, "stop": _stop, "late": _late}[
        case.kind
    ]
    with training(case.hosts) as one:
        try:
            return run(case, one, expected)
        except HangError as error:
            done = [len(one.steps_done(index)) for index in range(case.hosts.count)]
            return Outcome(f"{case.moment:.1f}", f"steps {done}", None, None, f"hangs: {error}")


def _kill(case: Case, one: Training, expected: list[np.ndarray]) -> Outcome:
    _start_and_reach(case, one)
    one.send(case.victim, signal.SIGKILL)
    moment = _step_name(one.steps_done(case.victim))
    others, seconds, problem = _others_end(case, one)
    continued, second_problem = _restart(one, expected)
    return Outcome(moment, others, seconds, continued, problem or second_problem)


def _stop(case: Case, one: Training, expected: list[np.ndarray]) -> Outcome:
    _start_and_reach(case, one)
    one.send(case.victim, signal.SIGSTOP)
    moment = _step_name(one.steps_done(case.victim))
    others, seconds, problem = _others_end(case, one)
    # It wakes up where the others are gone.
    one.send(case.victim, signal.SIGCONT)
    (status,) = one.wait_for(case.victim).values()
    if not status or one.error(case.victim) not in DOCUMENTED_ERRORS:
        problem = problem or f"when woken: status {status}, {one.error(case.victim) or 'no error'}"
    continued, second_problem = _restart(one, expected)
    return Outcome(moment, others, seconds, continued, problem or second_problem)


def _launch(case: Case, one: Training, expected: list[np.ndarray]) -> Outcome:
    launcher = one.launch("--max-restarts", "1")
    if case.kind == "start":
        time.sleep(case.moment)
        _wait_until(lambda: one.pid(case.victim) is not None, "start of the host")
    else:
        _wait_for_moment(case, one)
    steps = one.steps_done(case.victim)
    pid = one.pid(case.victim)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    _wait_until(
        lambda: "starting all workers again" in one.log("launch") or launcher.poll() is not None,
        "restart",
    )
    seconds = time.monotonic() - killed
    one.wait_all()
    problem = _check_end(one, expected)
    continued = min(one.steps_done(0), default=0) // STEPS + 1
    moment = _step_name(steps) if steps else f"{case.moment:.1f} s after the start"
    return Outcome(moment, "ended by the launcher", seconds, continued, problem)


def _late(case: Case, one: Training, expected: list[np.ndarray]) -> Outcome:
    one.start(*(index for index in range(case.hosts.count) if index != case.victim))
    time.sleep(case.moment)
    one.start(case.victim)
    problem = _check_end(one, expected)
    return Outcome(f"{case.moment:.1f} s after the others", "wait", None, None, problem)


def _start_and_reach(case: Case, one: Training) -> None:
    one.start(*range(case.hosts.count))
    _wait_for_moment(case, one)


def _wait_for_moment(case: Case, one: Training) -> None:
    """Waits until the victim has come to a step, and then for the delay."""
    _wait_until(lambda: len(one.steps_done(case.victim)) > case.moment, f"step {case.moment}")
    time.sleep(case.delay)


def _others_end(case: Case, one: Training) -> tuple[str, float, str]:
    """Returns how the other hosts end, after how many seconds, and what is wrong with that."""
    start = time.monotonic()
    others = [index for index in range(case.hosts.count) if index != case.victim]
    statuses = one.wait_for(*others)
    errors = [one.error(index) for index in others]
    problem = ""
    if not all(statuses.values()) or not set(errors) <= set(DOCUMENTED_ERRORS):
        problem = f"the others ended with statuses {list(statuses.values())}, errors {errors}"
    return ", ".join(sorted(set(errors))), time.monotonic() - start, problem


def _restart(one: Training, expected: list[np.ndarray]) -> tuple[int, str]:
    """Starts all hosts again; returns the epoch they begin with, and what is wrong in the end."""
    one.kill()
    one.start(*range(one.hosts.count))
    problem = _check_end(one, expected)
    return min(one.steps_done(0), default=0) // STEPS + 1, problem


def _check_end(one: Training, expected: list[np.ndarray] | None) -> str:
    """Waits for the end of all hosts; returns what is wrong with it."""
    statuses = one.wait_all()
    if any(statuses.values()):
        errors = [one.error(index) for index in statuses if index >= 0]
        return f"statuses {list(statuses.values())}, errors {errors}"
    for index in range(one.hosts.count):
        weights = one.weights(index)
        for own, other in zip(weights, expected or one.weights(0), strict=True):
            if not np.array_equal(own, other):
                return f"weights of host {index} differ by {np.abs(own - other).max():.3g}"
    return ""


def _step_name(steps: Sequence[int]) -> str:
    last = steps[-1] + 1 if steps else 0
    return f"epoch {min(last // STEPS + 1, EPOCHS)}, after step {last % STEPS or STEPS}"


def _wait_until(condition: Callable[[], bool], what: str) -> None:
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
    _work(folder)


def _work(folder: pathlib.Path) -> None:
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


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help="only these, such as 0,10,25")
    parser.add_argument("path", type=pathlib.Path, help="the document to write")
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.path)
        return 0
    cases = draw_cases()
    if arguments.cases:
        cases = [cases[int(number)] for number in arguments.cases.split(",")]
    expected = {hosts: undisturbed_weights(hosts) for hosts in {case.hosts for case in cases}}
    results = []
    for case in cases:
        outcome = run_case(case, expected[case.hosts])
        print(case, outcome, flush=True)
        results.append((case, outcome))
        arguments.path.write_text(document(results))
    return int(any(outcome.problem for _, outcome in results))


def document(results: Sequence[tuple[Case, Outcome]]) -> str:
    """Returns the page: what was done, a summary and the table."""
    lines = [
        "# Faults: hosts that are killed, stopped or late",
        "",
        "Made by `python tools/faults.py docs/faults.md`, on one machine whose processes are the "
        f"hosts. Moments and victims are drawn (seed {SEED}). Each training has {EPOCHS} epochs of "
        f"{STEPS} steps and a `tfcdo.keras.BackupAndRestore`. After the fault all hosts are "
        "started again. *Right* means: nothing hangs, the others end with a documented error, and "
        "every host ends with the weights of an undisturbed training, bit for bit.",
        "",
        "| fault | cases | hangs | right | the others end after (median, most) |",
        "|---|---|---|---|---|",
    ]
    for kind, name in KINDS.items():
        outcomes = [outcome for case, outcome in results if case.kind == kind]
        if outcomes:
            lines.append(_summary_line(name, outcomes))
    lines += [
        "",
        "| fault | hosts x devices | which host | when | the others | after | continues with | "
        "result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(case, outcome) for case, outcome in results]
    return "\n".join(lines) + "\n"


def _summary_line(name: str, outcomes: Sequence[Outcome]) -> str:
    hangs = sum(outcome.problem.startswith("hangs") for outcome in outcomes)
    right = sum(not outcome.problem for outcome in outcomes)
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    times = f"{np.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "-"
    return f"| {name} | {len(outcomes)} | {hangs} | {right} | {times} |"


def _line(case: Case, outcome: Outcome) -> str:
    fields = (
        KINDS[case.kind],
        str(case.hosts),
        str(case.victim),
        outcome.moment,
        outcome.others,
        "-" if outcome.seconds is None else f"{outcome.seconds:.1f} s",
        "-" if outcome.continued is None else f"epoch {outcome.continued}",
        outcome.problem or "right",
    )
    return f"| {' | '.join(fields)} |"


if __name__ == "__main__":
    sys.exit(main())
