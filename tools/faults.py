"""Kills, stops, cuts off and takes away hosts of small trainings; makes a table of the results.

    python tools/faults.py [COUNT [SEED]]    # 200 cases: docs/faults.md

Each case is a training of two to four hosts, all processes of this machine under `tfcdo launch`;
where the network is cut, each host is in a network namespace of its own (as root, on Linux). The
final weights must be bitwise equal to an undisturbed training's on the same number of hosts, and
equal to one device's up to rounding. No process may be left. The seed replays the cases, but not
the machine's timing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
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
from collections.abc import Callable, Iterable, Iterator, Sequence

import fault_training
import numpy as np
import pages
import psutil
import warm_python
from fault_training import EPOCHS, SEED, STEPS

from tfcdo import version
from tfcdo.bench.hosts import LinkError, open_link

# The faults of twenty cases, with the number of each; every twenty are shuffled by themselves.
KINDS = {
    "kill worker": (5, "a worker is killed (SIGKILL)"),
    "kill chief": (3, "the chief is killed"),
    "kill both": (2, "the chief and a worker are killed"),
    "notice": (4, "a host will be taken away (SIGTERM)"),
    "pause": (3, "a host is stopped and continued (SIGSTOP, SIGCONT)"),
    "stop": (1, "a host is stopped for good"),
    "cut": (2, "the network of a host is cut"),
}
# The moments of faults, with the largest delay: it is longest where processes start.
MOMENTS = {"meeting": 2.0, "first step": 1.0, "step": 0.1, "backup": 0.01, "restart": 4.0}
_AFTER_A_STEP = ("step", "backup", "restart")
CUT_SECONDS = (5.0, 30.0, 90.0)
LARGEST_DIFFERENCE = 1e-5
# Everything that takes longer hangs. Most of the time goes into the start of processes.
LIMIT_SECONDS = 240.0
_ENDED_SECONDS = 10.0  # After the launcher's end no process may be there for longer.
_MAX_RESTARTS = 5
_TOTAL_STEPS = EPOCHS * STEPS


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault: of which kind, at which hosts, when, and for how long."""

    kind: str
    moment: str
    hosts: int
    victims: tuple[int, ...]
    step: int = 0  # After its end, if the moment is a step or a backup.
    delay: float = 0.0  # Seconds from the moment to the fault.
    seconds: float = 0.0  # Until a pause or a cut ends.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one case."""

    problem: str  # Empty if the result is correct.
    repeated: float = math.nan  # Steps that were trained more than once.
    seconds: float = math.nan  # The longest time without a step, from the fault on.
    # Share of the time from the start that the steps of the final weights took.
    useful: float = math.nan
    runs: int = 0  # How often the chief was started.
    from_one_device: float = math.nan  # Largest difference of a weight.
    load: float = math.nan  # Of the machine, at its end: waits are longer where others work.


def draw_cases(count: int = 200, seed: int = SEED) -> list[Case]:
    """Draws the cases: a smaller number of them has the first ones."""
    drawn = random.Random(seed)
    cuts = itertools.cycle(CUT_SECONDS)
    cases: list[Case] = []
    while len(cases) < count:
        kinds = [kind for kind, (times, _) in KINDS.items() for _ in range(times)]
        drawn.shuffle(kinds)
        cases += [_draw_case(kind, drawn, cuts) for kind in kinds]
    return cases[:count]


