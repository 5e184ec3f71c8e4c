"""Runs the same work through TensorFlow's classes and tfcdo's: `make compat` makes docs/compat.md.

The work is trainings (`compat_trainings`) and single calls (`compat_cases`). Each library has a
process of its own, and a new one follows a crash or a hang. Some of the trainings are README.md's
table.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import compat_cases
import compat_trainings
import keras
import pages
import tensorflow as tf
from compat_cases import CASES
from compat_trainings import TRAININGS
from pages import MAX_CELL, Row, escaped

import tfcdo
from tfcdo.bench import worker_pool

SECONDS = 600.0  # That a case may take.
LIBRARIES = ("TensorFlow", "tfcdo")
WORK = {**TRAININGS, **CASES}
# The trainings that a user meets first, with the names that some have in README.md's table.
FIRST = {
    "`global_clipnorm`": "`global_clipnorm`",
    "`gradient_accumulation_steps`": "`gradient_accumulation_steps`",
    "`Dropout`": "`Dropout`",
    "a last batch of 7 examples, a dense model": "a last batch that does not divide",
    "a first batch that does not divide": "",
    "sentences with a mask": "padded sentences with a mask",
    "an embedding of repeated words, `Adam`": "",
    "`mixed_float16`, with the `LossScaleOptimizer` that `compile` adds": "",
    "`jit_compile=True`": "",
    "`BatchNormalization()`": "",
}
# By the name of a case: TensorFlow's and tfcdo's.
Rows = Mapping[str, tuple[Row, ...]]


class Library:
    """One library, in a process of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, name: str) -> Row:
        case = WORK[name]
        module = compat_cases if isinstance(case, compat_cases.Case) else compat_trainings
        return module.row(case, self._name)


def parts(rows: Rows) -> dict[str, Iterable[str]]:
    """Makes the lines of each part of the page."""
    trained, called = (_good(rows, cases) for cases in (TRAININGS, CASES))
    texts = (row.text for pair in rows.values() for row in pair if len(row.text) > MAX_CELL)
    return {
        "counts": [
            f"tfcdo gives the results of one device in {trained[1]} of {len(TRAININGS)} trainings,",
            f"and TensorFlow's strategy in {trained[0]}. Of {len(CASES)} single calls,",
            f"tfcdo's classes pass {called[1]} and TensorFlow's {called[0]}.",
            "",
            f"Made by `make compat` on virtual CPU devices with TensorFlow {tf.__version__},",
            f"Keras {keras.__version__} and tfcdo {tfcdo.__version__}.",
        ],
        "first": _table(
            (name, *(f"{row.mark} {row.result}" for row in rows[name])) for name in FIRST
        ),
        "trainings": _folded(compat_trainings.SUBJECTS, rows),
        "calls": _folded(compat_cases.SUBJECTS, rows),
        "messages": (f"* {escaped(text)}" for text in dict.fromkeys(texts)),
    }


def _good(rows: Rows, names: Iterable[str]) -> list[int]:
    """Returns the number of TensorFlow's good rows, and of tfcdo's."""
    sides = zip(*(rows[name] for name in names), strict=True)
    return [sum(row.mark == "✓" for row in side) for side in sides]


def _folded(subjects: Mapping[str, Mapping[str, Any]], rows: Rows) -> Iterator[str]:
    """Yields a table for each subject, with the numbers of its good rows as the title."""
    for subject, names in subjects.items():
        theirs, ours = _good(rows, names)
        yield "<details>"
        yield (
            f"<summary>{subject}: TensorFlow {theirs} of {len(names)}, "
            f"tfcdo {ours} of {len(names)}</summary>\n"
        )
        yield from _table((name, *(row.cell for row in rows[name])) for name in names)
        yield "\n</details>\n"


_table = functools.partial(pages.table, "case | TensorFlow | tfcdo")


def readme_table(rows: Rows) -> Iterator[str]:
    """Makes the lines of README.md's table."""
    head = f"The program has | TensorFlow {tf.__version__}, Keras {keras.__version__} | tfcdo"
    named = ((label, *(row.result for row in rows[name])) for name, label in FIRST.items() if label)
    return pages.table(head, named)


def _measure(library: str) -> Iterator[Row]:
    names = pages.with_progress([*WORK], lambda name: f"{library}, {name}")
    calls = ({"name": name} for name in names)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    for row in pages.call_apart([__file__, library], calls, SECONDS, **quiet):
        yield row or Row("✗", f"crashes or hangs (over {SECONDS:g} s)")


def main() -> None:
    """Runs all cases and changes the pages."""
    rows = dict(zip(WORK, zip(*map(_measure, LIBRARIES)), strict=True))
    for name, lines in parts(rows).items():
        pages.replace("docs/compat.md", f"compat.py, {name}", lines)
    pages.replace("README.md", "compat.py", readme_table(rows))


if __name__ == "__main__":
    if sys.argv[-1] in LIBRARIES:
        worker_pool.serve(Library)
    else:
        main()
