"""Progress bars of commands that take a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich import progress as rich_progress
from rich.console import Console

if TYPE_CHECKING:
    from tfcdo.bench import tracking

_Item = TypeVar("_Item")


@contextlib.contextmanager
def progress(console: Console) -> Iterator[tracking.Track]:
    """Shows progress bars on a terminal, one for each sequence that is being gone through."""
    columns = (
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
    )
    # Without refreshes by a thread, which would run in the middle of what is being timed.
    with rich_progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,
    ) as bars:

        def track(sequence: Sequence[_Item], *, description: str) -> Iterable[_Item]:
            task = bars.add_task(description, total=len(sequence))
            bars.refresh()
            yield from bars.track(sequence, task_id=task)
            bars.remove_task(task)

        yield track
