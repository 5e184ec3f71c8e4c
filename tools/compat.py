"""Runs the same cases through TensorFlow's classes and tfcdo's, and writes a table of the outcomes.

    python tools/compat.py docs/compat.md

Every case runs in a worker process, one process for each library: a case that crashes or hangs ends
its worker, is noted, and the next case gets a new one.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import training_table
from compat_cases import CASES, Case, Refused

TIMEOUT_SECONDS = 120
LIBRARIES = ("TensorFlow", "tfcdo")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one case.

    Attributes:
      text: what to print.
      good: whether the user got the right result, or a clear error where none is right.
    """

    text: str
    good: bool


def run(library: str) -> list[Outcome]:
    """Runs all cases with one library.

    Args:
      library: one of `LIBRARIES`.

    Returns:
      The outcomes, in the order of `CASES`.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(CASES):
        outcomes += run_worker(library, len(outcomes))
    return outcomes


def run_worker(library: str, first: int) -> list[Outcome]:
    """Returns the outcomes from case `first` up to the end, or to a case that ends the worker."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command_of_worker(library, first),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
        output, ending = done.stdout, Outcome(f"the process ends ({done.returncode})", False)
    except subprocess.TimeoutExpired as expired:
        # `output` is bytes even though the process was started with text=True.
        output = (expired.stdout or b"").decode()
        ending = Outcome(f"hangs (over {TIMEOUT_SECONDS} s)", False)
    outcomes = [Outcome(**json.loads(line)) for line in output.splitlines() if line[:1] == "{"]
    return outcomes if first + len(outcomes) == len(CASES) else [*outcomes, ending]


def command_of_worker(library: str, first: int) -> list[str]:
    """Returns the command that runs the cases of a library from case `first` on."""
    return [sys.executable, __file__, "--worker", library, str(first)]


def table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Writes the page: one row for each case.

    Args:
      outcomes: by library, the outcomes of all cases.

    Returns:
      Markdown.
    """
    version = tensorflow_version()
    rows = [
        f"| {case.name} | {cell(theirs)} | {cell(ours)} |"
        for case, theirs, ours in zip(CASES, outcomes["TensorFlow"], outcomes["tfcdo"], strict=True)
    ]
    counts = {
        name: sum(not one.good for one in of_library) for name, of_library in outcomes.items()
    }
    return "\n".join(
        [
            "# The same cases through TensorFlow's classes and tfcdo's",
            "",
            "Made by `make compat`, which runs both on virtual CPU devices; do not edit.",
            f"TensorFlow {version}. ✗: a wrong result, or an error that does not say what "
            "is wrong.",
            f"Of {len(CASES)} cases, TensorFlow's classes fail {counts['TensorFlow']} and tfcdo's "
            f"{counts['tfcdo']}.",
            "",
            f"| case | TensorFlow {version} | tfcdo |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def tensorflow_version() -> str:
    """Returns TensorFlow's version."""
    return version_of("tensorflow")


def version_of(package: str) -> str:
    """Returns the version in a package's metadata: importing TensorFlow would print its logs."""
    names = importlib.metadata.packages_distributions()[package]
    return importlib.metadata.version(names[0])


def cell(outcome: Outcome) -> str:
    return f"{'✓' if outcome.good else '✗'} {outcome.text}".replace("|", "\\|").replace("\n", " ")


def judge(case: Case, library: Any) -> Outcome:
    """Runs a case in this process.

    Args:
      case: the case.
      library: the namespace of the classes.

    Returns:
      What happened.
    """
    refused = isinstance(case.expected, Refused)
    try:
        result = case.call(library)
    except Exception as error:
        text = f"{type(error).__name__}: {first_words(str(error))}"
        clear = isinstance(error, (ValueError, TypeError))
        return Outcome(text, refused and clear and case.expected.argument in str(error))
    if refused:
        return Outcome(f"accepts it and gives {result}", False)
    good = result == case.expected
    return Outcome(f"{result}" if good else f"{result} instead of {case.expected}", good)


def first_words(message: str) -> str:
    """Returns the beginning of an error message, without what differs from run to run."""
    # What follows is the stack of whoever ran it; what is between \033 and m is a color.
    message = re.sub("\033\\[[0-9;]*m", "", message).partition("defined at (most recent")[0]
    words = " ".join(message.replace("{{function_node ", "").split())
    for name in ("/job:localhost/replica:0/task:0/device:", "__wrapped__"):
        words = words.replace(name, "")
    return words if len(words) <= 110 else f"{words[:107]}..."


def _library(name: str) -> Any:
    """Returns the namespace of a library's classes."""
    if name == "tfcdo":
        return importlib.import_module("tfcdo")
    if name != "TensorFlow":
        raise ValueError(f"library must be one of {LIBRARIES}; got {name!r}")
    # The base class of two of the public classes is not public itself.
    return importlib.import_module("tensorflow.python.distribute.cross_device_ops")


def _work(library: str, first: int) -> None:
    import testing_utils  # noqa: F401  (configures the virtual devices, before anything else)

    namespace = _library(library)
    for case in CASES[first:]:
        print(json.dumps(dataclasses.asdict(judge(case, namespace))), flush=True)


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--worker":
        _work(arguments[1], int(arguments[2]))
        return
    text = table({library: run(library) for library in LIBRARIES})
    text += training_table.section(
        {library: training_table.run(library) for library in LIBRARIES},
        {"version": version_of("keras"), "tensorflow": tensorflow_version()},
    )
    pathlib.Path(arguments[0]).write_text(text, encoding="utf-8")
    print(f"{arguments[0]}: {len(CASES)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
