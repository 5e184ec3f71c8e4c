"""Measures what docs/performance.md shows, and writes it with its picture.

    python tools/performance.py docs/performance.md

Each case is a run of `tfcdo bench` in a process of its own, repeated if others made use of the
machine meanwhile. All of them take half an hour on two cores, and want the machine for themselves.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfcdo.bench.rows import ALONE, MOMENTUM, SGD

AUTO, FASTEST, FLOOR = "tfcdo.AutoAllReduce", "the fastest TensorFlow class", "the floor"
HIERARCHICAL, ONE_DEVICE = "HierarchicalCopyAllReduce", "ReductionToOneDevice"
TF_HIERARCHICAL = f"tf.{HIERARCHICAL}(num_packs=1)"
HOSTS, HOSTS_CAST = "tfcdo.MultiWorkerMirroredStrategy", "the same, wire_between='bfloat16'"
# A run is repeated if half of its implementations spread more than this part of their times,
UNDISTURBED = 0.1
# until there are so many, of which the least disturbed counts.
MAX_TRIES = 3
# Measured once, by hand: the section at the end of the page.
_XLA = pathlib.Path(__file__).with_name("performance_xla.md")
# Other kinds of measurements, besides the fastest floor, that bound an all-reduce of the same run.
_LIMITS = ("packing", ALONE, "computing alone")

# One measurement, and a run, as `tfcdo bench --json` writes them.
Result = Mapping[str, Any]
Run = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
    """The largest wanted ratio of one number of a measurement to that of another of its run.

    Attributes:
      ours: the name of tfcdo's implementation.
      against: the name of the other, or `FASTEST` or `FLOOR`.
      at_most: the ratio to reach.
      quantity: the field of a measurement.
      update: of rows, the update.
    """

    ours: str
    against: str
    at_most: float
    quantity: str = "seconds"
    update: str | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of a run of `tfcdo bench`, and what is wanted of it."""

    arguments: str
    targets: tuple[Target, ...] = ()

    def __str__(self) -> str:
        return f"tfcdo bench {self.arguments}"


def _resnet(count: int, *targets: Target) -> Case:
    classes = (
        Target(f"tfcdo.{HIERARCHICAL}", TF_HIERARCHICAL, 0.35),
        Target(f"tfcdo.{ONE_DEVICE}", f"tf.{ONE_DEVICE}", 0.80),
        Target(AUTO, "tf.CollectiveAllReduce", 0.18),
    )
    return Case(f"--model resnet50 -g {count}", targets + (classes if count > 2 else ()))


def _rows(repeat: float, sgd: float, momentum: float) -> Case:
    return Case(
        f"sparse 4096 --repeat {repeat} -g 4",
        (
            Target(AUTO, FASTEST, sgd, update=SGD),
            Target(AUTO, FASTEST, momentum, update=MOMENTUM),
        ),
    )


CASES = (
    _resnet(2, Target(AUTO, FASTEST, 1.00)),
    _resnet(
        4,
        Target(AUTO, FLOOR, 1.15),
        Target(AUTO, FASTEST, 0.75),
        Target(AUTO, f"tf.{ONE_DEVICE}", 1.10, "peak_memory"),
    ),
    _resnet(
        8,
        Target(AUTO, FLOOR, 1.25),
        Target(AUTO, FASTEST, 0.55),
        Target(AUTO, TF_HIERARCHICAL, 0.10, "nodes"),
        Target(AUTO, TF_HIERARCHICAL, 0.40, "first_call"),
    ),
    Case("--model bert-base -g 4", (Target(AUTO, FASTEST, 0.75),)),
    Case("--model mobilenet -g 4", (Target(AUTO, FASTEST, 0.65),)),
    Case("--model tiny -g 4", (Target(AUTO, FASTEST, 0.50),)),
    Case("--model tiny -g 8", (Target(AUTO, FASTEST, 0.50),)),
    Case("--model tiny-matrices -g 4", (Target(AUTO, FASTEST, 0.75),)),
    Case("--model tiny-matrices -g 8", (Target(AUTO, FASTEST, 0.75),)),
    Case("--model tiny -g 4 --eager", (Target(AUTO, FASTEST, 0.60),)),
    Case("workers 2 -g 1 --rate 1gbit", (Target(HOSTS, FASTEST, 0.85),)),
    Case(
        "workers 2 -g 2 --rate 1gbit",
        (
            Target(HOSTS, FASTEST, 0.70),
            Target(HOSTS, FASTEST, 0.67, "bytes_sent"),
            Target(HOSTS_CAST, FASTEST, 0.50),
            Target(HOSTS_CAST, FASTEST, 0.34, "bytes_sent"),
        ),
    ),
    Case("workers 2 -g 2", (Target(HOSTS, FASTEST, 0.90),)),
    Case("workers 2 -g 4 --rate 1gbit", (Target(HOSTS, FASTEST, 0.58, "bytes_sent"),)),
    _rows(0.0, 1.05, 1.05),
    _rows(0.5, 1.05, 0.80),
    _rows(0.9, 1.05, 0.60),
)

