"""Measures what docs/performance.md shows, and writes it with its picture.

    python tools/performance.py docs/performance.md

Each workload is measured by `tfcdo bench` in a process of its own; those of the tables anew, if
others made use of the machine meanwhile. It takes a quarter of an hour on two cores, and wants the
machine for itself.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import performance_hosts
import performance_rows
from performance_page import page
from performance_sections import bench
from performance_targets import CASES
from performance_targets import MAX_TRIES
from performance_targets import PROFILED
from performance_targets import RESNETS
from performance_targets import UNDISTURBED
from performance_targets import Case
from performance_targets import Result


def disturbance(results: Sequence[Result]) -> float:
    """Returns how much others used the machine: the median of the implementations' spreads.

    Returns:
      A part of the time. It says nothing about who is faster.
    """
    return statistics.median(
        one["spread"] / abs(one["seconds"]) if one["seconds"] else math.inf
        for one in results
        if one["kind"] in ("tfcdo", "tf")
    )


def bench_undisturbed(arguments: Sequence[str], max_tries: int) -> dict[str, Any]:
    """Runs `tfcdo bench` until nobody else seems to have used the machine.

    Args:
      arguments: its options.
      max_tries: how often at most.

    Returns:
      What the least disturbed run wrote.
    """
    runs = [bench(arguments)]
    while disturbance(runs[-1]["results"]) > UNDISTURBED and len(runs) < max_tries:
        runs.append(bench(arguments))
    return min(runs, key=lambda run: disturbance(run["results"]))


def profile(case: Case, name: str) -> list[dict[str, Any]]:
    """Lists the ops that an implementation runs, in a process of their own."""
    code = (
        "import dataclasses, json, sys\n"
        "from tfcdo.bench import implementations, profile, workloads\n"
        "workload = workloads.gradients_of(sys.argv[1])\n"
        "(one,) = implementations.parse(sys.argv[3])\n"
        "found = profile.profile(workload, int(sys.argv[2]), one)\n"
        "print(json.dumps([dataclasses.asdict(entry) for entry in found]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, case.model, str(case.num_devices), name],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(result.stdout)


def main(
    path: pathlib.Path,
    cases: Sequence[Case] = CASES,
    profiled: Case = RESNETS[1],
    extra: Sequence[str] = (),
    sizes: Sequence[str] = (),
    max_tries: int = MAX_TRIES,
) -> None:
    """Measures and writes.

    Args:
      path: the page; the picture goes beside it.
      cases: what is measured.
      profiled: of what the ops are listed.
      extra: further options for each run of `tfcdo bench`.
      sizes: and for that over sizes, which models have of their own.
      max_tries: how often a case is measured at most.
    """
    runs = {}
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases) + 2}: {case}", flush=True)
        eager = ["--eager"] if case.eager else []
        devices = str(case.num_devices)
        arguments = ["--model", case.model, "-g", devices, *eager, *extra]
        runs[case] = bench_undisturbed(arguments, max_tries)
    print(f"{len(cases) + 1} of {len(cases) + 2}: sizes", flush=True)
    picture = path.with_suffix(".png")
    bench(["-g", "4", "--plot", str(picture), *extra, *sizes])
    print(f"{len(cases) + 2} of {len(cases) + 2}: profile", flush=True)
    profiles = {name: profile(profiled, name) for name in PROFILED}
    path.write_text(page(runs, profiles, profiled, picture.name), encoding="utf-8")
    performance_hosts.main(path)
    performance_rows.main(path)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), extra=sys.argv[2:])
