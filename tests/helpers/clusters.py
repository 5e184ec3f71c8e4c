"""Several processes of this machine as the hosts of one cluster, each run with a time limit.

A test file has the `main` that each host runs, or scenarios by name: functions of a strategy, or of
None for one device, that return arrays by name. The names that begin with "replica" hold what each
replica of the host has, in the first axis.
"""

import contextlib
import importlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf
import warm_python

import tfcdo
from tfcdo import strategies, tf_internals
from tfcdo.cluster import protocol, session
from tfcdo.cluster.config import reserved_ports, tf_config


class Outcome(NamedTuple):
    returncode: int | None
    output: str


def run(num_hosts: int, file: str, arguments: Sequence[str], timeout: float) -> list[Outcome]:
    """Runs `main` of a file, or "scenarios", once per host, until all end or the time is over."""
    command = [warm_python.executable(), __file__, file, *arguments]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

    def run_host(config: str) -> Outcome:
        environment = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1"}
        environment["http_proxy"] = "http://127.0.0.1:9"  # Hosts reach each other without it.
        try:
            ran = subprocess.run(command, env=environment, timeout=timeout, **output)
        except subprocess.TimeoutExpired as error:
            return Outcome(None, (error.output or b"").decode(errors="replace"))
        return Outcome(ran.returncode, ran.stdout.decode(errors="replace"))

    with reserved_ports(num_hosts) as addresses:
        configs = [tf_config(addresses, host) for host in range(num_hosts)]
        with futures.ThreadPoolExecutor(num_hosts) as pool:
            return list(pool.map(run_host, configs))


def run_scenarios(
    num_hosts: int, file: str, devices: int, names: Sequence[str], timeout: float
) -> tuple[dict[str, list[dict[str, np.ndarray]]], list[Outcome]]:
    """Runs scenarios; returns the arrays that each host has saved, by scenario, and the ends."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(num_hosts, "scenarios", [file, str(devices), folder, *names], timeout)
        told = "\n".join(f"A host ended with {one.returncode}:\n{one.output}" for one in outcomes)
        assert all(one.returncode == 0 for one in outcomes), told
        results = {
            name: [dict(np.load(one)) for one in sorted(pathlib.Path(folder).glob(f"{name}-?.npz"))]
            for name in names
        }
    return results, outcomes


def _run_host(file: str, devices: str, folder: str, *names: str) -> None:
    """Runs scenarios on this host with a number of devices, and saves the results in a folder."""
    scenarios = _module(file)  # Before the strategy: it may configure virtual devices.
    tf.get_logger().setLevel("ERROR")
    random.seed()  # All hosts are forks of one process here.
    np.random.seed()
    # The machine may be so busy that a host that is well says nothing for ten seconds.
    mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=200.0)
    strategy = tfcdo.MultiWorkerMirroredStrategy(None, options, devices_per_worker=int(devices))
    host = strategy.cluster_resolver.task_id
    os.chdir(folder)  # So that scenarios leave files for each other by names alone.
    for name in names:
        start = time.monotonic()
        results = getattr(scenarios, name)(strategy)
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        if results:
            np.savez(pathlib.Path(folder, f"{name}-{host}.npz"), **results)


def _module(file: str) -> Any:
    sys.path.append(str(pathlib.Path(file).parent))
    return importlib.import_module(pathlib.Path(file).stem)


def scope(strategy: Any) -> Any:
    return strategy.scope() if strategy else contextlib.nullcontext()


def other_strategy(
    strategy: Any, options: Any = None, devices_per_worker: int | None = None, **arguments: Any
) -> Any:
    """Returns another strategy of the same hosts, and devices unless others are asked for."""
    return tfcdo.MultiWorkerMirroredStrategy(
        None,
        options or tf.distribute.experimental.CommunicationOptions(timeout_seconds=200.0),
        devices_per_worker=devices_per_worker or len(strategy.extended.worker_devices),
        **arguments,
    )


def copies(strategy: Any, variable: Any) -> np.ndarray:
    """What each replica of this host holds of a Keras variable."""
    parts = strategy.experimental_local_results(variable.value) if strategy else (variable.value,)
    return np.stack([part.numpy() for part in parts])


def weights(strategy: Any, variables: Any) -> dict[str, np.ndarray]:
    return {f"replica_{i}": copies(strategy, variable) for i, variable in enumerate(variables)}


@contextlib.contextmanager
def disagreeing(case: str, pattern: str) -> Iterator[None]:
    """Asserts that a block ends in an error that matches, and so its session, one of its own."""

    class Store(tf_internals.KeyValueStore):
        def set(self, key: str, value: str) -> None:
            super().set(f"{case}/{key}", value)

        def get(self, key: str, timeout: float) -> str | None:
            return super().get(f"{case}/{key}", timeout)

    joined = session.current()
    assert joined is not None
    apart = session.Session(joined.cluster, Store(), tf_internals.abort_collectives, 60.0)
    with (
        mock.patch.object(session, "_current", apart),
        mock.patch.object(protocol, "GRACE", 0.2),
        mock.patch.object(session, "_POLL", 0.1),
        np.testing.assert_raises_regex(protocol.DisagreementError, pattern),
    ):
        yield
    # The chief keeps the store, and stays for some seconds only.
    joined.agree({"what": f"the end of {case}"})


if __name__ == "__main__":
    if sys.argv[1] == "scenarios":
        _run_host(*sys.argv[2:])
    else:
        _module(sys.argv[1]).main(*sys.argv[2:])
