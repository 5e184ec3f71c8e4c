"""Meeting all hosts before TensorFlow starts its servers.

TensorFlow's start waits inside C++ with Python's lock held: nothing can be logged meanwhile, it
cannot be interrupted, and a host that never comes is waited for without end. So the hosts first
meet here, at the chief's address: each says who it is and how it is set up, and all go on together,
or all learn why not.

The chief first sends a nonce. The other host's greeting begins with an HMAC over that nonce, and
the answer with one over the host's own nonce; the key is the job's token. So nobody else is heard,
and a process of another job that comes to the same port is not taken for one of this job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

import msgspec
from absl import logging

from tfcdo import environment
from tfcdo.cluster import config, protocol
from tfcdo.cluster.protocol import RendezvousError

Setting = str | int | float | bool | None | list[str]
Settings = Mapping[str, Setting]  # By name; the same on all hosts.

_FIRST_LINE = 10.0  # Seconds until the log says who is waited for; then each minute.
_NEXT_LINES = 60.0
_RETRY = 0.2
_POLL = 0.1
# How long one message may take, and how large it may be: strangers can send as well.
_MESSAGE_SECONDS = 5.0
_MAX_BYTES = 1 << 20
_TOKEN = environment.CLUSTER_TOKEN
_HELLO = re.compile(rb"tfcdo ([0-9a-f]{32})\n")


class _Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says who a host is, how it is set up, and the nonce that the answer must prove."""

    host: int
    settings: dict[str, Setting]
    nonce: str


@dataclasses.dataclass(frozen=True)
class _Arrival:
    """A host that has come to the chief."""

    peer: socket.socket
    greeting: _Greeting


@dataclasses.dataclass(frozen=True)
class _Job:
    """The hosts that meet, as this one sees them, and until when it waits for them."""

    cluster: config.Cluster
    settings: Settings
    token: str
    deadline: float


class _ProofError(ValueError):
    """The sender of a message does not know the job's token."""


def meet(cluster: config.Cluster, settings: Settings, timeout: float, token: str) -> str:
    """Waits until all hosts are there, know the token, have equal settings, and can be reached.

    Returns the name of this membership, which no other start of the hosts has.
    """
    job = _Job(cluster, settings, token, time.monotonic() + timeout)
    with _listen(cluster) as listener:
        if cluster.is_chief:
            return _lead(job, listener)
        return _follow(job)


def _listen(cluster: config.Cluster) -> socket.socket:
    """Holds this host's port, as TensorFlow's server will: on all of the machine's addresses."""
    task = cluster.tasks[cluster.index]
    _, port = config.split_address(task.address)
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


def _lead(job: _Job, listener: socket.socket) -> str:
    """Waits for all others, and tells them why not to go on, or "": the chief's part."""
    membership = secrets.token_hex(8)
    names = [job.cluster.name(host) for host in range(len(job.cluster.tasks))]
    meeting = protocol.Meeting(names, job.settings, membership, job.deadline)
    arrivals: dict[socket.socket, _Arrival] = {}
    problem = _await_all(meeting, listener, arrivals, job.token)
    try:
        if not problem:
            for host in job.cluster.others:
                _check_reachable(job.cluster, host)
    except RendezvousError as error:
        problem = str(error)
    for arrival in arrivals.values():
        _answer(arrival, problem, membership, job.token)
    if problem:
        raise RendezvousError(problem)
    return membership


def _await_all(
    meeting: protocol.Meeting,
    listener: socket.socket,
    arrivals: dict[socket.socket, _Arrival],
    token: str,
) -> str:
    """Brings connections to the meeting until it decides."""
    lines = _Lines()
    hint = ""
    new: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
    while (problem := meeting.decide(time.monotonic())) is None:
        lines.log(meeting.waiting_for() + hint)
        ready = connection.wait([listener, *arrivals], _POLL)
        if listener in ready:
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                threading.Thread(target=_hear, args=(peer, token, new), daemon=True).start()
        for peer in [peer for peer in arrivals if peer in ready]:
            meeting.lose(peer)  # It has no more to say, so it has ended.
            arrivals.pop(peer).peer.close()
        while not new.empty():
            arrival = new.get()
            if arrival is None:
                hint = f" (a host came that does not know this job's {_TOKEN})"
                continue
            host, settings = arrival.greeting.host, arrival.greeting.settings
            arrivals[arrival.peer] = arrival
            before = meeting.arrive(host, settings, arrival.peer, time.monotonic())
            if before is arrival.peer:
                _answer(arrivals.pop(before), f"the cluster has no other host {host}", "", token)
            elif before is not None:  # It has been started again.
                arrivals.pop(before).peer.close()
    return problem + (hint if problem.startswith(protocol.LATE) else "")