_NAMES_OF_QUANTITIES = {
    "seconds": "time",
    "nodes": "graph nodes",
    "first_call": "first call",
    "peak_memory": "peak memory",
    "bytes_sent": "bytes between hosts",
}
# Columns of a table, left out where no measurement of a run has the field.
_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "update": ("update", str),
    "seconds": ("ms", lambda seconds: f"{seconds * 1e3:.2f}"),
    "spread": ("±", lambda seconds: f"{seconds * 1e3:.2f}"),
    "cpu_seconds": ("CPU ms", lambda seconds: f"{seconds * 1e3:.2f}"),
    "bytes_sent": ("sent MB", lambda sent: f"{sent / 1e6:.1f}"),
    "wrong": ("#wrong", str),
    "nodes": ("nodes", str),
    "first_call": ("first call s", lambda seconds: f"{seconds:.2f}"),
    "peak_memory": ("peak MB", lambda size: f"{size / 1e6:.1f}"),
}


def bench(arguments: Sequence[str]) -> Run:
    """Runs `tfcdo bench` in a process of its own; raises if one of tfcdo's results is wrong."""
    command = [sys.executable, "-m", "tfcdo.cli.main", "bench", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results.json")
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text(encoding="utf-8"))


def disturbance(results: Sequence[Result]) -> float:
    """Returns the median, over implementations, of the part of its time that each spreads."""
    return statistics.median(
        one["spread"] / abs(one["seconds"]) if one["seconds"] else math.inf
        for one in results
        if one["kind"].startswith("tf")
    )


def bench_undisturbed(arguments: Sequence[str], max_tries: int) -> Run:
    """Runs `tfcdo bench` until nobody else uses the machine; returns the least disturbed run."""
    runs = [bench(arguments)]
    while disturbance(runs[-1]["results"]) > UNDISTURBED and len(runs) < max_tries:
        runs.append(bench(arguments))
    return min(runs, key=lambda run: disturbance(run["results"]))


def outcome(target: Target, run: Run) -> tuple[float, float | None]:
    """Returns the ratio, NaN if the times are lost in noise, and its limit on this machine."""
    results = [one for one in run["results"] if one.get("update") == target.update]
    ours = _named(results, target.ours)
    other = _reference(results, target.against)
    ratio = ours[target.quantity] / other[target.quantity]
    if target.quantity != "seconds":
        return ratio, None
    lost = ratio <= 0 or other["seconds"] <= other["spread"]
    least = [one["seconds"] for one in results if one["kind"] in _LIMITS]
    if any(one["kind"] == "floor" for one in results):
        least.append(_reference(results, FLOOR)["seconds"])
    return math.nan if lost else ratio, max(least) / other["seconds"] if least else None


def _named(results: Sequence[Result], name: str) -> Result:
    (found,) = [one for one in results if one["name"] == name]
    return found


def _reference(results: Sequence[Result], name: str) -> Result:
    if name not in (FASTEST, FLOOR):
        return _named(results, name)
    kind = "tf" if name == FASTEST else "floor"
    right = [one for one in results if one["kind"] == kind and not one["wrong"]]
    return min(right, key=lambda one: one["seconds"])


