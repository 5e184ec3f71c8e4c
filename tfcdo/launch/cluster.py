"""Where the workers of a job listen, and how TensorFlow is told: TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator, Sequence

# A name or an IPv4 address, or an IPv6 address in brackets; then a port.
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,/\[\]]+):(\d{1,5})", re.ASCII)


def parse_hosts(text: str) -> tuple[str, ...]:
    """Returns the addresses of the workers, in the order of their indices.

    Args:
      text: Addresses such as "a:2222,b:2222", separated by commas. An IPv6 address stands in
        brackets.

    Raises:
      ValueError: If an address is malformed or stands there twice.

    Example:
      >>> parse_hosts("a:2222, [::1]:2222")
      ('a:2222', '[::1]:2222')
    """
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        found = _ADDRESS.fullmatch(address)
        if not found or not 0 < int(found[2]) < 2**16:
            raise ValueError(
                f"each host must be NAME:PORT, with a port from 1 to 65535; got {address!r}"
            )
        if addresses.count(address) > 1:
            raise ValueError(f"each host must be named once; got {address!r} twice")
    return addresses


def tf_config(addresses: Sequence[str], index: int) -> str:
    """Returns the value of TF_CONFIG for one worker.

    Args:
      addresses: Where each worker listens.
      index: Which of them this worker is.

    Example:
      >>> tf_config(["a:2222", "b:2222"], 1)
      '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
    """
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    )


def check_port_is_free(address: str) -> None:
    """Raises an error if a worker on this host could not listen at an address.

    Args:
      address: "NAME:PORT", as in `parse_hosts`. Only the port matters, because TensorFlow's server
        listens on all interfaces of its host.

    Raises:
      OSError: If the port is in use or reserved.
    """
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        # As TensorFlow does: a port whose last connections are just being closed is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        # Two sockets may be bound to one port so; that one already listens shows here only.
        probe.listen()


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[tuple[str, ...]]:
    """Holds free ports of this host on the loopback interface.

    Each port stays bound to a socket that does not listen until the block ends. Linux then gives
    it to nobody who asks for any port, but lets a server that names it (with SO_REUSEADDR, as
    TensorFlow's does) listen there. So there is no moment at which another process could take it.

    Args:
      count: How many.

    Yields:
      The addresses, such as "127.0.0.1:40123".
    """
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(count):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
        yield tuple(addresses)
