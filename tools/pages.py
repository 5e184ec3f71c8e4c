"""Writes the tables of pages that tools have measured, and shows the tools' progress."""

from __future__ import annotations

import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

_Item = TypeVar("_Item")
ROOT = pathlib.Path(__file__).absolute().parents[1]
# A table of three such columns fits a screen.
MAX_CELL = 56
_MAX_MESSAGE = 140


def with_progress(
    items: Sequence[_Item], describe: Callable[[_Item], str] = str
) -> Iterator[_Item]:
    """Yields items; says on standard error which one begins, of how many, and the time so far."""
    begin = time.monotonic()
    for number, item in enumerate(items, 1):
        minutes, seconds = divmod(int(time.monotonic() - begin), 60)
        line = f"{number} of {len(items)}, after {minutes}:{seconds:02} minutes: {describe(item)}"
        print(line, file=sys.stderr, flush=True)
        yield item


def replace_table(path: pathlib.Path, tool: str, lines: Sequence[str]) -> None:
    """Writes a page with other lines between the markers that name a tool."""
    begin, end = f"<!-- made by tools/{tool}: begin -->", "<!-- end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has no lines {begin!r} and {end!r}")
    path.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]), encoding="utf-8")


def table(heading: str, rows: Iterable[Iterable[object]], numbers: int = 0) -> Iterator[str]:
    """Yields the lines of a table, whose last columns may be numbers, as the rows come."""
    left = heading.count("|") + 1 - numbers
    yield f"| {heading} |"
    yield f"|{'---|' * left}{'---:|' * numbers}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


class Row(NamedTuple):
    """The outcome of a case: ✓ if the user got a correct result, or the clear error there is."""

    name: str
    mark: str
    text: str

    @property
    def cell(self) -> str:
        """Returns the cell of a table."""
        return escaped(f"{self.mark} {_shortened(self.text, MAX_CELL)}")

    @property
    def result(self) -> str:
        """Returns the first number, or the kind of the error."""
        return escaped(re.split("[,:]", self.text)[0])


def escaped(text: str) -> str:
    """Returns text for a cell or a line of Markdown."""
    # Half a pair of backquotes would turn what follows into code.
    text = text.replace("`", "") if text.count("`") % 2 else text
    return text.replace("|", "\\|").replace("\n", " ")


def error_text(error: Exception) -> str:
    """Returns an error's class and first words, without what differs from run to run."""
    # The rest is the stack of the run; text between \033 and m is a color.
    message = re.sub("\033\\[[0-9;]*m", "", str(error)).partition("defined at (most recent")[0]
    words = " ".join(message.replace("{{function_node ", "").split())
    for name in ("/job:localhost/replica:0/task:0/device:", "__wrapped__"):
        words = words.replace(name, "")
    return f"{type(error).__name__}: {_shortened(words, _MAX_MESSAGE)}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