def page(runs: Mapping[Case, Run], picture: str) -> str:
    """Writes the page, in Markdown."""
    first = next(iter(runs.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    machine = first["machine"]
    lines = [
        "# Performance",
        "",
        "Made by `make bench`; do not edit. Measured on virtual CPU devices of "
        f"{machine['processor']} with {machine['cores']} cores ({machine['system']}), {versions}, "
        f"on {first['date'][:10]}.",
        "",
        "All implementations of one table took turns in one process. Times are medians; ± is the "
        "distance between the quartiles. The time of the same graph without the all-reduce is "
        "subtracted. *Floor*: one fused pass over the same bytes at one place. *Pack and unpack*: "
        "the ops that pack the small values and unpack them, with nothing added or sent. "
        f"A run in which half of the implementations spread over more than {UNDISTURBED:.0%} of "
        f"their times was repeated, at most {MAX_TRIES - 1} times.",
        "",
        "## Targets",
        "",
        "*Limit*: the ratio of the floor, of packing, or of a step without all-reduce. A target "
        "below it cannot be met on this machine.",
        "",
        "| work | quantity | of | against | at most | measured | limit | |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for case, run in runs.items():
        lines += [_target_row(case, target, run) for target in case.targets]
    lines += ["", "## Over sizes", "", f"![busbw over size, 4 virtual CPU devices]({picture})", ""]
    for case, run in runs.items():
        lines += [f"## `{case}`", "", *_table(run["results"]), ""]
    return "\n".join([*lines, _XLA.read_text(encoding="utf-8")])


def _target_row(case: Case, target: Target, run: Run) -> str:
    ratio, limit = outcome(target, run)
    work = f"`{case.arguments}`" + (f", {target.update}" if target.update else "")
    if math.isnan(ratio):
        verdict = "not measured: lost in the spread"
    elif ratio <= target.at_most:
        verdict = "met"
    else:
        below = limit is not None and target.at_most < limit
        verdict = "**missed**, below the limit" if below else "**missed**"
    return (
        f"| {work} | {_NAMES_OF_QUANTITIES[target.quantity]} | {target.ours} | {target.against} "
        f"| {target.at_most:.2f} | {'-' if math.isnan(ratio) else f'{ratio:.2f}'} "
        f"| {'' if limit is None else f'{limit:.2f}'} | {verdict} |"
    )


def _table(results: Sequence[Result]) -> list[str]:
    shown = [name for name in _COLUMNS if any(one.get(name) is not None for one in results)]
    headings = ["implementation", *(_COLUMNS[name][0] for name in shown), "of TF"]
    lines = [f"| {' | '.join(headings)} |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    for one in results:
        cells = ["" if one.get(name) is None else _COLUMNS[name][1](one[name]) for name in shown]
        alike = [other for other in results if other.get("update") == one.get("update")]
        lines.append(f"| {' | '.join([one['name'], *cells, _ratio(one, alike)])} |")
    return lines


def _ratio(one: Result, results: Sequence[Result]) -> str:
    """Returns a time as a multiple of TensorFlow's fastest; "-" where either is lost in noise."""
    fastest = _reference(results, FASTEST)
    if one["seconds"] <= 0 or fastest["seconds"] <= fastest["spread"]:
        return "-"
    return f"{one['seconds'] / fastest['seconds']:.2f}"


def main(
    path: pathlib.Path,
    cases: Sequence[Case] = CASES,
    extra: Sequence[str] = (),
    max_tries: int = MAX_TRIES,
) -> None:
    """Measures and writes the page; the picture goes next to it."""
    runs = {}
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases) + 1}: {case}", flush=True)
        runs[case] = bench_undisturbed([*case.arguments.split(), *extra], max_tries)
    print(f"{len(cases) + 1} of {len(cases) + 1}: sizes", flush=True)
    picture = path.with_suffix(".png")
    bench(["-g", "4", "--plot", str(picture), *extra])
    path.write_text(page(runs, picture.name), encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), extra=sys.argv[2:])
