"""Several processes of this machine as the hosts of one cluster, each run with a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import warm_python


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a host's process.

    Attributes:
      returncode: its exit status; None if it was still running at the time limit.
      output: what it printed.
    """

    returncode: int | None
    output: str


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def tf_config(ports: Sequence[int], index: int) -> str:
    """The TF_CONFIG of one host of a cluster on this machine."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def run(num_hosts: int, module: str, arguments: Sequence[str], timeout: float) -> list[Outcome]:
    """Runs a module's `main` once a host, until all have ended or the time is over.

    Args:
      num_hosts: how many hosts.
      module: a module beside this one.
      arguments: what each `main` gets.
      timeout: the time limit in seconds; what still runs then is killed.

    Returns:
      How each host ended.
    """
    ports = free_ports(num_hosts)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        logs = [pathlib.Path(folder, f"{host}.log") for host in range(num_hosts)]
        processes = [
            ending.enter_context(_started([module, *arguments], tf_config(ports, host), log))
            for host, log in enumerate(logs)
        ]
        deadline = time.monotonic() + timeout
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [
            Outcome(process.poll(), log.read_text(errors="replace"))
            for process, log in zip(processes, logs, strict=True)
        ]


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
    importlib.import_module(sys.argv[1]).main(*sys.argv[2:])
