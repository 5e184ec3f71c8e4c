"""Reading and checking what a process is told about its cluster, before any server starts."""

from __future__ import annotations

import dataclasses
import json
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

# The jobs whose tasks train together, in the order in which they are counted.
_TRAINING_JOBS = ("chief", "worker")


@dataclasses.dataclass(frozen=True)
class ClusterTask:
    """One host: its job, its number in that job, and where its server listens, as `host:port`."""

    job: str
    index: int
    address: str

    @property
    def device_prefix(self) -> str:
        """Returns the beginning of the names of its devices."""
        return f"/job:{self.job}/replica:0/task:{self.index}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The hosts that train together, and the place of this process among them."""

    tasks: tuple[ClusterTask, ...]
    index: int

    @property
    def is_chief(self) -> bool:
        """Tells whether this is the host that others take initial values and instructions from."""
        return self.index == 0

    @property
    def others(self) -> tuple[int, ...]:
        """Returns the numbers of all other hosts."""
        return tuple(host for host in range(len(self.tasks)) if host != self.index)

    def name(self, host: int) -> str:
        """Names a host in a message: its number, its task and its address."""
        task = self.tasks[host]
        return f"host {host} (/job:{task.job}/task:{task.index} at {task.address})"


def from_resolver(resolver: Any) -> Cluster | None:
    """Returns the hosts of a `tf.distribute.cluster_resolver.ClusterResolver`; see `from_spec`."""
    if not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "cluster_resolver must be a tf.distribute.cluster_resolver.ClusterResolver or None; "
            f"got {resolver!r}"
        )
    spec = resolver.cluster_spec()
    return from_spec(spec.as_dict() if spec else {}, resolver.task_type, resolver.task_id)


def from_spec(spec: Mapping[str, Sequence[str]], job: Any, index: Any) -> Cluster | None:
    """Returns the hosts that train together; None for an evaluator or a process on its own."""
    if not spec:
        return None
    if job is None or index is None:
        raise ValueError(
            "TF_CONFIG, or the cluster resolver, must say which task of the cluster this process "
            f"is (a task type and an index); got the cluster {dict(spec)} and no task"
        )
    if job == "evaluator" and job not in spec:
        raise ValueError(
            "an evaluator must be in the cluster with its address, or have no TF_CONFIG; got "
            f"the cluster {dict(spec)}"
        )
    if job not in spec:
        raise ValueError(f"the task type must be one of {sorted(spec)}; got {job!r}")
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError(f"the task index must be an int; got {index!r}")
    if job not in (*_TRAINING_JOBS, "evaluator"):
        raise ValueError(
            f"the task type must be 'chief', 'worker' or 'evaluator' to train; got {job!r}"
        )
    if len(spec.get("chief", ())) > 1:
        raise ValueError(f"a cluster has at most one chief; got {list(spec['chief'])}")
    if not 0 <= index < len(spec[job]):
        raise ValueError(
            f"the task index must be one of the {len(spec[job])} of job {job!r}, 0 to "
            f"{len(spec[job]) - 1}; got {index}"
        )
    if job == "evaluator":
        return None
    tasks = [
        ClusterTask(name, number, address)
        for name in _TRAINING_JOBS
        for number, address in enumerate(spec.get(name, ()))
    ]
    for task in tasks:
        split_address(task.address)
    addresses = [task.address for task in tasks]
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError(f"each task must have an address of its own; {twice[0]} is there twice")
    other_jobs = sorted(set(spec) - {*_TRAINING_JOBS, "evaluator"})
    if len(tasks) == 1 and other_jobs:
        # With more of them, tfcdo tells TensorFlow whom to wait for.
        raise ValueError(
            f"a cluster whose only training task is of job {job!r} must have no other jobs, whose "
            f"tasks TensorFlow waits for without end; got {other_jobs}"
        )
    return Cluster(tuple(tasks), [(task.job, task.index) for task in tasks].index((job, index)))


def from_tf_config() -> Cluster | None:
    """Returns the hosts that TF_CONFIG names; raises a `ValueError` if it is not as documented."""
    text = os.environ.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"TF_CONFIG must be JSON; got {text!r}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG must be a JSON object; got {text!r}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise ValueError(
            "TF_CONFIG must hold objects 'cluster' (addresses by job) and 'task' (a type and an "
            f"index); got {text!r}"
        )
    for job, addresses in cluster.items():
        if not isinstance(addresses, list) or not addresses:
            raise ValueError(
                f"TF_CONFIG: the tasks of job {job!r} must be a list of 'host:port'; "
                f"got {addresses!r}"
            )
        for address in addresses:
            split_address(address)
    index = task.get("index")
    if isinstance(index, str) and index.isdigit():  # As TensorFlow reads it.
        index = int(index)
    return from_spec(cluster, task.get("type"), index)


def split_address(address: Any) -> tuple[str, int]:
    """Returns the host and port of `host:port`, where an IPv6 address stands in brackets."""
    try:
        if not isinstance(address, str):
            raise ValueError
        parts = urllib.parse.urlsplit(f"//{address}")
        if not parts.hostname or not parts.port or parts.path or parts.username:
            raise ValueError
        return parts.hostname, parts.port
    except ValueError:
        raise ValueError(
            f"an address in a cluster must be 'host:port' with a port from 1 to 65535; "
            f"got {address!r}"
        ) from None