def _hear(peer: socket.socket, token: str, arrivals: queue.SimpleQueue[_Arrival | None]) -> None:
    """Hears who has come, in a thread, so that a slow stranger holds up nobody."""
    nonce = secrets.token_hex(16)
    try:
        peer.settimeout(_MESSAGE_SECONDS)
        peer.sendall(f"tfcdo {nonce}\n".encode())
        arrivals.put(_Arrival(peer, _open(_receive_line(peer), nonce, token, _Greeting)))
    except _ProofError:
        arrivals.put(None)
        with contextlib.suppress(OSError), peer:
            # Sealed with this host's token, so that the other one sees that its own is another.
            peer.sendall(_seal({"error": ""}, "", token))
    except (OSError, ValueError, RecursionError):
        peer.close()  # A port scan, or a probe of another host.


def _answer(arrival: _Arrival, error: str, membership: str, token: str) -> None:
    content = {"error": error, "membership": membership}
    with contextlib.suppress(OSError), arrival.peer:
        arrival.peer.sendall(_seal(content, arrival.greeting.nonce, token))


def _check_reachable(cluster: config.Cluster, host: int) -> None:
    """Raises unless a host that has come answers at its own address, as collectives need it."""
    address = config.split_address(cluster.tasks[host].address)
    try:
        socket.create_connection(address, timeout=_MESSAGE_SECONDS).close()
    except OSError as error:
        raise RendezvousError(
            f"{cluster.name(host)} has started, but does not answer at that address: {error}"
        ) from error


def _follow(job: _Job) -> str:
    """Goes to the chief and waits for its answer: the part of all other hosts."""
    chief = job.cluster.name(0)
    lines = _Lines()
    problem = "no attempt yet"
    while protocol.may_keep_asking(time.monotonic(), job.deadline, False):
        try:
            answer = _ask_chief(job, lines)
        except (OSError, ValueError) as failure:
            problem = str(failure)
        else:
            if answer["error"]:
                raise RendezvousError(answer["error"])
            return answer["membership"]
        lines.log(f"waiting for {chief} to start: {problem}")
        time.sleep(_RETRY)
    raise RendezvousError(f"timed out waiting for {chief} to start: {problem}")


def _ask_chief(job: _Job, lines: _Lines) -> dict[str, str]:
    """Greets the chief and returns its answer: the membership, or why the hosts cannot go on."""
    chief = job.cluster.name(0)
    address = config.split_address(job.cluster.tasks[0].address)
    with socket.create_connection(address, timeout=_MESSAGE_SECONDS) as peer:
        hello = _HELLO.fullmatch(_receive_line(peer))
        if hello is None:
            raise ValueError("something else than tfcdo answers there")
        nonce = secrets.token_hex(16)
        greeting = _Greeting(job.cluster.index, dict(job.settings), nonce)
        peer.sendall(_seal(greeting, hello[1].decode(), job.token))
        while not connection.wait([peer], timeout=1.0):
            lines.log(f"{chief} is there and waits for other hosts")
            if not protocol.may_keep_asking(time.monotonic(), job.deadline, True):
                return {"error": f"timed out: {chief} is there, but not all other hosts are"}
        answer: dict[str, str] = _open(_receive_line(peer), nonce, job.token, dict[str, str])
        return answer


def _seal(message: _Greeting | dict[str, str], nonce: str, token: str) -> bytes:
    """Returns a line with a message and the proof that its sender knows the token."""
    content = msgspec.json.encode(message)
    return b"%s %s\n" % (_prove(content, nonce, token), content)


def _open(line: bytes, nonce: str, token: str, kind: type[Any]) -> Any:
    """Returns the message in a line; nothing is read from it before the proof is verified."""
    proof, _, content = line.rstrip(b"\n").partition(b" ")
    if len(proof) != 64:
        raise ValueError("something else than tfcdo answers there")
    if not hmac.compare_digest(proof, _prove(content, nonce, token)):
        raise _ProofError(f"it does not know this job's {_TOKEN}, which all hosts must have")
    return msgspec.json.decode(content, type=kind)


def _prove(content: bytes, nonce: str, token: str) -> bytes:
    return hmac.new(os.fsencode(token), nonce.encode() + content, "sha256").hexdigest().encode()


def _receive_line(sender: socket.socket) -> bytes:
    deadline = time.monotonic() + _MESSAGE_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        sender.settimeout(max(0.001, deadline - time.monotonic()))
        part = sender.recv(65536)
        if not part:
            raise ConnectionResetError("it closed the connection")
        line += part
        if len(line) > _MAX_BYTES:
            raise ValueError("it sent too much")
    return line


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
