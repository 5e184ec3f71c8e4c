"""Kills, stops and takes away hosts of small trainings; makes a table of the results.

    python tools/faults.py docs/faults.md [--share 0.1]

Each case is a training of two to four hosts, all processes of this machine under `tfcdo launch`.
Its final weights are compared with an undisturbed training on one device, and with an undisturbed
one on the same hosts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import fault_training
import numpy as np
import warm_python
from fault_training import EPOCHS, PAUSE_SECONDS, SEED, STEPS

COUNTS = {"kill": 20, "notice": 10, "stop": 5}
NAMES = {
    "kill": "killed (SIGKILL)",
    "notice": "will be taken away (SIGTERM)",
    "stop": "stopped (SIGSTOP)",
}
_SIGNALS = {"notice": signal.SIGTERM, "stop": signal.SIGSTOP}
LARGEST_DIFFERENCE = 1e-5
# Everything that takes longer hangs. Most of the time goes into the start of processes.
LIMIT_SECONDS = 240.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault: of which kind, at which host, and when after the end of which step."""

    kind: str
    hosts: int
    victim: int
    step: int
    delay: float  # Seconds.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one case."""

    repeated: int  # Steps that were trained more than once.
    seconds: float  # From the fault to the end of the first step after it.
    from_one_device: float  # Largest difference of a weight.
    from_hosts: float  # The same, from the undisturbed training on the same hosts.
    problem: str  # Empty if the result is correct.


def draw_cases(share: float = 1.0) -> list[Case]:
    """Draws the cases, always the same ones; a share of them has some of each kind."""
    drawn = random.Random(SEED)
    cases = []
    for kind, count in COUNTS.items():
        for _ in range(math.ceil(count * share)):
            hosts = drawn.randint(2, 4)
            # Not so late that the training could end before the fault.
            step = drawn.randrange(1, EPOCHS * STEPS * 2 // 3)
            # The next step begins after a pause, so that most faults come inside a step.
            delay = drawn.uniform(PAUSE_SECONDS, 3 * PAUSE_SECONDS)
            cases.append(Case(kind, hosts, drawn.randrange(hosts), step, delay))
    return cases


@functools.cache
def undisturbed_weights(hosts: int) -> list[np.ndarray]:
    """Returns the final weights of a training without faults; 0 hosts: on one device."""
    with tempfile.TemporaryDirectory(prefix="tfcdo-faults-") as name:
        folder = pathlib.Path(name)
        process = _start(folder, *(["--workers", str(hosts)] if hosts else []))
        with _ended(process):
            _wait_until(lambda: process.poll() is not None, "the end")
        if process.returncode:
            raise RuntimeError(f"it failed:\n{(folder / 'log').read_text()}")
        return _weights(folder, 0)


def run_case(case: Case) -> Outcome:
    """Runs one case."""
    with tempfile.TemporaryDirectory(prefix="tfcdo-faults-") as name:
        folder = pathlib.Path(name)
        launch = ["--workers", str(case.hosts), "--max-restarts", "1", "--grace", "2"]
        process = _start(folder, *launch)
        with _ended(process):
            try:
                done = folder / f"steps-0-{case.victim}"
                _wait_until(lambda: len(_steps(done)) >= case.step, f"step {case.step}")
                time.sleep(case.delay)
                fault = time.time()
                pid = int((folder / f"pid-0-{case.victim}").read_text())
                os.kill(pid, _SIGNALS.get(case.kind, signal.SIGKILL))
                _wait_until(lambda: process.poll() is not None, "the end")
            except TimeoutError as error:
                return _failed(f"hangs: {error}")
        if process.returncode:
            return _failed(f"status {process.returncode}: {(folder / 'log').read_text()[-300:]}")
        return _outcome(case, folder, fault)


def _outcome(case: Case, folder: pathlib.Path, fault: float) -> Outcome:
    runs = [_steps(folder / f"steps-{run}-0") for run in range(2)]
    if not all(runs):
        return _failed(f"steps of 2 runs: {[*map(len, runs)]}")
    weights = [_weights(folder, host) for host in range(case.hosts)]
    from_one_device = max(_difference(own, undisturbed_weights(0)) for own in weights)
    from_hosts = max(_difference(own, undisturbed_weights(case.hosts)) for own in weights)
    problem = ""
    if not from_one_device <= LARGEST_DIFFERENCE:
        problem = f"differs by {from_one_device:.2g} from one device"
    elif from_hosts:
        problem = f"differs by {from_hosts:.2g} from the same hosts"
    return Outcome(
        repeated=sum(map(len, runs)) - EPOCHS * STEPS,
        seconds=runs[1][0][1] - fault,
        from_one_device=from_one_device,
        from_hosts=from_hosts,
        problem=problem,
    )


def _failed(problem: str) -> Outcome:
    return Outcome(0, math.nan, math.nan, math.nan, " ".join(problem.split()))


def _start(folder: pathlib.Path, *launch: str) -> subprocess.Popen[bytes]:
    """Starts a training under `tfcdo launch`, or alone if that gets no arguments."""
    # TensorFlow's import takes longer than everything else that a host does here.
    command = [warm_python.executable()]
    if launch:
        command += ["-m", "tfcdo.cli.main", "launch", *launch]
    variables = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, fault_training.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        )


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a training's processes with the block: the launcher's workers end when it does."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _wait_until(condition: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no sign of {name} in {LIMIT_SECONDS:g} s")
        time.sleep(0.005)


