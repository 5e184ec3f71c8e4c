"""Measures the reduction of rows for docs/performance.md, and writes that section anew.

    python tools/performance_rows.py docs/performance.md

Each case is measured by `tfcdo bench --sparse` twice, which takes two minutes in all.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from performance_sections import bench
from performance_sections import write_section

from tfcdo.bench.rows import ALONE
from tfcdo.bench.rows import MOMENTUM
from tfcdo.bench.rows import SGD

TITLE = "## Rows of a table"

# What `tfcdo bench --sparse --json` wrote.
Run = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload of `tfcdo bench --sparse`, and the largest wanted ratios to TensorFlow's time.

    Attributes:
      repeat: the share of the rows that all devices have.
      at_most: by update, the largest wanted ratio to the time of TensorFlow's fastest class.
    """

    repeat: float
    at_most: Mapping[str, float]


NUM_ROWS, NUM_DEVICES = 4096, 4
CASES = (
    Case(0.0, {SGD: 1.05, MOMENTUM: 1.05}),
    Case(0.5, {SGD: 1.05, MOMENTUM: 0.80}),
    Case(0.9, {SGD: 1.05, MOMENTUM: 0.60}),
)
_NUM_RUNS = 2


def run(case: Case) -> Run:
    """Measures one case once.

    Args:
      case: what to measure.

    Returns:
      What `tfcdo bench` wrote.

    Raises:
      subprocess.CalledProcessError: if it fails, as it does if a result of tfcdo's is wrong.
    """
    workload = ["--sparse", str(NUM_ROWS), "--repeat", str(case.repeat)]
    return bench([*workload, "-g", str(NUM_DEVICES)])


def section(runs: Sequence[tuple[Case, Sequence[Run]]]) -> str:
    """Writes the section.

    Args:
      runs: for each case, what was measured each time.

    Returns:
      Markdown.
    """
    first = runs[0][1][0]
    lines = [
        TITLE,
        "",
        f"`tfcdo bench --sparse {NUM_ROWS} --repeat R -g {NUM_DEVICES}`, on {first['date'][:10]}: "
        f"each device has a gradient for {NUM_ROWS:,} rows of a table of 1,000,000 x 64 float32; "
        "the part R of them is the same on all devices. A step reduces the rows and updates the "
        "tables of all devices; for momentum, each first adds TensorFlow's rows of equal index, as "
        f"TensorFlow's optimizers do. Each was measured {len(runs[0][1])} times, in processes of "
        "their own, and the largest ratio to TensorFlow's fastest class counts. *Limit*: the ratio "
        "of a step that only updates, with rows that are reduced already; no class can be faster.",
        "",
        "| R | update | TensorFlow ms | class | ms | of TensorFlow | at most | | limit |",
        "|---:|---|---:|---|---:|---:|---:|---|---:|",
        *(
            _row(case, measured, update, name)
            for case, measured in runs
            for update in (SGD, MOMENTUM)
            for name in dict.fromkeys(
                one["name"] for one in measured[0]["results"] if one["kind"] == "tfcdo"
            )
        ),
        "",
    ]
    return "\n".join(lines)


def _row(case: Case, measured: Sequence[Run], update: str, name: str) -> str:
    theirs = [min(_seconds(one, update, kind="tf").values()) for one in measured]
    ours = [_seconds(one, update, kind="tfcdo")[name] for one in measured]
    alone = [_seconds(one, update, kind=ALONE)[ALONE] for one in measured]
    ratios, limits = _ratios(ours, theirs), _ratios(alone, theirs)
    at_most = case.at_most[update]
    cells = (
        f"{case.repeat:g}",
        update,
        _listed([1e3 * seconds for seconds in theirs], 1),
        f"`{name}`",
        _listed([1e3 * seconds for seconds in ours], 1),
        _listed(ratios, 2),
        f"{at_most:.2f}",
        _verdict(max(ratios), at_most, max(limits)),
        _listed(limits, 2),
    )
    return f"| {' | '.join(cells)} |"


def _verdict(ratio: float, at_most: float, limit: float) -> str:
    if ratio <= at_most:
        return "met"
    return "**missed**, below the limit" if at_most < limit else "**missed**"


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [own / other for own, other in zip(ours, theirs, strict=True)]


def _listed(numbers: Sequence[float], digits: int) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def _seconds(measured: Run, update: str, kind: str) -> dict[str, float]:
    """Returns the time of a step by the name of the implementation, of those that are right."""
    return {
        one["name"]: one["seconds"]
        for one in measured["results"]
        if (one["kind"], one["update"]) == (kind, update) and not one["wrong"]
    }


def main(path: pathlib.Path, cases: Sequence[Case] = CASES, num_runs: int = _NUM_RUNS) -> None:
    """Measures all cases and writes the section.

    Args:
      path: the page.
      cases: what is measured.
      num_runs: how often.
    """
    runs = []
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {case.repeat:.0%} of the rows on all devices", flush=True)
        runs.append((case, [run(case) for _ in range(num_runs)]))
    write_section(path, section(runs))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
