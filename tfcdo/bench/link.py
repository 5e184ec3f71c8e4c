"""Opens the link between the workers of a measurement: a loopback interface of their own.

In a network namespace of its own, the interface carries only what the workers send, so that its
counter of bytes is exact, and its rate can be limited without touching the machine's network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

_LOOPBACK = "lo"
# Rates as tc writes them: bits per second in powers of 1000.
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(k|m|g)bit", re.ASCII | re.IGNORECASE)
_PREFIXES = {"k": 10**3, "m": 10**6, "g": 10**9}
# How long a packet may wait at the limit: long enough that TCP keeps the link full.
_QUEUE_SECONDS = 0.4
# The kernel lets packets of up to 64 KiB through a loopback interface, and gives them their turn
# in ticks of up to 4 ms: the bucket must hold more than a packet, and more than a tick's bytes.
_MIN_BURST = 256 * 1024
_TICK = 0.004
_SECONDS = 20.0


class LinkError(RuntimeError):
    """Says why a link cannot be had here, and what would help."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate of a link.

    Attributes:
      text: as the user wrote it, in tc's units, such as "1gbit".
      bytes_per_second: the same as a number.
    """

    text: str
    bytes_per_second: float


@dataclasses.dataclass(frozen=True)
class Link:
    """A loopback interface.

    Attributes:
      command: what starts a program on this link, to be put in front of the program's command.
      counters: the file that counts what has crossed it.
      is_own: whether nothing but the workers uses it.
      rate: its limit; None if it has none.
    """

    command: tuple[str, ...]
    counters: pathlib.Path
    is_own: bool
    rate: Rate | None

    def count_bytes(self) -> int:
        """Returns how many bytes have crossed the link, in both directions, with all headers."""
        for line in self.counters.read_text(encoding="ascii").splitlines():
            name, separator, numbers = line.partition(":")
            if separator and name.strip() == _LOOPBACK:
                # Of 16 columns, the ninth is what was sent; on a loopback all of it also arrives.
                return int(numbers.split()[8])
        raise LinkError(f"{self.counters} does not list the interface {_LOOPBACK}")


def parse_rate(text: str) -> Rate:
    """Reads a rate as tc writes it.

    Args:
      text: a number and kbit, mbit or gbit.

    Returns:
      The rate.

    Raises:
      ValueError: if it is not such a text, or the rate is 0.

    Example:
      >>> parse_rate("1gbit").bytes_per_second
      125000000.0
    """
    found = _RATE.fullmatch(text)
    bits = float(found[1]) * _PREFIXES[found[2].lower()] if found else 0.0
    if not bits:
        raise ValueError(
            f"rate must be a number of kbit, mbit or gbit, such as 1gbit; got {text!r}"
        )
    return Rate(text.lower(), bits / 8)


@contextlib.contextmanager
def open_link(rate: Rate | None) -> Iterator[Link]:
    """Opens a loopback interface in a network namespace of its own.

    Args:
      rate: its limit, for both directions together; None for none.

    Yields:
      The link, which ends with the block.

    Raises:
      LinkError: if this user may not have one; the message says what would help.
    """
    # A program that holds the namespace until its standard input is closed.
    script = f"ip link set {_LOOPBACK} up && {_shaping(rate)} && echo ready && exec cat"
    command = [*_namespace_command(), "sh", "-c", script]
    for program in ("unshare", "nsenter", "ip", *(["tc"] if rate else [])):
        if shutil.which(program) is None:
            raise LinkError(f"{program} is not installed: it comes with util-linux or iproute2")
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
            target = str(holder.pid)
            yield Link(
                ("nsenter", "--target", target, *_enter_options()),
                pathlib.Path("/proc", target, "net", "dev"),
                is_own=True,
                rate=rate,
            )
        finally:
            holder.stdin.close()
            try:
                holder.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                holder.kill()


def shared_link() -> Link:
    """Returns the machine's own loopback interface, which other programs use as well."""
    return Link((), pathlib.Path("/proc/net/dev"), is_own=False, rate=None)


def _namespace_command() -> Sequence[str]:
    return ("unshare", "--net") if _is_root() else ("unshare", "--map-root-user", "--net")


def _enter_options() -> Sequence[str]:
    return ("--net",) if _is_root() else ("--user", "--preserve-credentials", "--net")


def _is_root() -> bool:
    return os.geteuid() == 0


def _shaping(rate: Rate | None) -> str:
    if rate is None:
        return "true"
    burst = max(_MIN_BURST, round(rate.bytes_per_second * _TICK))
    return (
        f"tc qdisc add dev {_LOOPBACK} root tbf rate {rate.text} burst {burst} "
        f"latency {round(_QUEUE_SECONDS * 1000)}ms"
    )
