"""Several processes of this machine as the hosts of one cluster, each run with a time limit."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

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
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"{host}.log") for host in range(num_hosts)]
        processes = [
            warm_python.FORKING.Process(
                target=_work, args=(module, arguments, tf_config(ports, host), log), daemon=True
            )
            for host, log in enumerate(logs)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + timeout
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.pid is not None and process.is_alive():
                    process.kill()
                    process.join()
        return [
            Outcome(code, log.read_text(errors="replace"))
            for code, log in zip(codes, logs, strict=True)
        ]


def _work(module: str, arguments: Sequence[str], config: str, log: pathlib.Path) -> None:
    """One host: this process's output goes to a file."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(TF_CONFIG=config, CUDA_VISIBLE_DEVICES="-1")
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    importlib.import_module(module).main(*arguments)
