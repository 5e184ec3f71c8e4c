"""Kills, stops and delays hosts of small trainings; makes a table of what the others do.

    python tools/faults.py docs/faults.md

Each case is a training of two or three hosts, all processes of this machine. After the fault, all
hosts are started again, and the weights must be bitwise identical to an undisturbed training.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Sequence

import numpy as np
from fault_training import EPOCHS, SEED, STEPS, HangError, Hosts, Training, training, wait_until

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
    "FailedPreconditionError",
    "RendezvousError",
    # A stopped chief that wakes up gets this: its own service has given it up.
    "AbortedError",
)


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
    """Outcome of one case.

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


def undisturbed_weights(hosts: Hosts) -> list[np.ndarray]:
    """Returns the weights that a training without faults ends with."""
    with training(hosts) as one:
        one.start(*range(hosts.count))
        problem = _check_end(one, None)
        if problem:
            raise RuntimeError(f"a training without faults failed: {problem}\n{one.log('0')}")
        return one.weights(0)


def run_case(case: Case, expected: list[np.ndarray]) -> Outcome:
    """Runs one case."""
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
        wait_until(lambda: one.pid(case.victim) is not None, "start of the host")
    else:
        _wait_for_moment(case, one)
    steps = one.steps_done(case.victim)
    pid = one.pid(case.victim)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_until(
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
    wait_until(lambda: len(one.steps_done(case.victim)) > case.moment, f"step {case.moment}")
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
    """Says which step a host had ended last, from 1."""
    if not steps:
        return "before the first step"
    return f"epoch {steps[-1] // STEPS + 1}, after step {steps[-1] % STEPS + 1}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", help="only these, such as 0,10,25")
    parser.add_argument("path", type=pathlib.Path, help="the document to write")
    arguments = parser.parse_args()
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
        "| fault | cases | hangs | correct | the others end after (median, most) |",
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
    correct = sum(not outcome.problem for outcome in outcomes)
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    times = f"{np.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "-"
    return f"| {name} | {len(outcomes)} | {hangs} | {correct} | {times} |"


def _line(case: Case, outcome: Outcome) -> str:
    fields = (
        KINDS[case.kind],
        str(case.hosts),
        str(case.victim),
        outcome.moment,
        outcome.others,
        "-" if outcome.seconds is None else f"{outcome.seconds:.1f} s",
        "-" if outcome.continued is None else f"epoch {outcome.continued}",
        outcome.problem or "correct",
    )
    return f"| {' | '.join(fields)} |"


if __name__ == "__main__":
    sys.exit(main())