def _steps(path: pathlib.Path) -> list[tuple[int, float]]:
    """Returns the numbers and times of the steps that a host has ended."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), float(moment)) for step, moment in map(str.split, lines)]


def _weights(folder: pathlib.Path, host: int) -> list[np.ndarray]:
    with np.load(folder / f"weights-{host}.npz") as arrays:
        return [arrays[name] for name in arrays.files]


def _difference(own: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(own, other, strict=True))


def document(results: Sequence[tuple[Case, Outcome]]) -> str:
    """Returns the page: the method, a summary and the table."""
    done = collections.Counter(case.kind for case, _ in results)
    lines = [
        "# Faults: hosts that are killed, stopped or taken away",
        "",
        "Made by `make faults` (`python tools/faults.py docs/faults.md`), on one machine whose "
        f"processes are the hosts. Moments and hosts are drawn (seed {SEED}). Each training has "
        f"{EPOCHS * STEPS} steps and a `tfcdo.keras.BackupAndRestore(save_freq=10)`. Its gradients "
        "are reduced in many packs. `tfcdo launch` starts all hosts again after a fault, which "
        f"takes most of the seconds (load of this machine at the end: {os.getloadavg()[2]:.0f}).",
        "",
        "A result is correct if the weights of all hosts differ by at most "
        f"{LARGEST_DIFFERENCE:g} from an undisturbed training on one device. They "
        "must also be bitwise identical to an undisturbed training on the same hosts.",
        "",
        "Cases in this table: "
        + ", ".join(f"{done[kind]} of {count} ({kind})" for kind, count in COUNTS.items())
        + ".",
        "",
        "| a host is | cases | correct | steps repeated (median, most) | seconds until training "
        "went on (median, most) |",
        "|---|---|---|---|---|",
    ]
    for kind, name in NAMES.items():
        good = [outcome for case, outcome in results if case.kind == kind and not outcome.problem]
        columns = ["-", "-"]
        if good:
            repeated = [outcome.repeated for outcome in good]
            seconds = [outcome.seconds for outcome in good]
            columns = [
                f"{statistics.median(repeated):g}, {max(repeated)}",
                f"{statistics.median(seconds):.1f}, {max(seconds):.1f}",
            ]
        lines.append(f"| {name} | {done[kind]} | {len(good)} | {' | '.join(columns)} |")
    lines += [
        "",
        "| case | hosts | host | after step | steps repeated | seconds until training went on | "
        "difference from one device | from the same hosts | result |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, outcome in results:
        lines.append(
            f"| {case.kind} | {case.hosts} | {case.victim} | {case.step} | {outcome.repeated} | "
            f"{outcome.seconds:.1f} | {outcome.from_one_device:.2g} | "
            f"{outcome.from_hosts:.2g} | {outcome.problem or 'correct'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the cases, up to 1")
    parser.add_argument("path", type=pathlib.Path, help="the document to write")
    arguments = parser.parse_args()
    results = []
    for case in draw_cases(arguments.share):
        outcome = run_case(case)
        print(case, outcome, flush=True)
        results.append((case, outcome))
        arguments.path.write_text(document(results))
    return int(any(outcome.problem for _, outcome in results))


if __name__ == "__main__":
    sys.exit(main())
