"""Measures what docs/performance.md says, and writes it with its picture.

    python tests/performance.py docs/performance.md

Each workload is measured by `tfcdo bench` in a process of its own; those of the tables anew, if
others made use of the machine meanwhile. It takes a quarter of an hour on two cores, and wants the
machine for itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

AUTO = "tfcdo.AutoAllReduce"
FASTEST = "the fastest TensorFlow class"
FLOOR = "the floor"
HIERARCHICAL = "HierarchicalCopyAllReduce"
TF_HIERARCHICAL = "tf.HierarchicalCopyAllReduce(num_packs=1)"
ONE_DEVICE = "ReductionToOneDevice"
COLLECTIVE = "tf.CollectiveAllReduce"

# A run is made anew if half of its implementations spread more than this part of their times,
UNDISTURBED = 0.1
# until there are so many, of which the least disturbed counts.
MAX_TRIES = 3

# One measurement, as `tfcdo bench --json` writes it.
Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of `tfcdo bench`.

    Attributes:
      model: whose gradients are all-reduced.
      num_devices: over how many devices.
      eager: whether without a graph.
    """

    model: str
    num_devices: int
    eager: bool = False

    def __str__(self) -> str:
        return f"{self.model}, K = {self.num_devices}{', eager' if self.eager else ''}"


