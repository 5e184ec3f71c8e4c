"""Shared by the tools: tables of pages, progress, and calls in other processes."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tfcdo.bench import worker_pool

_Item = TypeVar("_Item")
ROOT = pathlib.Path(__file__).absolute().parents[1]
_MAX_MESSAGE = 140


def call_apart(
    module: str, calls: Iterable[Mapping[str, Any]], seconds: float, **variables: str
) -> Iterator[Any]:
    """Yields what a module's `run` returns in a process of its own; None if it ends or hangs."""
    command = [sys.executable, __file__, module]
    variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **variables}
    pool = None
    with contextlib.ExitStack() as process:
        for call in calls:
            pool = pool or process.enter_context(worker_pool.start_workers(command, [variables]))
            try:
                yield from pool.call("run", seconds, **call)
            except worker_pool.WorkerLostError:
                process.close()
                pool = None
                yield None


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


def replace(page: str | pathlib.Path, tool: str, lines: Iterable[str]) -> None:
    """Writes a page with other lines between the markers that name a tool, as the lines come."""
    begin, end = f"<!-- made by tools/{tool}: begin -->", "<!-- end -->"
    before, _, rest = (ROOT / page).read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no lines {begin!r} and {end!r}")
    made = [f"{before}{begin}"]
    for line in lines:
        made.append(line)
        (ROOT / page).write_text("\n".join([*made, f"{end}{after}"]), encoding="utf-8")


def table(heading: str, rows: Iterable[Iterable[object]], numbers: int = 0) -> Iterator[str]:
    """Yields the lines of a table, whose last columns may be numbers, as the rows come."""
    left = heading.count("|") + 1 - numbers
    yield f"| {heading} |"
    yield f"|{'---|' * left}{'---:|' * numbers}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


class Row(NamedTuple):
    """The outcome of a case: ✓ if the user got a correct result, or the clear error there is."""

    mark: str
    text: str

    @property
    def cell(self) -> str:
        """Returns the cell of a table of Markdown."""
        # Half a pair of backquotes would turn what follows into code.
        text = self.text.replace("`", "") if self.text.count("`") % 2 else self.text
        return f"{self.mark} {text}".replace("|", "\\|").replace("\n", " ")


def error_text(error: Exception) -> str:
    """Returns an error's class and first words, without what differs from run to run."""
    # The rest is the stack of the run, or attributes in any order; \033 to m is a color.
    message = re.sub("\033\\[[0-9;]*m", "", str(error))
    message = re.split(r"defined at \(most recent| with these attrs", message)[0]
    words = " ".join(message.replace("{{function_node ", "").split())
    for name in ("/job:localhost/replica:0/task:0/device:", "__wrapped__"):
        words = words.replace(name, "")
    words = words if len(words) <= _MAX_MESSAGE else f"{words[: _MAX_MESSAGE - 3]}..."
    return f"{type(error).__name__}: {words}"


def largest_difference(found: Iterable[Any], expected: Iterable[Any]) -> float:
    """Returns the largest absolute difference of two lists of arrays; nan if one has a nan."""
    pairs = zip(found, expected, strict=True)
    return float(np.max([np.abs(np.subtract(*pair)).max(initial=0.0) for pair in pairs]))


if __name__ == "__main__":
    worker_pool.serve(importlib.import_module)  # A process that a tool calls, with its module.
