"""Runs the same work through TensorFlow's classes and tfcdo's, and writes tables of the outcomes.

    python tools/compat.py docs/compat.md

The work is single calls (`compat_cases`) and trainings (`compat_trainings`). It runs in a worker
process for each library; after a crash or a hang, the next case gets a new one. Some of the
trainings are README.md's table.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import compat_cases
import compat_trainings
import keras
import pages
import tensorflow as tf
from compat_cases import CASES, Case, Refused
from compat_trainings import TRAININGS
from pages import MAX_CELL, Row, escaped, first_words

# The base class of two of the public classes is not public itself.
from tensorflow.python.distribute import cross_device_ops

import tfcdo

# By kind of work, seconds that a worker may take for all of it.
TIMEOUT_SECONDS = {"calls": 120, "trainings": 3600}
LIBRARIES = {"TensorFlow": cross_device_ops, "tfcdo": tfcdo}
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
_PAGE = """\
# Compatibility

tfcdo gives the results of one device in {tfcdo_equal} of {trainings} trainings, and TensorFlow's
strategy in {tensorflow_equal}. Of {calls} single calls, tfcdo's classes pass {tfcdo_passed} and
TensorFlow's {tensorflow_passed}.

Made by `make compat` on virtual CPU devices; do not edit. TensorFlow {tensorflow}, Keras {keras},
tfcdo {tfcdo}.

✓: equal to one device up to rounding, or a correct result. ~: not equal, for the reason given. ✗:
an incorrect result, or an error.

## Ten cases that users meet first

The number is the largest difference of a weight from one-device training. The next section
explains it.

{first}
## Keras trainings

The same model, batches and seed are trained for 4 steps on one device and on 2, 3 and 5 virtual
ones, or on the number of replicas in the row. The first number is the largest difference of
weights. The second one is the largest difference of the losses and metrics that `fit` and
`evaluate` report. Both are the largest over all numbers of replicas.

TensorFlow's column is `tf.distribute.MirroredStrategy` with `ReductionToOneDevice`, whose sums
are correct. In tfcdo's column only the strategy is changed: to `tfcdo.MirroredStrategy()`, or to
one with the option in the row.

{training_tables}
## Single calls

Each call is made with TensorFlow's class and with tfcdo's class of the same name. A call with an
incorrect argument passes if its error names the argument.

{call_tables}
## Messages in full

<details>
<summary>The messages that the tables shorten</summary>

