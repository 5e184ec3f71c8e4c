"""Runs other libraries' programs under tfcdo's and TensorFlow's strategies: `make third-party`.

    python tools/third_party.py [PROGRAM ...]    # in the environment of `make third-party`

Each program runs three times, in processes of its own: on one device, and on three virtual CPU
devices under each strategy. The table is in docs/third-party.md.
"""

from __future__ import annotations

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
# The package of each function of third_party_programs.
PACKAGES = {
    "sonnet": "dm-sonnet",
    "sonnet_tests": "dm-sonnet",
    "orbit": "tf-models-official",
    "models": "tf-models-official",
    "tf_keras": "tf_keras",
    "keras_hub_bert": "keras-hub",
    "keras_hub_gpt2": "keras-hub",
    "keras_rs": "keras-rs",
    "recommenders": "tensorflow-recommenders",
    "probability": "tensorflow-probability",
    "agents": "tf-agents",
    "keras_tuner": "keras-tuner",
}
_WITH_KERAS_2 = ("orbit", "models", "tf_keras", "recommenders", "probability", "agents")


class Strategy:
    """A strategy of some kind, in a process of its own."""

    def __init__(self, kind: str) -> None:
        devices = tfcdo.configure_virtual_cpus(NUM_DEVICES)
        library = tfcdo if kind == "tfcdo" else tf.distribute
        self._strategy = library.MirroredStrategy(devices[:1] if kind == "one" else devices)

    def run(self, name: str) -> list[np.ndarray] | str:
        """Returns a program's numbers, or its error."""
        try:
            return [*map(np.asarray, getattr(third_party_programs, name)(self._strategy))]
        except Exception as error:
            return pages.error_text(error)


def outcome(name: str, kind: str) -> Any:
    """Runs one program in a process of its own; returns its numbers, or its error."""
    legacy = {"TF_USE_LEGACY_KERAS": f"{name in _WITH_KERAS_2:d}"}
    (result,) = pages.call_apart([__file__, kind], [{"name": name}], _SECONDS, **legacy)
    return result or f"no result in {_SECONDS} s"


def row(found: Any, expected: Any) -> pages.Row:
    """Says how one strategy's numbers compare with one device's."""
    if isinstance(expected, str):
        return pages.Row("✗", f"{expected} (on one device)")
    if isinstance(found, str):
        return pages.Row("✗", found)
    difference = pages.largest_difference(found, expected)
    return pages.Row("✓" if difference < 3e-5 else "✗", f"{difference:.0e}")


def rows(names: Sequence[str]) -> Iterator[list[str]]:
    """Runs programs under all strategies; yields the cells of their rows."""
    for name in pages.with_progress(names):
        expected, *others = (outcome(name, kind) for kind in KINDS)
        description = getattr(third_party_programs, name).__doc__.splitlines()[0]
        package = f"{PACKAGES[name]} {importlib.metadata.version(PACKAGES[name])}"
        yield [package, description, *(row(found, expected).cell for found in others)]


def main(names: Sequence[str]) -> None:
    """Runs the programs and makes the table."""
    versions = f"TensorFlow {tf.__version__} | tfcdo {tfcdo.__version__}"
    table = pages.table(f"library | program | {versions}", rows(names or [*PACKAGES]))
    pages.replace("docs/third-party.md", "third_party.py", table)


if __name__ == "__main__":
    if sys.argv[-1] in KINDS:
        worker_pool.serve(Strategy)
    else:
        main(sys.argv[1:])
