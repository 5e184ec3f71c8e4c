"""Where the workers of a job listen, and how TensorFlow is told: TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence


def tf_config(addresses: Sequence[str], index: int) -> str:
    """Returns the value of TF_CONFIG for one worker."""
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    )


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[str, ...]]:
    """Holds free ports of the loopback interface; yields addresses such as "127.0.0.1:40123"."""
    # Each port stays bound to a socket that does not listen. Linux then gives it to nobody who
    # asks for any port, but lets a server that names it (with SO_REUSEADDR, as TensorFlow's does)
    # listen there. So there is no moment at which another process could take it.
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(count):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
        yield tuple(addresses)
