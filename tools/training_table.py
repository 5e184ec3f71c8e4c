"""Trains on one device, on TensorFlow's strategy and on tfcdo's, and compares; for docs/compat.md.

One process for each library runs all trainings; one that crashes or hangs ends it, is noted, and
the next training gets a new process.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

TIMEOUT_SECONDS = 1800
Row = dict[str, str]
_RUNS = pathlib.Path(__file__).with_name("training_runs.py")
_HEADING = """
## Keras on 2, 3 and 5 replicas, against one device

The same model, batches and seed, trained for {steps} steps on one device and on 2, 3 and 5 virtual
ones, or on as many replicas as a row says: the largest difference of weights, and of all losses and
metrics that `fit` and `evaluate` report, over all numbers of replicas. TensorFlow's column is
`tf.distribute.MirroredStrategy` with `ReductionToOneDevice`, whose sums are right, and Keras's
optimizer; tfcdo's is `tfcdo.MirroredStrategy` with `tfcdo.keras.DistributedOptimizer` around the
same optimizer and the callback `tfcdo.keras.SynchronizeStatistics`, and with `weight_by_examples`
where a row says so. On 2 hosts both are `MultiWorkerMirroredStrategy`, of 6 replicas with tfcdo and
2 with TensorFlow.
✓: equal but for rounding; ~: not, for the reason given; ✗: an error, or a silent difference.

| Keras {version} | TensorFlow {tensorflow} | tfcdo |
|---|---|---|
"""


def run(library: str) -> list[Row]:
    """Runs all trainings with one library.

    Args:
      library: "TensorFlow" or "tfcdo".

    Returns:
      One row for each training: its name, the cell's text and mark.
    """
    rows: list[Row] = []
    names = _names()
    while len(rows) < len(names):
        rows += _rows_of(library, str(len(rows)))
        if len(rows) < len(names):
            text = "the process ends or hangs"
            rows.append({"name": names[len(rows)], "mark": "✗", "text": text})
    return rows


def section(rows: Mapping[str, Sequence[Row]], versions: Mapping[str, str]) -> str:
    """Writes the section of the page.

    Args:
      rows: by library, what `run` returned.
      versions: those of Keras ("version") and TensorFlow ("tensorflow").

    Returns:
      Markdown.
    """
    lines = [
        f"| {theirs['name']} | {_cell(theirs)} | {_cell(ours)} |"
        for theirs, ours in zip(rows["TensorFlow"], rows["tfcdo"], strict=True)
    ]
    return _HEADING.format(steps="4", **versions) + "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    return f"{row['mark']} {row['text']}".replace("|", "\\|").replace("\n", " ")


def _names() -> list[str]:
    return [row["name"] for row in _rows_of("--names")]


def _environment() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def _rows_of(*arguments: str) -> list[Row]:
    """Returns what a process printed, up to its end or to the time limit."""
    try:
        output = subprocess.run(
            [sys.executable, str(_RUNS), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
            env=_environment(),
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
    return [json.loads(line) for line in output.decode().splitlines() if line[:1] == "{"]