{messages}
</details>
"""
Rows = Mapping[str, Sequence[Row]]


def run(names: Sequence[str], command: Sequence[str], seconds: float) -> list[Row]:
    """Runs all cases in workers: a command, with the number of the case to begin with."""
    rows: list[Row] = []
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    while len(rows) < len(names):
        try:
            done = subprocess.run(
                [*command, str(len(rows))],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                env=environment,
                check=False,
            )
            output, ending = done.stdout, f"the process ends ({done.returncode})"
        except subprocess.TimeoutExpired as expired:
            output, ending = expired.stdout or b"", f"hangs (over {seconds} s)"
        rows += [Row(*json.loads(line)) for line in output.decode().splitlines() if line[:1] == "["]
        if len(rows) < len(names):
            rows.append(Row(names[len(rows)], "✗", ending))
    return rows


def page(calls: Rows, trainings: Rows) -> str:
    """Writes the page, in Markdown, from the rows of each library."""
    both = [*zip(calls["TensorFlow"], calls["tfcdo"], strict=True)]
    both += zip(trainings["TensorFlow"], trainings["tfcdo"], strict=True)
    pairs = {theirs.name: (theirs, ours) for theirs, ours in both}
    texts = [row.text for pair in both for row in pair if len(row.text) > MAX_CELL]
    return _PAGE.format(
        **{
            f"{library.lower()}_{word}": sum(row.mark == "✓" for row in rows[library])
            for word, rows in (("equal", trainings), ("passed", calls))
            for library in LIBRARIES
        },
        trainings=len(trainings["tfcdo"]),
        calls=len(calls["tfcdo"]),
        tensorflow=tf.__version__,
        keras=keras.__version__,
        tfcdo=tfcdo.__version__,
        first=_table(
            (theirs.name, theirs.verdict, ours.verdict)
            for theirs, ours in (pairs[name] for name in FIRST)
        ),
        training_tables=_folded(compat_trainings.SUBJECTS, pairs),
        call_tables=_folded(compat_cases.SUBJECTS, pairs),
        messages="".join(f"* {escaped(text)}\n" for text in dict.fromkeys(texts)),
    )


def _folded(subjects: Mapping[str, Sequence[Any]], pairs: Mapping[str, tuple[Row, Row]]) -> str:
    """Returns a table for each subject, with the numbers of its good rows as the title."""
    parts = []
    for subject, cases in subjects.items():
        rows = [pairs[case.name] for case in cases]
        theirs, ours = (sum(row.mark == "✓" for row in side) for side in zip(*rows, strict=True))
        table = _table((theirs.name, theirs.cell, ours.cell) for theirs, ours in rows)
        parts.append(
            f"<details>\n<summary>{subject}: TensorFlow {theirs} of {len(rows)}, "
            f"tfcdo {ours} of {len(rows)}</summary>\n\n{table}\n</details>\n"
        )
    return "\n".join(parts)


def _table(lines: Iterable[tuple[str, str, str]]) -> str:
    return "\n".join([*pages.table("case | TensorFlow | tfcdo", lines), ""])


def judge(case: Case, library: Any) -> Row:
    """Runs a case in this process, with the classes in a namespace."""
    refused = isinstance(case.expected, Refused)
    try:
        result = case.call(case.make(library))
    except Exception as error:
        text = f"{type(error).__name__}: {first_words(str(error))}"
        clear = isinstance(error, (ValueError, TypeError))
        good = refused and clear and case.expected.argument in str(error)
    else:
        good = not refused and result == case.expected
        text = f"{result}" if good else f"{result} instead of {case.expected}"
        text = f"accepts it and gives {result}" if refused else text
    return Row(case.name, "✓" if good else "✗", text)


def _work(kind: str, library: str, first: int) -> None:
    """Prints the rows of one library from a case on."""
    if kind == "calls":
        rows = (judge(case, LIBRARIES[library]) for case in CASES[first:])
    else:
        rows = (compat_trainings.row(training, library) for training in TRAININGS[first:])
    for row in rows:
        print(json.dumps(row), flush=True)


def readme_table(trainings: Rows) -> list[str]:
    """Makes the lines of README.md's table from the rows of each library."""
    theirs, ours = ({row.name: row.result for row in trainings[one]} for one in LIBRARIES)
    head = f"The program has | TensorFlow {tf.__version__}, Keras {keras.__version__} | tfcdo"
    rows = ((label, theirs[name], ours[name]) for name, label in FIRST.items() if label)
    return [*pages.table(head, rows)]


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--worker":
        _work(arguments[1], arguments[2], int(arguments[3]))
        return
    names = {"calls": [one.name for one in CASES], "trainings": [one.name for one in TRAININGS]}
    works = [(kind, library) for kind in TIMEOUT_SECONDS for library in LIBRARIES]
    rows: dict[str, dict[str, list[Row]]] = {kind: {} for kind in TIMEOUT_SECONDS}
    for kind, library in pages.with_progress(works, " with ".join):
        command = [sys.executable, __file__, "--worker", kind, library]
        rows[kind][library] = run(names[kind], command, TIMEOUT_SECONDS[kind])
    calls, trainings = rows["calls"], rows["trainings"]
    pathlib.Path(arguments[0]).write_text(page(calls, trainings), encoding="utf-8")
    pages.replace_table(pages.ROOT / "README.md", "compat.py", readme_table(trainings))
    print(f"{arguments[0]}: {len(CASES)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
