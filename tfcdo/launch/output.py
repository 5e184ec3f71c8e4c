"""Prints the lines of several workers, each with its worker's name in front."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import BinaryIO

# A carriage return alone ends a line too: progress bars redraw theirs with it. One at the end of
# what has arrived may be half of "\r\n".
_LINE_END = re.compile(rb"\r?\n|\r(?!\n|\Z)")
# A line that is longer is printed in parts, so that memory is bounded.
MAX_LINE_BYTES = 65_536


class LineSplitter:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yields the lines that a chunk completes, without their ends."""
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        yield from lines
        if len(self._rest) > MAX_LINE_BYTES:
            yield from self.flush()

    def flush(self) -> Iterator[bytes]:
        """Yields the last line if nothing ended it."""
        if self._rest:
            yield self._rest.removesuffix(b"\r")
        self._rest = b""


class LinePrinter:
    """Writes whole lines to one stream, from several threads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def print(self, line: bytes) -> None:
        """Writes a line, and nothing else between its parts."""
        with self._lock:
            self._stream.write(line + b"\n")
            self._stream.flush()
