"""Messages between the launchers of several machines: lines of JSON, in both directions."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

# A machine that does not answer counts as gone after 2 + 3 * 2 s, before TensorFlow's 10 s: so the
# launcher knows which worker was lost before the others fail because of it.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
_MAX_LINE_BYTES = 1 << 20


class Connection:
    """One end of a connection between two launchers."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEPALIVE.items():
            peer.setsockopt(socket.IPPROTO_TCP, option, seconds)

    def send(self, **content: Any) -> None:
        """Sends a message; one to a launcher that is gone is dropped, as `messages` ends then."""
        with self._lock, contextlib.suppress(OSError):
            self._peer.sendall(json.dumps(content).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields messages until the other end is gone, or sends something else."""
        with contextlib.suppress(OSError, ValueError), self._peer.makefile("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                content = json.loads(line)
                if not isinstance(content, dict):
                    return
                yield content

    def close(self) -> None:
        """Ends the connection, and `messages` of both ends."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()
