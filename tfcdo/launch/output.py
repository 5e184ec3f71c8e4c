"""The output of workers, in lines, and of their launcher."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

# A carriage return alone ends a line too: progress bars redraw theirs with it. One at the end of
# what has arrived may be half of "\r\n".
_LINE_END = re.compile(rb"\r?\n|\r(?!\n|\Z)")
# A line that is longer is printed in parts, so that memory is bounded.
MAX_LINE_BYTES = 65_536


def report(message: str) -> None:
    """Tells the user a sentence."""
    sys.stderr.write(f"tfcdo: {message}\n")
    sys.stderr.flush()


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a stream of bytes, without their ends."""
    rest = b""
    for chunk in chunks:
        *complete, rest = _LINE_END.split(rest + chunk)
        yield from complete
        if len(rest) > MAX_LINE_BYTES:
            yield rest.removesuffix(b"\r")
            rest = b""
    if rest:
        yield rest.removesuffix(b"\r")
