"""A process's description of its cluster, TF_CONFIG: reading, checking and making it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

# The jobs whose tasks train together, in the order in which they are counted.
_TRAINING_JOBS = ("chief", "worker")
_NO_PROXY = "no_grpc_proxy"  # gRPC reads it before `no_proxy`, both in lower case.


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


class _Task(msgspec.Struct, frozen=True):
    """The task of TF_CONFIG."""

    type: str | None = None
    index: int | None = None


class _TfConfig(msgspec.Struct, frozen=True):
    """The content of TF_CONFIG; TensorFlow has more, which does not matter here."""

    cluster: dict[str, Annotated[list[str], msgspec.Meta(min_length=1)]] = {}
    task: _Task = _Task()


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
    for addresses_of_job in spec.values():
        for address in addresses_of_job:
            split_address(address)
    if job is None or index is None:
        raise ValueError(
            "TF_CONFIG, or the cluster resolver, must say which task of the cluster this process "
            f"is (a task type and an index); got the cluster {dict(spec)} and no task"
        )
    if job not in spec:
        hint = " (an evaluator needs its address, or no TF_CONFIG)" if job == "evaluator" else ""
        raise ValueError(f"the task type must be one of {sorted(spec)}; got {job!r}{hint}")
    if job not in (*_TRAINING_JOBS, "evaluator"):
        raise ValueError(
            f"the task type must be 'chief', 'worker' or 'evaluator' to train; got {job!r}"
        )
    if len(spec.get("chief", ())) > 1:
        raise ValueError(f"a cluster has at most one chief; got {list(spec['chief'])}")
    count = len(spec[job])
    if type(index) is not int or not 0 <= index < count:
        raise ValueError(
            f"the task index must be one of the {count} of job {job!r}, 0 to {count - 1}; "
            f"got {index!r}"
        )
    if job == "evaluator":
        return None
    tasks = [
        ClusterTask(name, number, address)
        for name in _TRAINING_JOBS
        for number, address in enumerate(spec.get(name, ()))
    ]
    addresses = [task.address for task in tasks]
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError(f"each task must have an address of its own; {twice[0]} is duplicated")
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
    config = _read_tf_config()
    return from_spec(config.cluster, config.task.type, config.task.index)


def num_training_hosts() -> int:
    """Returns how many hosts train with this one by TF_CONFIG; raises a `ValueError` as above."""
    config = _read_tf_config()
    if config.task.type not in _TRAINING_JOBS:
        return 1
    return sum(len(config.cluster.get(job, ())) for job in _TRAINING_JOBS)


def _read_tf_config() -> _TfConfig:
    text = os.environ.get("TF_CONFIG", "")
    if not text.strip():
        os.environ.pop("TF_CONFIG", None)  # TensorFlow reads an empty one too, as invalid JSON.
        return _TfConfig()
    try:
        return msgspec.json.decode(text, type=_TfConfig, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"TF_CONFIG must be JSON with 'cluster' (lists of 'host:port' by job) and 'task' (a "
            f"'type' and an 'index'); got {text!r}: {error}"
        ) from error


def connect_without_proxy(cluster: Cluster) -> None:
    """Has gRPC connect hosts as they have met: without the proxy that `http_proxy` names."""
    known = os.environ.get(_NO_PROXY) or os.environ.get("no_proxy")
    hosts = (task.address.rpartition(":")[0].strip("[]") for task in cluster.tasks)
    os.environ[_NO_PROXY] = ",".join(filter(None, (known, *hosts)))


def split_address(address: Any) -> tuple[str, int]:
    """Returns the host and port of `host:port`, where an IPv6 address stands in brackets."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(f"//{address}")
        if parts.hostname and parts.port and not (parts.username or any(parts[2:])):
            return parts.hostname, parts.port
    raise ValueError(
        f"an address in a cluster must be 'host:port' with a port from 1 to 65535; got {address!r}"
    )


def tf_config(addresses: Sequence[str], index: int) -> str:
    """Returns the value of TF_CONFIG for one worker of a cluster."""
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    )


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[str, ...]]:
    """Holds free ports of this machine; yields addresses such as "127.0.0.1:40123"."""
    # Each port stays bound to a socket that does not listen. Linux then gives it to nobody who
    # asks for any port, but lets a server that names it (with SO_REUSEADDR, as TensorFlow's does)
    # listen there. So there is no moment at which another process could take it. TensorFlow's
    # server listens at all addresses: a port that is held at one alone may be in use at another.
    dual = socket.has_dualstack_ipv6()
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(count):
            held = stack.enter_context(socket.socket(socket.AF_INET6 if dual else socket.AF_INET))
            if dual:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
        yield tuple(addresses)