def _draw_case(kind: str, drawn: random.Random, cuts: Iterator[float]) -> Case:
    # Who waits in a meeting for a process that is stopped for good waits ten minutes, as it should.
    moment = drawn.choice([m for m in MOMENTS if kind != "stop" or m not in ("meeting", "restart")])
    hosts = 2 if kind == "cut" else drawn.randint(2, 4)
    worker = drawn.randrange(1, hosts)
    victims = {"kill worker": (worker,), "kill chief": (0,), "kill both": (0, worker)}
    seconds = {"pause": drawn.uniform(1.0, 8.0), "cut": next(cuts) if kind == "cut" else 0.0}
    return Case(
        kind,
        moment,
        hosts,
        victims.get(kind, (drawn.randrange(hosts),)),
        # Not so late that the training could end before the fault.
        step=drawn.randrange(1, _TOTAL_STEPS * 2 // 3),
        delay=drawn.uniform(0.0, MOMENTS[moment]),
        seconds=seconds.get(kind, 0.0),
    )


@functools.cache
def undisturbed(hosts: int) -> tuple[list[np.ndarray], float]:
    """Returns the weights, and the share of useful time, without faults; 0 hosts: one device."""
    with tempfile.TemporaryDirectory(prefix="tfcdo-faults-") as name:
        folder = pathlib.Path(name)
        start = time.time()
        with _started(folder, *(["--workers", str(hosts)] if hosts else [])) as process:
            process.wait(LIMIT_SECONDS)
        if process.returncode:
            raise RuntimeError(f"it failed:\n{(folder / 'log').read_text()}")
        return _weights(folder, 0), _useful(_runs(folder), start)


def run_case(case: Case) -> Outcome:
    """Runs one case."""
    with (
        tempfile.TemporaryDirectory(prefix="tfcdo-faults-") as name,
        contextlib.ExitStack() as used,
    ):
        folder = pathlib.Path(name)
        begin = time.time()
        launch = ["--max-restarts", str(_MAX_RESTARTS), "--grace", "2"]
        bridge: Sequence[str] = ()
        starts = [_started(folder, "--workers", str(case.hosts), *launch)]
        if case.kind == "cut":
            *namespaces, bridge = used.enter_context(network(case.hosts))
            addresses = (f"10.0.0.{host + 1}:2222" for host in range(case.hosts))
            launch += ["--hosts", ",".join(addresses)]
            starts = [
                _started(folder, "--index", str(host), *launch, inside=namespace)
                for host, namespace in enumerate(namespaces)
            ]
        processes = [used.enter_context(start) for start in starts]
        try:
            _wait_for_moment(case, folder)
            time.sleep(case.delay)
            fault = time.time()
            _disturb(case, folder, bridge)
            _wait_until(lambda: None not in [p.poll() for p in processes], "the end")
        except TimeoutError as error:
            return Outcome(f"hangs: {error}")
        statuses = [process.returncode for process in processes]
        if any(statuses):
            log = " ".join((folder / "log").read_text()[-300:].split())
            return Outcome(f"status {statuses}: {log}")
        if left := _left(folder):
            return Outcome(f"processes are left: {left}")
        return _outcome(case, folder, begin, fault)


def _wait_for_moment(case: Case, folder: pathlib.Path) -> None:
    """Waits until a training has come to the moment of its fault, or shortly before it."""
    restarts, victim = case.moment == "restart", case.victims[0]
    if case.moment in _AFTER_A_STEP:
        host = 0 if restarts else victim
        _wait_until(lambda: len(_steps(folder, 0, host)) >= case.step, f"step {case.step}")
    if restarts:
        _send(_pids(folder, case.hosts - 1)[-1], signal.SIGKILL)
    files = {"first step": f"begins-0-{victim}", "backup": "backup/writing-*"}
    file = files.get(case.moment, f"pid-{restarts:d}-{victim}")
    _wait_until(lambda: any(folder.glob(file)), f"the {case.moment} of host {victim}")


def _disturb(case: Case, folder: pathlib.Path, bridge: Sequence[str]) -> None:
    if bridge:
        cut(bridge, case.victims[0], case.seconds)
        return
    number = {"notice": signal.SIGTERM, "pause": signal.SIGSTOP, "stop": signal.SIGSTOP}
    pids = [_pids(folder, victim)[-1] for victim in case.victims]
    for pid in pids:
        _send(pid, number.get(case.kind, signal.SIGKILL))
    if case.kind == "pause":
        time.sleep(case.seconds)
        _send(pids[0], signal.SIGCONT)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[list[tuple[str, ...]]]:
    """Yields the command that enters the network namespace of each host, and their bridge's."""
    with contextlib.ExitStack() as links:
        inside = [links.enter_context(open_link(None)).command for _ in range(hosts + 1)]
        *namespaces, bridge = inside
        _ip(bridge, "link add bridge type bridge", "link set bridge up")
        for host, namespace in enumerate(namespaces):
            link = f"link add port{host} type veth peer name eth0 netns {namespace[-1]}"
            _ip(bridge, link, f"link set port{host} master bridge up")
            _ip(namespace, f"address add 10.0.0.{host + 1}/24 dev eth0", "link set eth0 up")
        yield inside


def _ip(inside: Sequence[str], *commands: str) -> None:
    """Runs `ip` inside a namespace."""
    batch = [*inside, "ip", "-batch", "-"]
    subprocess.run(batch, input="\n".join(commands), text=True, check=True)


def cut(bridge: Sequence[str], host: int, seconds: float) -> None:
    """Lets nothing through to and from a host, for some time."""
    _ip(bridge, f"link set port{host} down")
    time.sleep(seconds)
    _ip(bridge, f"link set port{host} up")


def can_cut() -> bool:
    """Returns whether this process may make network namespaces."""
    with contextlib.suppress(LinkError, subprocess.CalledProcessError), network(2):
        return True
    return False


def _outcome(case: Case, folder: pathlib.Path, begin: float, fault: float) -> Outcome:
    runs = _runs(folder)
    weights = [_weights(folder, host) for host in range(case.hosts)]
    from_one_device, from_hosts = (
        np.max([pages.largest_difference(own, undisturbed(hosts)[0]) for own in weights])
        for hosts in (0, case.hosts)
    )
    problem = ""
    if {step for run in runs for step, _ in run} != set(range(1, _TOTAL_STEPS + 1)):
        problem = "steps are missing"
    elif not from_one_device <= LARGEST_DIFFERENCE:
        problem = f"differs by {from_one_device:.2g} from one device"
    elif from_hosts:
        problem = f"differs by {from_hosts:.2g} from the same hosts"
    after = [fault, *(moment for run in runs for _, moment in run if moment > fault)]
    return Outcome(
        problem=problem,
        repeated=sum(map(len, runs)) - _TOTAL_STEPS,
        seconds=max((b - a for a, b in itertools.pairwise(after)), default=0.0),
        useful=_useful(runs, begin),
        runs=len(_pids(folder, 0)),
        from_one_device=from_one_device,
    )


def _useful(runs: Sequence[Sequence[tuple[int, float]]], begin: float) -> float:
    """Returns the time of all steps, each once, as a share of the time until the last one."""
    moments = [[moment for _, moment in run] for run in runs]
    steps = [b - a for run in moments for a, b in itertools.pairwise(run)]
    return _TOTAL_STEPS * statistics.median(steps) / (max(map(max, moments)) - begin)


@contextlib.contextmanager
def _started(
    folder: pathlib.Path, *launch: str, inside: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A training under `tfcdo launch`, or alone if that gets no arguments; ends with the block."""
    # TensorFlow's import takes longer than everything else that a host does here.
    command = [*inside, warm_python.executable()]
    if launch:
        command += ["-m", "tfcdo", "launch", *launch]
    variables = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(
            [*command, fault_training.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()  # A launcher's workers end when it does.


def _wait_until(condition: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no sign of {name} in {LIMIT_SECONDS:g} s")
        time.sleep(0.001)


def _pids(folder: pathlib.Path, host: int) -> list[int]:
    """Returns the processes that have been a host, the last one last."""
    return [int(path.read_text()) for path in sorted(folder.glob(f"pid-?-{host}"))]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # Another host's end has ended it.
        os.kill(pid, number)


def _left(folder: pathlib.Path) -> list[int]:
    """Returns a training's processes that do not end."""
    processes = []
    for path in folder.glob("pid-*"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(path.read_text()))
            # Else the number is another one's now. Starts are rounded to a second.
            if process.create_time() < path.stat().st_mtime + 1.0:
                processes.append(process)
    return [process.pid for process in psutil.wait_procs(processes, _ENDED_SECONDS)[1]]


def _steps(folder: pathlib.Path, run: int, host: int) -> list[tuple[int, float]]:
    """Returns the numbers and times of the steps that a host has ended."""
    path = folder / f"steps-{run}-{host}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), float(moment)) for step, moment in map(str.split, lines)]


def _runs(folder: pathlib.Path) -> list[list[tuple[int, float]]]:
    """Returns the steps of each run of the chief that has ended one."""
    return [run for number in range(_MAX_RESTARTS + 1) if (run := _steps(folder, number, 0))]


def _weights(folder: pathlib.Path, host: int) -> list[np.ndarray]:
    with np.load(folder / f"weights-{host}.npz") as arrays:
        return [*arrays.values()]


def parts(
    results: Sequence[tuple[Case, Outcome]], planned: int, seed: int
) -> dict[str, Iterable[str]]:
    """Makes the lines of each part of the page."""
    good = [(case, outcome) for case, outcome in results if not outcome.problem]
    largest = max((outcome.from_one_device for _, outcome in good), default=math.nan)
    loads = [outcome.load for _, outcome in results]
    shares = ", ".join(f"{100 * undisturbed(hosts)[1]:.0f} % on {hosts}" for hosts in (2, 3, 4))
    return {
        "counts": [
            f"**{len(good)} of {len(results)} cases are correct**, of {planned} that are planned, "
            f"with tfcdo {version.__version__} and seed {seed}. Their weights differ from one "
            f"device by at most {largest:.2g}. Undisturbed, the share of useful time is {shares} "
            f"hosts. The last case ended on {datetime.date.today().isoformat()}; the machine had "
            f"{os.cpu_count()} cores and a load of {min(loads):.0f} to {max(loads):.0f}."
        ],
        "kinds": pages.table(
            "fault | cases | correct | steps repeated (median, most) | seconds without a step "
            "(median, most) | share of useful time (median)",
            (
                (name, *_summary([outcome for case, outcome in results if case.kind == kind]))
                for kind, (_, name) in KINDS.items()
            ),
        ),
        "cases": pages.table(
            "case | moment | hosts | host | after step | lasts | runs | steps repeated | seconds "
            "without a step | useful time | result",
            itertools.starmap(_cells, results),
        ),
    }


def _summary(outcomes: Sequence[Outcome]) -> Iterator[object]:
    """Yields the numbers of cases and correct ones; medians of those, and their largest values."""
    good = [one for one in outcomes if not one.problem]
    yield from (len(outcomes), len(good))
    good = good or [Outcome("none")]
    repeated, seconds, useful = zip(*((one.repeated, one.seconds, one.useful) for one in good))
    yield f"{statistics.median(repeated):g}, {max(repeated)}"
    yield f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
    yield f"{100 * statistics.median(useful):.0f} %"


def _cells(case: Case, outcome: Outcome) -> tuple[object, ...]:
    """Returns the cells of a case's row."""
    step = case.step if case.moment in _AFTER_A_STEP else "-"
    lasts = f"{case.seconds:.0f} s" if case.seconds else "-"
    hosts = ", ".join(map(str, case.victims))
    seconds, useful = f"{outcome.seconds:.1f}", f"{100 * outcome.useful:.0f} %"
    cells = (case.kind, case.moment, case.hosts, hosts, step, lasts, outcome.runs, outcome.repeated)
    return (*cells, seconds, useful, outcome.problem or "correct")


def main(count: str = "200", seed: str = str(SEED)) -> int:
    """Runs the cases and makes the tables again after each; returns 1 if one is not correct."""
    cases = draw_cases(int(count), int(seed))
    if not can_cut():
        print("cases whose network is cut are left out: `unshare --net` needs root", flush=True)
        cases = [case for case in cases if case.kind != "cut"]
    results: list[tuple[Case, Outcome]] = []
    for case in pages.with_progress(
        cases, lambda case: f"{KINDS[case.kind][1]}: {case.moment}; {case.hosts} hosts"
    ):
        outcome = dataclasses.replace(run_case(case), load=os.getloadavg()[0])
        print(outcome.problem or "correct", flush=True)
        results.append((case, outcome))
        for name, lines in parts(results, int(count), int(seed)).items():
            pages.replace("docs/faults.md", f"faults.py, {name}", ["\n".join(lines)])
    return int(any(outcome.problem for _, outcome in results))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
