"""Meeting all hosts before TensorFlow starts its servers.

TensorFlow's start waits inside C++ with Python's lock held: nothing can be logged meanwhile, it
cannot be interrupted, and a host that never comes is waited for without end. So the hosts first
meet here, at the chief's address: each says who it is and how it is set up, and all continue
together, or all learn why not.

Both sides first prove with an HMAC over the other's nonce that they know the job's token. So no
stranger is heard, and a process of another job that comes to the same port is not taken for one
of this job.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError, connection
from multiprocessing.connection import Connection

import msgspec
from absl import logging

from tfcdo.cluster import config, protocol, worker
from tfcdo.cluster.protocol import RendezvousError

Setting = str | int | float | bool | None | list[str]
Settings = Mapping[str, Setting]  # By name; the same on all hosts.

_FIRST_LINE = 10.0  # Seconds until the log says who is waited for; then each minute.
_RETRY = 0.2
_POLL = 0.1
# How long each part of a message may take, and how large one may be: strangers can send messages.
_MESSAGE_SECONDS = 5
_MAX_BYTES = 1 << 20

# Messages: a host's number and settings; why hosts cannot continue, and their membership's name.
_Greeting = tuple[int, dict[str, Setting]]
_Answer = tuple[str, str]


def meet(cluster: config.Cluster, settings: Settings, timeout: float, token: str) -> str:
    """Waits until all hosts have come, know the token, have equal settings, and can be reached.

    Returns the name of this membership, which no other start of the hosts has.
    """
    deadline = time.monotonic() + timeout
    with listen(cluster) as listener:
        if not cluster.is_chief:
            return _follow(cluster, settings, token, deadline)
        names = [cluster.name(host) for host in range(len(cluster.tasks))]
        meeting = protocol.Meeting(names, settings, deadline)
        problem = _await_all(meeting, listener, token)
        for host in cluster.others:
            problem = problem or _unreachable(cluster, host)
        membership = secrets.token_hex(8)
        for peer in meeting.arrived.values():
            _send(peer, (problem, membership))
        if problem:
            raise RendezvousError(problem)
        return membership


def listen(cluster: config.Cluster) -> socket.socket:
    """Holds this host's port, as TensorFlow's server will: on all of the machine's addresses."""
    _, port = config.split_address(cluster.tasks[cluster.index].address)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
        )
    except OSError as error:
        raise RendezvousError(
            f"port {port} of {cluster.name(cluster.index)} cannot be used on this machine: "
            f"{error.strerror or error}; end the process that uses it, or give the task another "
            "port in the cluster's description on all hosts"
        ) from error


def _await_all(meeting: protocol.Meeting, listener: socket.socket, token: str) -> str:
    """Brings connections to the meeting until it decides; returns why not to continue, or ""."""
    lines = _Lines()
    hint = ""
    new: queue.SimpleQueue[tuple[Connection, _Greeting] | None] = queue.SimpleQueue()
    while (problem := meeting.decide(time.monotonic())) is None:
        lines.log(meeting.waiting_for() + hint)
        arrived = meeting.arrived.values()
        ready = connection.wait([listener, *arrived], _POLL)
        if listener in ready:
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                threading.Thread(target=_hear, args=(peer, token, new), daemon=True).start()
        for lost in [peer for peer in arrived if peer in ready]:
            meeting.lose(lost)  # It has no more to say, so it has ended.
            lost.close()
        while not new.empty():
            arrival = new.get()
            if arrival is None:
                hint = f" (a host came that does not know this job's {worker.CLUSTER_TOKEN})"
                continue
            channel, (host, settings) = arrival
            before = meeting.arrive(host, settings, channel, time.monotonic())
            if before is channel:
                _send(channel, (f"the cluster has no other host {host}", ""))
            elif before is not None:  # It has been started again.
                before.close()
    return problem + (hint if protocol.LATE in problem else "")


def _hear(
    peer: socket.socket,
    token: str,
    arrivals: queue.SimpleQueue[tuple[Connection, _Greeting] | None],
) -> None:
    """Reads a greeting, in a thread, so that a slow stranger delays no host."""
    channel = _channel(peer)
    try:
        _prove(channel, token, "chief", "host")
        greeting = msgspec.json.decode(channel.recv_bytes(_MAX_BYTES), type=_Greeting)
    except AuthenticationError:
        arrivals.put(None)
        channel.close()
    except (OSError, EOFError, ValueError, RecursionError):
        channel.close()  # A port scan, or a probe of another host.
    else:
        arrivals.put((channel, greeting))


