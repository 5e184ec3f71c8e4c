"""Measures several hosts for docs/performance.md, and writes that section anew.

    python tools/performance_hosts.py docs/performance.md

Each case is one run of `tfcdo bench --workers`, which takes a minute on an idle machine.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from performance_sections import bench
from performance_sections import write_section

TITLE = "## Several hosts"

# What `tfcdo bench --workers --json` wrote.
Run = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of `tfcdo bench --workers`.

    Attributes:
      num_workers: how many processes stand for hosts.
      num_devices: how many devices each has.
      rate: the limit of the link between them; None for none.
      max_bytes: the largest wanted ratio of the bytes sent to TensorFlow's; None for no target.
      max_seconds: the same of the time of a step.
      max_bytes_cast: as `max_bytes`, with bfloat16 between hosts.
      max_seconds_cast: as `max_seconds`, with bfloat16 between hosts.
    """

    num_workers: int
    num_devices: int
    rate: str | None
    max_bytes: float | None = None
    max_seconds: float | None = None
    max_bytes_cast: float | None = None
    max_seconds_cast: float | None = None

    def __str__(self) -> str:
        return f"{self.num_workers} x {self.num_devices}, {self.rate or 'no limit'}"


CASES = (
    Case(2, 1, "1gbit", max_seconds=0.85),
    Case(2, 2, "1gbit", 0.67, 0.70, max_bytes_cast=0.34, max_seconds_cast=0.50),
    Case(2, 2, None, max_seconds=0.90),
    Case(2, 4, "1gbit", max_bytes=0.58),
)


def run(case: Case) -> Run:
    """Measures one case.

    Args:
      case: what to measure.

    Returns:
      What `tfcdo bench` wrote.

    Raises:
      subprocess.CalledProcessError: if it fails, as it does if a result of tfcdo's is wrong.
    """
    rate = ["--rate", case.rate] if case.rate else []
    return bench(["--workers", str(case.num_workers), "-g", str(case.num_devices), *rate])


def section(runs: Mapping[Case, Run]) -> str:
    """Writes the section.

    Args:
      runs: for each case, what was measured.

    Returns:
      Markdown.
    """
    (first, *_) = runs.values()
    size = first["results"][0]["gradient_bytes"] / 1e6
    loads = [run["load"] for run in runs.values() if run.get("load") is not None]
    machine = first["machine"]
    lines = [
        TITLE,
        "",
        f"`tfcdo bench --workers`, on processes of one machine with {machine['cores']} cores, on "
        f"{first['date'][:10]}: a vision transformer with {size:.0f} MB of gradients trains under "
        "`tf.distribute.MultiWorkerMirroredStrategy` (made able to use all CPU devices of a "
        "process) and `tfcdo.MultiWorkerMirroredStrategy`, without and with "
        "`wire_between='bfloat16'`, a step of each in turn, on the same data. Sums are compared "
        "with numpy's; the weights of all replicas are bitwise equal in the end. The bytes are "
        "counted on the loopback interface of a network namespace of the "
        "workers' own, where `tc` limits the rate of both directions together. *Limit*: no step is "
        "shorter than computing (the gradients, without the update), or than sending 2 (N - 1) "
        "times the gradients, or half of that. " + _describe_load(loads),
        "",
        "| hosts x devices, link | step ms, TensorFlow | tfcdo | of TensorFlow | at most | | limit "
        "| computing ms | sent MB, TensorFlow | tfcdo | of TensorFlow | at most | |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---|",
        *(_row(case, measured, cast) for case, measured in runs.items() for cast in (False, True)),
        "",
    ]
    return "\n".join(lines)


def _describe_load(loads: Sequence[float]) -> str:
    if not loads:
        return ""
    return (
        f"The machine's load was {min(loads):.0f} to {max(loads):.0f}, of which about 4 is the "
        "workers' own; what is above it slowed all columns."
    )


def _row(case: Case, measured: Run, cast: bool) -> str:
    kind = "tfcdo bfloat16" if cast else "tfcdo"
    ours, theirs, alone = (_of_kind(measured, name) for name in (kind, "tf", "computing alone"))
    seconds = ours["seconds"] / theirs["seconds"]
    sent = ours["bytes_sent"] / theirs["bytes_sent"]
    limit = max(alone["seconds"], measured["least_sending_seconds"] / (2 if cast else 1))
    cells = (
        f"{case}, bfloat16" if cast else str(case),
        f"{theirs['seconds'] * 1e3:.0f}",
        f"{ours['seconds'] * 1e3:.0f}",
        f"{seconds:.2f}",
        *_verdict(seconds, case.max_seconds_cast if cast else case.max_seconds),
        f"{limit / theirs['seconds']:.2f}",
        f"{alone['seconds'] * 1e3:.0f}",
        f"{theirs['bytes_sent'] / 1e6:.1f}",
        f"{ours['bytes_sent'] / 1e6:.1f}",
        f"{sent:.3f}",
        *_verdict(sent, case.max_bytes_cast if cast else case.max_bytes),
    )
    return f"| {' | '.join(cells)} |"


def _verdict(ratio: float, at_most: float | None) -> tuple[str, str]:
    if at_most is None:
        return "", ""
    return f"{at_most:.2f}", "met" if ratio <= at_most else "**missed**"


def _of_kind(measured: Run, kind: str) -> Mapping[str, Any]:
    (found,) = (one for one in measured["results"] if one["kind"] == kind)
    return found


def main(path: pathlib.Path, cases: Sequence[Case] = CASES) -> None:
    """Measures all cases and writes the section.

    Args:
      path: the page.
      cases: what is measured.
    """
    runs = {}
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {case}", flush=True)
        runs[case] = run(case)
    write_section(path, section(runs))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
