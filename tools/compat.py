"""Runs the same work through TensorFlow's classes and tfcdo's, and writes tables of the outcomes.

    python tools/compat.py docs/compat.md

The work is single calls (`compat_cases`) and trainings (`training_cases`). It runs in a worker
process for each library; after a crash or a hang, the next case gets a new one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from compat_cases import CASES, Case, Refused
from compat_rows import Row, first_words

# By kind of work, seconds that a worker may take for all of it.
TIMEOUT_SECONDS = {"calls": 120, "trainings": 1800}
LIBRARIES = ("TensorFlow", "tfcdo")
_TRAININGS_HEADING = """
## Keras on 2, 3 and 5 replicas, against one device

The same model, batches and seed, trained for 4 steps on one device and on 2, 3 and 5 virtual
ones, or on as many replicas as a row says: the largest difference of weights, and of all losses and
metrics that `fit` and `evaluate` report, over all numbers of replicas. TensorFlow's column is
`tf.distribute.MirroredStrategy` with `ReductionToOneDevice`, whose sums are correct. In tfcdo's
only the strategy's line is changed, to `tfcdo.MirroredStrategy()`, or to one with the option that a
row names.
✓: equal but for rounding; ~: not, for the reason given; ✗: an error, or a silent difference.

| Keras {keras} | TensorFlow {tensorflow} | tfcdo |
|---|---|---|
"""


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


def table(rows: Mapping[str, Sequence[Row]]) -> str:
    """Returns a line for each case, TensorFlow's outcome before tfcdo's."""
    return "".join(
        f"| {theirs.name} | {theirs.cell} | {ours.cell} |\n"
        for theirs, ours in zip(*(rows[library] for library in LIBRARIES), strict=True)
    )


def page(calls: Mapping[str, Sequence[Row]], trainings: Mapping[str, Sequence[Row]]) -> str:
    """Writes the page, in Markdown."""
    version = version_of("tensorflow")
    failed = {name: sum(row.mark == "✗" for row in rows) for name, rows in calls.items()}
    return (
        "# The same cases through TensorFlow's classes and tfcdo's\n\n"
        "Made by `make compat`, which runs both on virtual CPU devices; do not edit.\n"
        f"TensorFlow {version}. ✗: an incorrect result, or an error that does not name the "
        "problem.\n"
        f"TensorFlow's classes fail {failed['TensorFlow']} of {len(CASES)} cases and tfcdo's "
        f"{failed['tfcdo']}.\n\n"
        f"| case | TensorFlow {version} | tfcdo |\n|---|---|---|\n"
        + table(calls)
        + _TRAININGS_HEADING.format(keras=version_of("keras"), tensorflow=version)
        + table(trainings)
    )


def version_of(package: str) -> str:
    """Returns the version in a package's metadata: importing TensorFlow would print its logs."""
    names = importlib.metadata.packages_distributions()[package]
    return importlib.metadata.version(names[0])


def judge(case: Case, library: Any) -> Row:
    """Runs a case in this process, with the classes in a namespace."""
    refused = isinstance(case.expected, Refused)
    try:
        result = case.call(library)
    except Exception as error:
        text = f"{type(error).__name__}: {first_words(str(error))}"
        clear = isinstance(error, (ValueError, TypeError))
        good = refused and clear and case.expected.argument in str(error)
    else:
        good = not refused and result == case.expected
        text = f"{result}" if good else f"{result} instead of {case.expected}"
        text = f"accepts it and gives {result}" if refused else text
    return Row(case.name, "✓" if good else "✗", text)


def _library(name: str) -> Any:
    """Returns the namespace of a library's classes."""
    if name == "tfcdo":
        return importlib.import_module("tfcdo")
    if name != "TensorFlow":
        raise ValueError(f"library must be one of {LIBRARIES}; got {name!r}")
    # The base class of two of the public classes is not public itself.
    return importlib.import_module("tensorflow.python.distribute.cross_device_ops")


def _work(kind: str, library: str, first: int) -> None:
    """Prints the rows of one library from a case on."""
    import testing_utils  # noqa: F401  (configures the virtual devices, before anything else)

    if kind == "calls":
        namespace = _library(library)
        rows = (judge(case, namespace) for case in CASES[first:])
    else:
        training_runs = importlib.import_module("training_runs")
        rows = (training_runs.row(training, library) for training in _trainings()[first:])
    for row in rows:
        print(json.dumps(row), flush=True)


def _trainings() -> Sequence[Any]:
    return importlib.import_module("training_cases").TRAININGS


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--worker":
        _work(arguments[1], arguments[2], int(arguments[3]))
        return
    names = {
        "calls": [case.name for case in CASES],
        "trainings": [training.name for training in _trainings()],
    }
    calls, trainings = (
        {
            library: run(
                names[kind],
                [sys.executable, __file__, "--worker", kind, library],
                seconds,
            )
            for library in LIBRARIES
        }
        for kind, seconds in TIMEOUT_SECONDS.items()
    )
    pathlib.Path(arguments[0]).write_text(page(calls, trainings), encoding="utf-8")
    print(f"{arguments[0]}: {len(CASES)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