@dataclasses.dataclass(frozen=True)
class Target:
    """What one number should at most be, as a multiple of another one in the same run.

    Attributes:
      case: the run.
      ours: the name of tfcdo's implementation.
      against: that of the other, or `FASTEST` or `FLOOR`.
      at_most: the ratio to reach.
      quantity: which number; a field of a measurement.
    """

    case: Case
    ours: str
    against: str
    at_most: float
    quantity: str = "seconds"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a target was met.

    Attributes:
      target: the target.
      ratio: what was measured; not a number if the times are lost in their spread.
      limit: of times, the ratio that the least would have that an all-reduce takes; else None.
    """

    target: Target
    ratio: float
    limit: float | None

    @property
    def met(self) -> bool:
        """Whether the ratio is small enough."""
        return self.ratio <= self.target.at_most


RESNETS = tuple(Case("resnet50", count) for count in (2, 4, 8))
TINIES = tuple(Case("tiny", count) for count in (4, 8))
MATRICES = tuple(Case("tiny-matrices", count) for count in (4, 8))
BERT, MOBILENET, EAGER = Case("bert-base", 4), Case("mobilenet", 4), Case("tiny", 4, eager=True)
CASES = (*RESNETS, BERT, MOBILENET, *TINIES, *MATRICES, EAGER)
PROFILED = (TF_HIERARCHICAL, "tf.ReductionToOneDevice", AUTO)

TARGETS = (
    Target(RESNETS[1], AUTO, FLOOR, 1.15),
    Target(RESNETS[2], AUTO, FLOOR, 1.25),
    Target(RESNETS[1], AUTO, FASTEST, 0.75),
    Target(RESNETS[2], AUTO, FASTEST, 0.55),
    Target(RESNETS[0], AUTO, FASTEST, 1.00),
    Target(BERT, AUTO, FASTEST, 0.75),
    Target(MOBILENET, AUTO, FASTEST, 0.65),
    *(Target(case, AUTO, FASTEST, 0.50) for case in TINIES),
    *(Target(case, AUTO, FASTEST, 0.75) for case in MATRICES),
    *(Target(case, f"tfcdo.{HIERARCHICAL}", TF_HIERARCHICAL, 0.35) for case in RESNETS[1:]),
    *(Target(case, f"tfcdo.{ONE_DEVICE}", f"tf.{ONE_DEVICE}", 0.80) for case in RESNETS[1:]),
    *(Target(case, AUTO, COLLECTIVE, 0.18) for case in RESNETS[1:]),
    Target(RESNETS[2], AUTO, TF_HIERARCHICAL, 0.10, "nodes"),
    Target(RESNETS[2], AUTO, TF_HIERARCHICAL, 0.40, "first_call"),
    Target(EAGER, AUTO, FASTEST, 0.60),
    Target(RESNETS[1], AUTO, f"tf.{ONE_DEVICE}", 1.10, "peak_memory"),
)


def outcome(target: Target, results: Sequence[Result]) -> Outcome:
    """Compares a target with what its case measured."""
    ours = _named(results, target.ours)
    other = _reference(results, target.against)
    limit = None
    if target.quantity == "seconds" and not target.case.eager:
        limit = _least(results) / other["seconds"]
    ratio = ours[target.quantity] / other[target.quantity]
    # The median of a difference may be below 0, and a reference within its spread measures nothing.
    lost = target.quantity == "seconds" and (ratio <= 0 or other["seconds"] <= other["spread"])
    return Outcome(target, math.nan if lost else ratio, limit)


def disturbance(results: Sequence[Result]) -> float:
    """How much others made use of the machine: the median, of all implementations, of the spread.

    Returns:
      A part of the time. It says nothing about who is faster.
    """
    return statistics.median(
        one["spread"] / abs(one["seconds"]) if one["seconds"] else math.inf
        for one in results
        if one["kind"] in ("tfcdo", "tf")
    )


def _least(results: Sequence[Result]) -> float:
    """The seconds that any all-reduce takes: the floor, or where that takes longer, packing."""
    packing = [one["seconds"] for one in results if one["kind"] == "packing"]
    return max([_reference(results, FLOOR)["seconds"], *packing])


def _reference(results: Sequence[Result], name: str) -> Result:
    if name not in (FASTEST, FLOOR):
        return _named(results, name)
    kind = "tf" if name == FASTEST else "floor"
    right = [one for one in results if one["kind"] == kind and not one["wrong"]]
    return min(right, key=lambda one: one["seconds"])


def _named(results: Sequence[Result], name: str) -> Result:
    (found,) = [one for one in results if one["name"] == name]
    return found


def page(
    runs: Mapping[Case, Mapping[str, Any]],
    profiles: Mapping[str, Sequence[Mapping[str, Any]]],
    profiled: Case,
    picture: str,
) -> str:
    """Writes the page.

    Args:
      runs: for each case, what `tfcdo bench --json` wrote.
      profiles: for each implementation, the types of ops that it ran.
      profiled: for which case.
      picture: the name of the picture's file.

    Returns:
      Markdown.
    """
    anyone = next(iter(runs.values()))
    versions = ", ".join(f"{name} {version}" for name, version in anyone["versions"].items())
    machine = anyone["machine"]
    lines = [
        "# Performance",
        "",
        "Made by `make bench`; do not edit. Measured on virtual CPU devices of "
        f"{machine['processor']} with {machine['cores']} cores ({machine['system']}), {versions}, "
        f"on {anyone['date'][:10]}.",
        "",
        "All implementations of one table took turns in one process. Times are medians of what a "
        "graph took more than the same graph without the all-reduce; ± is the distance between the "
        "quartiles. *Floor*: one fused pass over the same bytes at one place, by XLA or one "
        "`tf.add_n` for each 4 MiB. *Pack and unpack*: what TensorFlow's ops take at least to make "
        "one tensor of the small values of one shape on each device and to take it apart, with "
        "nothing added or sent; who does not pack sends each value by itself, which takes longer. "
        "K is the number of devices. For the tables, a run in which half of the implementations "
        f"spread over more than {UNDISTURBED:.0%} of their times was made anew, at most "
        f"{MAX_TRIES - 1} times, and what spread least counts; the picture is of one run.",
        "",
        *_targets([outcome(one, runs[one.case]["results"]) for one in TARGETS if one.case in runs]),
        "## Over sizes",
        "",
        f"![busbw over size, 4 virtual CPU devices]({picture})",
        "",
    ]
    for case, run in runs.items():
        lines += _table(case, run["results"])
    return "\n".join([*lines, *_profile(profiles, profiled)]) + "\n"


def _targets(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "## Targets",
        "",
        "*Limit*: the ratio that the floor would have, or, for small values, *pack and unpack*. "
        "A target below it cannot be met on this machine: both sides spend their time waiting for "
        "the same memory, or handing the same tensors from op to op.",
        "",
        "| work | what | of | against | at most | measured | limit | |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for one in outcomes:
        target = one.target
        lines.append(
            f"| {target.case} | {_WHAT[target.quantity]} | `{_short(target.ours)}` "
            f"| {_code(target.against)} | {target.at_most:.2f} | {_measured(one)} "
            f"| {'' if one.limit is None else f'{one.limit:.2f}'} | {_verdict(one)} |"
        )
    return [*lines, ""]


_WHAT = {
    "seconds": "time",
    "nodes": "graph nodes",
    "first_call": "first call",
    "peak_memory": "peak memory",
}


def _measured(one: Outcome) -> str:
    return "-" if math.isnan(one.ratio) else f"{one.ratio:.2f}"


def _verdict(one: Outcome) -> str:
    if math.isnan(one.ratio):
        return "not measured: lost in the spread"
    if one.met:
        return "met"
    below_limit = one.limit is not None and one.target.at_most < one.limit
    return "**missed**, below the limit" if below_limit else "**missed**"


def _table(case: Case, results: Sequence[Result]) -> list[str]:
    floor, fastest = _reference(results, FLOOR), _reference(results, FASTEST)
    lines = [
        f"## {case}",
        "",
        f"{results[0]['size']} bytes in each device's values.",
        "",
        "| implementation | ms | ± | CPU ms | busbw GB/s | of TF | of floor | #wrong | nodes "
        "| first call s | peak MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        net = one["kind"] in ("tfcdo", "tf")
        cells = [
            f"`{_short(one['name'])}`" if net else one["name"],
            f"{one['seconds'] * 1e3:.2f}",
            f"{one['spread'] * 1e3:.2f}",
            f"{one['cpu_seconds'] * 1e3:.2f}",
            _busbw(one) if net or one["kind"] == "floor" else "",
            _ratio(one, fastest) if net else "",
            _ratio(one, floor) if net else "",
            _or_nothing(one["wrong"]),
            _or_nothing(one["nodes"]),
            _or_nothing(one["first_call"], "{:.2f}"),
            _or_nothing(one["peak_memory"], "{:.1f}", 1e6),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _profile(profiles: Mapping[str, Sequence[Mapping[str, Any]]], case: Case) -> list[str]:
    lines = [
        "## Why",
        "",
        f"What one step runs for {case}, after TensorFlow has optimized the graph: how many "
        "ops of each type, how many MB their outputs have, and the sum of their times on all "
        "threads. An op that only passes a tensor on (`IdentityN`, `Reshape`, `Unpack` and `_Recv` "
        "between virtual CPU devices) shows its size, but copies nothing. What costs time is "
        "reading and writing memory (`AddN`, `ConcatV2`, `SplitV`, `Pack`) and, for small values, "
        "the number of ops and of edges between devices.",
        "",
    ]
    for name, entries in profiles.items():
        lines += [
            f"`{_short(name)}`",
            "",
            "| op | count | MB | ms |",
            "|---|---:|---:|---:|",
            *(
                f"| {one['op']} | {one['count']} | {one['size'] / 1e6:.1f} "
                f"| {one['seconds'] * 1e3:.2f} |"
                for one in entries
            ),
            "",
        ]
    return lines[:-1]


def _busbw(one: Result) -> str:
    if one["seconds"] <= 0:
        return "-"
    share = 2 * (one["num_devices"] - 1) / one["num_devices"]
    return f"{one['size'] * share / one['seconds'] / 1e9:.2f}"


def _ratio(one: Result, other: Result) -> str:
    if one["seconds"] <= 0 or other["seconds"] <= other["spread"]:
        return "-"
    return f"{one['seconds'] / other['seconds']:.2f}"


def _or_nothing(value: float | None, form: str = "{}", unit: float = 1) -> str:
    return "" if value is None else form.format(value / unit if unit != 1 else value)


def _short(name: str) -> str:
    return name.replace("num_packs=", "")


def _code(name: str) -> str:
    return name if name in (FASTEST, FLOOR) else f"`{_short(name)}`"


def bench(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs `tfcdo bench`.

    Args:
      arguments: its options.

    Returns:
      What it wrote with `--json`.

    Raises:
      subprocess.CalledProcessError: if it fails, as it does if a result of tfcdo's is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results.json")
        subprocess.run(
            [sys.executable, "-m", "tfcdo.cli.main", "bench", "--json", path, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(path.read_text(encoding="utf-8"))


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


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), extra=sys.argv[2:])
