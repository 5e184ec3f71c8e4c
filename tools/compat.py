"""Runs the same work through TensorFlow's classes and tfcdo's, and writes tables of the outcomes.

    python tools/compat.py docs/compat.md

The work is single calls (`compat_cases`) and trainings (`compat_trainings`). Each library runs each
kind in a process of its own, and a new one follows a crash or a hang. Some of the trainings are
README.md's table.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import compat_cases
import compat_trainings
import keras
import pages
import tensorflow as tf
from compat_cases import CASES, Case, Refused
from compat_trainings import TRAININGS
from pages import MAX_CELL, Row, error_text, escaped

# The base class of two of the public classes is not public itself.
from tensorflow.python.distribute import cross_device_ops

import tfcdo

SECONDS = 600.0  # That a case may take.
LIBRARIES = {"TensorFlow": cross_device_ops, "tfcdo": tfcdo}
WORK: dict[str, Sequence[Any]] = {"calls": CASES, "trainings": TRAININGS}
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
Rows = Mapping[str, tuple[Row, Row]]


def run(function: Callable[[Any], Any], arguments: Sequence[Any], seconds: float) -> list[Any]:
    """Calls a function in another process; None stands for a call that crashes or hangs."""
    results: list[Any] = []
    while len(results) < len(arguments):
        with multiprocessing.get_context("spawn").Pool(1, initializer=logging.disable) as pool:
            pool.apply(int)  # The imports do not count.
            try:
                for argument in arguments[len(results) :]:
                    results.append(pool.apply_async(function, [argument]).get(seconds))
            except multiprocessing.TimeoutError:
                results.append(None)
    return results


def outcome(kind: str, library: str, index: int) -> Row:
    """Runs a case in this process."""
    if kind == "calls":
        return judge(CASES[index], LIBRARIES[library])
    return compat_trainings.row(TRAININGS[index], library)


def judge(case: Case, library: Any) -> Row:
    """Runs a case in this process, with the classes in a namespace."""
    refused = isinstance(case.expected, Refused)
    try:
        result = case.call(case, case.make(library))
    except Exception as error:
        text = error_text(error)
        clear = isinstance(error, (ValueError, TypeError))
        good = refused and clear and case.expected.argument in str(error)
    else:
        good = not refused and result == case.expected
        text = f"{result}" if good else f"{result} instead of {case.expected}"
        text = f"accepts it and gives {result}" if refused else text
    return Row(case.name, "✓" if good else "✗", text)


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


def _good(rows: Rows, cases: Iterable[Any]) -> list[int]:
    """Returns the number of TensorFlow's good rows, and of tfcdo's."""
    sides = zip(*(rows[case.name] for case in cases), strict=True)
    return [sum(row.mark == "✓" for row in side) for side in sides]


def _folded(subjects: Mapping[str, Sequence[Any]], rows: Rows) -> Iterator[str]:
    """Yields a table for each subject, with the numbers of its good rows as the title."""
    for subject, cases in subjects.items():
        theirs, ours = _good(rows, cases)
        yield "<details>"
        yield (
            f"<summary>{subject}: TensorFlow {theirs} of {len(cases)}, "
            f"tfcdo {ours} of {len(cases)}</summary>\n"
        )
        yield from _table((case.name, *(row.cell for row in rows[case.name])) for case in cases)
        yield "\n</details>\n"


_table = functools.partial(pages.table, "case | TensorFlow | tfcdo")


def readme_table(rows: Rows) -> Iterator[str]:
    """Makes the lines of README.md's table."""
    head = f"The program has | TensorFlow {tf.__version__}, Keras {keras.__version__} | tfcdo"
    named = ((label, *(row.result for row in rows[name])) for name, label in FIRST.items() if label)
    return pages.table(head, named)


def main(page: pathlib.Path) -> None:
    """Runs all cases and changes the pages."""
    # What the other processes inherit.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    found: dict[str, list[Row]] = {library: [] for library in LIBRARIES}
    for kind, library in pages.with_progress([*itertools.product(WORK, LIBRARIES)], " with ".join):
        cases = WORK[kind]
        results = run(functools.partial(outcome, kind, library), range(len(cases)), SECONDS)
        found[library] += [
            row or Row(case.name, "✗", f"crashes or hangs (over {SECONDS:g} s)")
            for case, row in zip(cases, results, strict=True)
        ]
    rows = {pair[0].name: pair for pair in zip(*found.values(), strict=True)}
    for name, lines in parts(rows).items():
        pages.replace_table(page, f"compat.py, {name}", [*lines])
    pages.replace_table(pages.ROOT / "README.md", "compat.py", [*readme_table(rows)])


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
