"""Checks TF_CONFIG, and whether the hosts that it names answer, without TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import socket
from concurrent import futures

from tfcdo.cluster import config
from tfcdo.launch import cluster as launch_cluster

_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Host:
    """One host of the cluster as this one sees it; a refused connection is an answer."""

    name: str
    is_here: bool
    reached: bool
    status: str


@dataclasses.dataclass(frozen=True)
class TfConfig:
    """Content of TF_CONFIG, its problem if it has one, and the hosts that train together."""

    text: str
    problem: str = ""
    hosts: tuple[Host, ...] = ()


def examine_tf_config() -> TfConfig:
    """Reads TF_CONFIG and tries to reach each host that it names."""
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return TfConfig("")
    try:
        cluster = config.from_tf_config()
    except ValueError as error:
        return TfConfig(text, str(error))
    if cluster is None:
        return TfConfig(text)
    with futures.ThreadPoolExecutor(len(cluster.tasks)) as pool:
        hosts = pool.map(lambda index: _try(cluster, index), range(len(cluster.tasks)))
    return TfConfig(text, hosts=tuple(hosts))


def _try(cluster: config.Cluster, index: int) -> Host:
    address = cluster.tasks[index].address
    is_here = index == cluster.index
    try:
        if is_here:
            launch_cluster.check_port_is_free(address)
            reached, status = True, "this process's own; the port is free"
        else:
            socket.create_connection(config.split_address(address), timeout=_SECONDS).close()
            reached, status = True, "a worker listens there"
    except ConnectionRefusedError:
        reached, status = True, "the machine answers; no worker listens there yet"
    except OSError as error:
        # A name that nobody knows, no route, or silence, as behind a firewall.
        problem = "this process's own port cannot be used" if is_here else "not reached"
        reached, status = False, f"{problem}: {error.strerror or error}"
    return Host(cluster.name(index), is_here, reached, status)
