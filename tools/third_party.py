"""Runs other libraries' programs under tfcdo's and TensorFlow's strategies: `make third-party`.

    python tools/third_party.py [PROGRAM ...]    # in the environment of `make third-party`

Each program runs three times, in processes of its own: on one device, and on three virtual CPU
devices under each strategy. The table is in docs/third-party.md.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pages
import tensorflow as tf
import third_party_programs

import tfcdo
from tfcdo.bench import worker_pool

KINDS = ("one", "tensorflow", "tfcdo")
NUM_DEVICES = 3
_SECONDS = 600


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


class Strategy:
    """A strategy of some kind, in a process of its own."""

    def __init__(self, kind: str) -> None:
        devices = tfcdo.configure_virtual_cpus(NUM_DEVICES)
        library = tfcdo if kind == "tfcdo" else tf.distribute
        self._strategy = library.MirroredStrategy(devices[:1] if kind == "one" else devices)

    def run(self, name: str) -> list[np.ndarray] | str:
        """Returns a program's numbers, or its error."""
        try:
            return getattr(third_party_programs, name)(self._strategy)
        except Exception as error:
            return pages.error_text(error)


def outcome(program: Program, kind: str) -> Any:
    """Runs one program in a process of its own; returns its numbers, or its error."""
    legacy = {"TF_USE_LEGACY_KERAS": str(int(program.legacy_keras)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    (result,) = pages.call_apart([__file__, kind], [{"name": program.name}], _SECONDS, **legacy)
    return result or f"no result in {_SECONDS} s"


def largest_difference(found: Any, expected: Any) -> float:
    """Returns the largest absolute difference of two lists of numbers."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(np.subtract(a, b)).max(initial=0.0)) for a, b in pairs)


def cell(found: Any, expected: Any) -> str:
    """Says how one strategy's numbers compare with one device's."""
    if isinstance(found, str):
        return f"✗ {found[:120]}".replace("|", "/")
    difference = largest_difference(found, expected)
    return f"{'✓' if difference < 3e-5 else '✗'} {difference:.0e}"


def rows(programs: Sequence[Program]) -> Iterator[list[str]]:
    """Runs programs under all strategies; yields the cells of their rows."""
    for program in pages.with_progress(programs, lambda program: program.name):
        expected = outcome(program, "one")
        if isinstance(expected, str):
            cells = [f"{cell(expected, expected)} (on one device)"] * 2
        else:
            cells = [cell(outcome(program, kind), expected) for kind in ("tensorflow", "tfcdo")]
        description = getattr(third_party_programs, program.name).__doc__.splitlines()[0]
        package = f"{program.package} {importlib.metadata.version(program.package)}"
        yield [package, description, *cells]


def main(names: Sequence[str]) -> None:
    """Runs the programs and makes the table."""
    chosen = [program for program in PROGRAMS if not names or program.name in names]
    versions = f"TensorFlow {tf.__version__} | tfcdo {tfcdo.__version__}"
    table = pages.table(f"library | program | {versions}", rows(chosen))
    pages.replace("docs/third-party.md", "third_party.py", table)


if __name__ == "__main__":
    if sys.argv[-1] in KINDS:
        worker_pool.serve(Strategy)
    else:
        main(sys.argv[1:])