def _channel(peer: socket.socket) -> Connection:
    """Returns a connection for messages, which takes a socket over and waits for a few seconds."""
    seconds = struct.pack("ll", _MESSAGE_SECONDS, 0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
    # A machine that is gone says nothing, and another one may have its address by now: 30 s.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 5}
    for option, value in options.items():
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    peer.setblocking(True)  # Python's own time-outs are of no use to others.
    return Connection(peer.detach())


def _prove(channel: Connection, token: str, own: str, other: str) -> None:
    """Proves that this side knows the token; raises an `AuthenticationError` if the other does not.

    Not by the challenges of `multiprocessing`, which are of MD5 before Python 3.12.
    """
    nonce = secrets.token_bytes(32)
    channel.send_bytes(nonce)
    for_other = f"tfcdo {own} ".encode() + _receive(channel)
    channel.send_bytes(hmac.digest(os.fsencode(token), for_other, "sha256"))
    expected = hmac.digest(os.fsencode(token), f"tfcdo {other} ".encode() + nonce, "sha256")
    if not hmac.compare_digest(expected, _receive(channel)):
        raise AuthenticationError


def _receive(channel: Connection) -> bytes:
    """Returns the 32 bytes that a host sends here; raises a `ValueError` for a stranger's."""
    try:
        return channel.recv_bytes(32)
    except OSError as error:
        if error.errno is not None:
            raise
        # The first bytes of another protocol, such as TensorFlow's, are no length.
        raise ValueError(
            "something other than a host that starts is listening there, perhaps an earlier run; "
            "end it, or give the task another port in the cluster's description on all hosts"
        ) from error


def _send(channel: Connection, answer: _Answer) -> None:
    with contextlib.suppress(OSError), channel:
        channel.send_bytes(msgspec.json.encode(answer))


def _unreachable(cluster: config.Cluster, host: int) -> str:
    """Returns why a host that has come cannot be reached at its address, or ""."""
    address = config.split_address(cluster.tasks[host].address)
    try:
        socket.create_connection(address, timeout=_MESSAGE_SECONDS).close()
    except OSError as error:
        return f"{cluster.name(host)} has started, but does not answer at that address: {error}"
    return ""


def _follow(cluster: config.Cluster, settings: Settings, token: str, deadline: float) -> str:
    """Goes to the chief and waits for its answer: the part of all other hosts."""
    chief = cluster.name(0)
    lines = _Lines()
    problem = "no attempt yet"
    while protocol.may_keep_asking(time.monotonic(), deadline, False):
        try:
            error, membership = _ask_chief(cluster, settings, token, deadline, lines)
        except AuthenticationError:
            problem = (
                f"it does not know this job's {worker.CLUSTER_TOKEN}, which all hosts must have"
            )
        except (EOFError, BlockingIOError):
            problem = "it does not answer, or closes the connection"
        except (OSError, ValueError) as failure:
            problem = str(failure)
        else:
            if error:
                raise RendezvousError(error)
            return membership
        lines.log(f"waiting for {chief} to start: {problem}")
        time.sleep(_RETRY)
    raise RendezvousError(f"timed out waiting for {chief} to start: {problem}")


def _ask_chief(
    cluster: config.Cluster, settings: Settings, token: str, deadline: float, lines: _Lines
) -> _Answer:
    """Greets the chief and returns its answer."""
    chief = cluster.name(0)
    address = config.split_address(cluster.tasks[0].address)
    with _channel(socket.create_connection(address, timeout=_MESSAGE_SECONDS)) as channel:
        _prove(channel, token, "host", "chief")
        channel.send_bytes(msgspec.json.encode((cluster.index, settings)))
        while not channel.poll(1.0):
            lines.log(f"{chief} is there and waits for other hosts")
            if not protocol.may_keep_asking(time.monotonic(), deadline, True):
                return f"{protocol.LATE}: {chief} waits for another host, or is stopped", ""
        answer: _Answer = msgspec.json.decode(channel.recv_bytes(_MAX_BYTES), type=_Answer)
        return answer


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
            self._next = now + protocol.LOG_AFTER
