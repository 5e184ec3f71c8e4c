"""Several processes of this machine as the hosts of one cluster, each run with a time limit."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parent.parent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a host's process ended.

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


def run(
    num_hosts: int,
    arguments: Sequence[str],
    timeout: float,
    environment: Mapping[int, Mapping[str, str]] | None = None,
    script: str = "host.py",
) -> list[Outcome]:
    """Runs a script once a host, until all have ended or the time is over.

    Args:
      num_hosts: how many hosts.
      arguments: what each script gets.
      timeout: the time limit in seconds; what still runs then is killed.
      environment: more environment variables, by host.
      script: a script beside this module.

    Returns:
      How each host ended.
    """
    ports = free_ports(num_hosts)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"{host}.log") for host in range(num_hosts)]
        try:
            for host, log in enumerate(logs):
                variables = {
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "-1",
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                    "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _HERE))),
                    "TF_CONFIG": tf_config(ports, host),
                    **(environment or {}).get(host, {}),
                }
                with log.open("wb") as output:
                    command = [sys.executable, str(_HERE / script), *arguments]
                    processes.append(
                        subprocess.Popen(
                            command, env=variables, stdout=output, stderr=subprocess.STDOUT
                        )
                    )
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline and any(one.poll() is None for one in processes):
                time.sleep(0.1)
            codes = [one.poll() for one in processes]
        finally:
            for one in processes:
                if one.poll() is None:
                    one.kill()
                one.wait()
        return [
            Outcome(code, log.read_text(errors="replace"))
            for code, log in zip(codes, logs, strict=True)
        ]
