"""Several processes of this machine as the hosts of one cluster, each run with a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
import warm_python

from tfcdo.launch import cluster


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a host's process."""

    returncode: int | None
    output: str


def run(num_hosts: int, file: str, arguments: Sequence[str], timeout: float) -> list[Outcome]:
    """Runs `main` of a file once per host, until all have ended or the time is over."""
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster.reserved_ports(num_hosts) as addresses,
        contextlib.ExitStack() as ending,
    ):
        logs = [pathlib.Path(folder, f"{host}.log") for host in range(num_hosts)]
        configs = [cluster.tf_config(addresses, host) for host in range(num_hosts)]
        processes = [
            ending.enter_context(_started([file, *arguments], config, log))
            for config, log in zip(configs, logs, strict=True)
        ]
        deadline = time.monotonic() + timeout
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [
            Outcome(process.poll(), log.read_text(errors="replace"))
            for process, log in zip(processes, logs, strict=True)
        ]


def run_scenarios(
    num_hosts: int, file: str, devices: int, names: Sequence[str], timeout: float
) -> tuple[dict[str, list[dict[str, np.ndarray]]], list[Outcome]]:
    """Runs scenarios; returns the arrays that each host has saved, by scenario, and the ends."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(num_hosts, file, [str(devices), folder, *names], timeout)
        for outcome in outcomes:
            assert outcome.returncode == 0, outcome.output
        results = {
            name: [
                dict(np.load(path)) for path in sorted(pathlib.Path(folder).glob(f"{name}-?.npz"))
            ]
            for name in names
        }
    return results, outcomes


@contextlib.contextmanager
def _started(
    arguments: Sequence[str], config: str, log: pathlib.Path
) -> Iterator[subprocess.Popen[bytes]]:
    """While this lasts, a host runs, whose output goes to a file."""
    environment = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [warm_python.executable(), __file__, *arguments],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    program = pathlib.Path(sys.argv[1])
    sys.path.append(str(program.parent))
    importlib.import_module(program.stem).main(*sys.argv[2:])
