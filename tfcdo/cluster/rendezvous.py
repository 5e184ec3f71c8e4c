"""Meeting all hosts before TensorFlow starts its servers.

TensorFlow's start waits inside C++ with Python's lock held: nothing can be logged meanwhile, it
cannot be interrupted, and a host that never comes is waited for without end. So the hosts first
meet here, at the chief's address: each says who it is and how it is set up, and all go on together,
or all learn why not.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from tfcdo.cluster import config
from tfcdo.cluster import difference

Settings = Mapping[str, Any]

_FIRST_LINE = 10.0  # Seconds until the log says who is waited for; then each minute.
_NEXT_LINES = 60.0
_RETRY = 0.2
# By how much the others are more patient than the chief, which knows who is missing.
_PATIENCE = 5.0
_MOST_BYTES = 1 << 20


class RendezvousError(RuntimeError):
    """The hosts of a cluster did not all come, or are not set up alike; the message says which."""


def meet(cluster: config.Cluster, settings: Settings, timeout: float) -> None:
    """Waits until all hosts of a cluster are there, set up alike, and can reach each other.

    Args:
      cluster: the hosts.
      settings: what must be the same on all hosts; values that JSON can hold.
      timeout: how many seconds to wait.

    Raises:
      RendezvousError: if a host does not come in time, cannot be reached at its address or is set up
        differently, or if this host's port is in use.
    """
    deadline = time.monotonic() + timeout
    with _listening(cluster) as listener:
        if cluster.is_chief:
            _lead(cluster, settings, listener, deadline)
        else:
            _follow(cluster, settings, deadline)


@contextlib.contextmanager
def _listening(cluster: config.Cluster) -> Iterator[socket.socket]:
    """Holds this host's port, as TensorFlow's server will: on all of the machine's addresses."""
    task = cluster.tasks[cluster.index]
    _, port = config.split_address(task.address)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
        )
    except OSError as error:
        raise RendezvousError(
            f"port {port} of {cluster.name(cluster.index)} cannot be used on this machine: "
            f"{error.strerror or error}; end the process that uses it, or give the task another "
            "port in the cluster's description on all hosts"
        ) from error
    with listener:
        yield listener


def _lead(
    cluster: config.Cluster, settings: Settings, listener: socket.socket, deadline: float
) -> None:
    """The chief's part: waits for all others, compares, and tells them to go on or why not."""
    here: dict[int, socket.socket] = {}
    try:
        _accept_all(cluster, settings, listener, deadline, here)
        for host in cluster.others:
            _check_reachable(cluster, host)
    except RendezvousError as error:
        _tell(here, {"error": str(error)})
        raise
    _tell(here, {"go": True})


def _accept_all(
    cluster: config.Cluster,
    settings: Settings,
    listener: socket.socket,
    deadline: float,
    here: dict[int, socket.socket],
) -> None:
    lines = _Lines()
    problem = None
    while len(here) < len(cluster.others):
        missing = ", ".join(cluster.name(host) for host in cluster.others if host not in here)
        lines.log(f"waiting for {missing} to start")
        if time.monotonic() > deadline:
            raise RendezvousError(problem or f"timed out waiting for {missing} to start")
        listener.settimeout(1.0)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(5.0)
        try:
            greeting = _receive(connection)
            host, theirs = greeting["host"], greeting["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()  # Not one of ours: a port scan, or a probe of another host.
            continue
        if host not in cluster.others:
            _tell({0: connection}, {"error": f"the cluster has no host {host}"})
            continue
        if host in here:
            here[host].close()  # It has been started again.
        here[host] = connection
        if problem is None and dict(theirs) != dict(settings):
            names = cluster.name(0), cluster.name(host)
            details = difference.between(settings, names[0], theirs, names[1])
            problem = f"the hosts are not set up alike: {details}"
            # All are to learn of it, also those that are still on their way.
            deadline = min(deadline, time.monotonic() + _FIRST_LINE)
    if problem is not None:
        raise RendezvousError(problem)


def _check_reachable(cluster: config.Cluster, host: int) -> None:
    """Raises unless a host that has come answers at its own address, as collectives need it."""
    address = config.split_address(cluster.tasks[host].address)
    try:
        socket.create_connection(address, timeout=5.0).close()
    except OSError as error:
        raise RendezvousError(
            f"{cluster.name(host)} has started, but does not answer at that address: {error}"
        ) from error


def _follow(cluster: config.Cluster, settings: Settings, deadline: float) -> None:
    """The other hosts' part: goes to the chief and waits for its word."""
    lines = _Lines()
    address = config.split_address(cluster.tasks[0].address)
    greeting = {"host": cluster.index, "settings": dict(settings)}
    problem = "no attempt yet"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=5.0) as connection:
                connection.settimeout(5.0)
                _send(connection, greeting)
                problem = "it waits for other hosts"
                answer = _wait_for_answer(cluster, connection, deadline, lines)
        except (OSError, ValueError) as error:
            problem = str(error)
        else:
            if "error" in answer:
                raise RendezvousError(str(answer["error"]))
            return
        lines.log(f"waiting for {cluster.name(0)} to start: {problem}")
        time.sleep(_RETRY)
    raise RendezvousError(f"timed out waiting for {cluster.name(0)} to start: {problem}")


def _wait_for_answer(
    cluster: config.Cluster, connection: socket.socket, deadline: float, lines: _Lines
) -> dict[str, Any]:
    while not select.select([connection], [], [], 1.0)[0]:
        lines.log(f"{cluster.name(0)} is there and waits for other hosts")
        if time.monotonic() > deadline + _PATIENCE:
            raise RendezvousError(
                f"timed out: {cluster.name(0)} is there, but not all other hosts are"
            )
    return _receive(connection)


def _tell(connections: Mapping[int, socket.socket], message: Mapping[str, Any]) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError), connection:
            _send(connection, message)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Reads one line of JSON."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise ConnectionResetError("it closed the connection")
        line += part
        if len(line) > _MOST_BYTES:
            raise ValueError("it sent too much")
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ValueError("something else than tfcdo answers there")
    return message


class _Lines:
    """Logs a line after ten seconds of waiting and then once a minute."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + _FIRST_LINE

    def log(self, message: str) -> None:
        """Logs the message if it is time to."""
        now = time.monotonic()
        if now >= self._next:
            logging.warning("tfcdo: %s (%.0f s so far)", message, now - self._start)
            self._next = now + _NEXT_LINES
