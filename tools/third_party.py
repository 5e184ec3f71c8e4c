"""Runs programs of other libraries under tfcdo's and TensorFlow's strategies: docs/third-party.md.

    python tools/third_party.py docs/third-party.md    # in the environment of `make third-party`

Each program runs three times, in processes of its own: on one device, and on three virtual CPU
devices under each strategy.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pages

NUM_DEVICES = 3
_SECONDS = 600
_PAGE = """\
# Other libraries

Made by `make third-party` on TensorFlow {tensorflow} and tfcdo {tfcdo}: each program trains on one
device and on 3 virtual CPU devices under `tf.distribute.MirroredStrategy` and
`tfcdo.MirroredStrategy`. The table has the largest difference of the results to one device.
✓: at most 3e-5. The programs are in
[`tools/third_party_programs.py`](../tools/third_party_programs.py), each about 20 lines.

{table}

In BERT's row, Keras clips each replica's gradients before they are summed under TensorFlow's
strategy.
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of third_party_programs, the library's package, and the Keras that it needs."""

    name: str
    package: str
    legacy_keras: bool = False


PROGRAMS = (
    Program("sonnet", "dm-sonnet"),
    Program("sonnet_tests", "dm-sonnet"),
    Program("orbit", "tf-models-official", True),
    Program("models", "tf-models-official", True),
    Program("tf_keras", "tf_keras", True),
    Program("keras_hub_bert", "keras-hub"),
    Program("keras_hub_gpt2", "keras-hub"),
    Program("keras_rs", "keras-rs"),
    Program("recommenders", "tensorflow-recommenders", True),
    Program("probability", "tensorflow-probability", True),
    Program("agents", "tf-agents", True),
    Program("keras_tuner", "keras-tuner"),
)


def run(name: str, kind: str) -> None:
    """Runs one program in this process and prints its numbers, or its error."""
    import tensorflow as tf
    import third_party_programs

    import tfcdo

    devices = tfcdo.configure_virtual_cpus(NUM_DEVICES)
    library = tfcdo if kind == "tfcdo" else tf.distribute
    strategy = library.MirroredStrategy(devices[:1] if kind == "one" else devices)
    found: Any
    try:
        values = getattr(third_party_programs, name)(strategy)
        found = [value.tolist() for value in values]
    except Exception as error:
        found = pages.error_text(error)
    print("RESULT", json.dumps(found))


def outcome(program: Program, kind: str) -> Any:
    """Runs one program in a process of its own; returns its numbers, or its error."""
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_USE_LEGACY_KERAS": str(int(program.legacy_keras)),
    }
    command = [sys.executable, __file__, "--run", program.name, kind]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no result after {_SECONDS} s"
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return "no result"


def largest_difference(found: Any, expected: Any) -> float:
    """Returns the largest absolute difference of two nested lists of numbers."""
    import numpy as np

    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(np.subtract(a, b)).max(initial=0.0)) for a, b in pairs)


def cell(found: Any, expected: Any) -> str:
    """Says how one strategy's numbers compare with one device's."""
    if isinstance(found, str):
        return f"✗ {found[:120]}".replace("|", "/")
    difference = largest_difference(found, expected)
    return f"{'✓' if difference < 3e-5 else '✗'} {difference:.0e}"


def row(program: Program) -> list[str]:
    """Runs a program under all strategies; returns the cells of its row."""
    import third_party_programs

    expected = outcome(program, "one")
    description = getattr(third_party_programs, program.name).__doc__.splitlines()[0]
    if isinstance(expected, str):
        cells = [f"{cell(expected, expected)} (on one device)"] * 2
    else:
        cells = [cell(outcome(program, kind), expected) for kind in ("tensorflow", "tfcdo")]
    package = f"{program.package} {importlib.metadata.version(program.package)}"
    return [package, description, *cells]


def main(path: pathlib.Path, names: list[str]) -> None:
    """Runs the programs and writes the page."""
    chosen = [program for program in PROGRAMS if not names or program.name in names]
    rows = []
    for program in pages.with_progress(chosen, lambda program: program.name):
        rows.append(row(program))
        print(*rows[-1], flush=True)
    table = "\n".join(pages.table("library | program | TensorFlow | tfcdo", rows))
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "tfcdo")}
    text = _PAGE.format(**versions, table=table)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run(*sys.argv[2:])
    else:
        main(pathlib.Path(sys.argv[1]), sys.argv[2:])
