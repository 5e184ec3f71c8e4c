"""Opens a loopback interface that carries only the workers' data, to count and limit its bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

_LOOPBACK = "lo"
# How long a packet may wait at the limit: long enough that TCP keeps the link full.
_QUEUE_SECONDS = 0.4
# The kernel lets packets of up to 64 KiB through a loopback interface, and gives them their turn
# in ticks of up to 4 ms: the bucket must hold more than a packet, and more than a tick's bytes.
_MIN_BURST = 256 * 1024
_TICK = 0.004
_SECONDS = 20.0


class LinkError(RuntimeError):
    """Says why a link cannot be had here, with the remedy."""


@dataclasses.dataclass(frozen=True)
class Loopback:
    """A loopback interface."""

    command: tuple[str, ...]  # The words before a program's command that start it on this link.
    counters: pathlib.Path  # The file that counts the bytes that have crossed it.
    is_own: bool  # Whether nothing but the workers uses it.

    def count_bytes(self) -> int:
        """Returns how many bytes have crossed the link, in both directions, with all headers."""
        for line in self.counters.read_text(encoding="ascii").splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == _LOOPBACK:
                # The ninth of 16 columns counts the bytes sent; a loopback receives all of them.
                return int(numbers.split()[8])
        raise LinkError(f"{self.counters} does not list the interface {_LOOPBACK}")


@contextlib.contextmanager
def open_link(rate: float | None) -> Iterator[Loopback]:
    """Opens a loopback interface of its own, with at most `rate` bytes per second."""
    for program in ("unshare", "nsenter", "ip", *(["tc"] if rate else [])):
        if shutil.which(program) is None:
            raise LinkError(f"{program} is not installed: it comes with util-linux or iproute2")
    make, enter = ["unshare", "--net"], ["nsenter", "--net"]
    if os.geteuid():
        make, enter = [*make, "--map-root-user"], [*enter, "--user", "--preserve-credentials"]
    # A program that holds the namespace until its standard input is closed.
    script = f"ip link set {_LOOPBACK} up && {_shaping(rate)} && echo ready && exec cat"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*make, "sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stderr
        try:
            if holder.stdout.readline() != "ready\n":
                reason = holder.stderr.read().strip() or "it ended"
                raise LinkError(
                    f"a network namespace of its own is refused ({reason}): run it as root, or "
                    "where users may make namespaces and shape their interfaces"
                )
            counters = pathlib.Path(f"/proc/{holder.pid}/net/dev")
            yield Loopback((*enter, "--target", str(holder.pid)), counters, is_own=True)
        finally:
            holder.stdin.close()
            try:
                holder.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                holder.kill()


def shared_link() -> Loopback:
    """Returns the machine's own loopback interface, which other programs use as well."""
    return Loopback((), pathlib.Path("/proc/net/dev"), is_own=False)


def _shaping(rate: float | None) -> str:
    if rate is None:
        return "true"
    # To tc, bps are bytes per second.
    return (
        f"tc qdisc add dev {_LOOPBACK} root tbf rate {round(rate)}bps "
        f"burst {max(_MIN_BURST, round(rate * _TICK))} latency {round(_QUEUE_SECONDS * 1000)}ms"
    )
