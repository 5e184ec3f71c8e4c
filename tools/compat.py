"""Runs the same work through TensorFlow's classes and tfcdo's: `make compat` makes docs/compat.md.

The work is trainings (`compat_trainings`) and single calls (`compat_cases`). Each library has a
process of its own, and a new one follows a crash or a hang.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import compat_cases
import compat_trainings
import keras
import pages
import tensorflow as tf
from compat_cases import CASES, Case
from compat_trainings import TRAININGS, Training
from pages import Row

import tfcdo
from tfcdo.bench import worker_pool

SECONDS = 600.0  # That a case may take.
LIBRARIES = ("TensorFlow", "tfcdo")
WORK: dict[str, Case | Training] = {**TRAININGS, **CASES}
# The rows of README.md's table, by the training.
README = {
    "`global_clipnorm`": "`global_clipnorm`",
    "`gradient_accumulation_steps`": "`gradient_accumulation_steps`",
    "`Dropout`": "`Dropout`",
    "a last batch of 7 examples, a dense model": "a last batch that does not divide",
    "sentences with a mask": "padded sentences with a mask",
}
# By the name of a case: TensorFlow's and tfcdo's.
Rows = Mapping[str, tuple[Row, ...]]


class Library:
    """One library, in a process of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, name: str) -> Row:
        return WORK[name].row(self._name)


def parts(rows: Rows) -> dict[str, Iterable[str]]:
    """Makes the lines of each part of the page."""
    trained, called = (_good(rows, cases) for cases in (TRAININGS, CASES))
    return {
        "counts": [
            f"tfcdo gives the results of one device in {trained[1]} of {len(TRAININGS)} trainings,",
            f"and TensorFlow's strategy in {trained[0]}. Of {len(CASES)} single calls,",
            f"tfcdo's classes pass {called[1]} and TensorFlow's {called[0]}.",
            "",
            f"Made by `make compat` on virtual CPU devices with TensorFlow {tf.__version__},",
            f"Keras {keras.__version__} and tfcdo {tfcdo.__version__}.",
        ],
        "trainings": _tables(compat_trainings.SUBJECTS, rows),
        "calls": _tables(compat_cases.SUBJECTS, rows),
    }


def _good(rows: Rows, names: Iterable[str]) -> list[int]:
    """Returns the number of TensorFlow's good rows, and of tfcdo's."""
    sides = zip(*(rows[name] for name in names), strict=True)
    return [sum(row.mark == "✓" for row in side) for side in sides]


def _tables(subjects: Mapping[str, Mapping[str, Any]], rows: Rows) -> Iterator[str]:
    """Yields a table for each subject, with the numbers of its good rows in the heading."""
    for subject, names in subjects.items():
        theirs, ours = (f"{good} of {len(names)}" for good in _good(rows, names))
        cells = ((name, *(row.cell for row in rows[name])) for name in names)
        yield from pages.table(f"{subject} | TensorFlow: {theirs} | tfcdo: {ours}", cells)
        yield ""


def readme_rows(rows: Rows) -> Iterator[Sequence[str]]:
    """Yields the cells of README.md's rows."""
    for name, label in README.items():
        # The first number, or the kind of the error.
        yield label, *(re.split("[,:]", row.text)[0] for row in rows[name])


def _measure(library: str) -> Iterator[Row]:
    names = pages.with_progress([*WORK], lambda name: f"{library}, {name}")
    calls = ({"name": name} for name in names)
    for row in pages.call_apart([__file__, library], calls, SECONDS):
        yield row or Row("✗", f"crashes or hangs (over {SECONDS:g} s)")


def main() -> None:
    """Runs all cases and changes the pages."""
    rows = dict(zip(WORK, zip(*map(_measure, LIBRARIES)), strict=True))
    for name, lines in parts(rows).items():
        pages.replace("docs/compat.md", f"compat.py, {name}", lines)
    head = f"The program has | TensorFlow {tf.__version__}, Keras {keras.__version__} | tfcdo"
    pages.replace("README.md", "compat.py", pages.table(head, readme_rows(rows)))


if __name__ == "__main__":
    if sys.argv[-1] in LIBRARIES:
        worker_pool.serve(Library)
    else:
        main()
