"""Measures the tables of docs/performance.md and its picture, and says which targets are met.

    python tools/performance.py docs/performance.md

Each case is a run of `tfcdo bench` in a process of its own. All of them take half an hour on two
cores, and want the machine for themselves. The tables replace those between the page's markers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

AUTO, DEFAULT = "tfcdo.AutoAllReduce", "tf.CollectiveAllReduce"
HOSTS, HOSTS_CAST = "tfcdo.MultiWorkerMirroredStrategy", "the same, exchange='bfloat16'"
BEGIN, END = "<!-- made by tools/performance.py: begin -->", "<!-- end -->"

# One measurement, as `tfcdo bench --json` writes it.
Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
    """The largest wanted ratio to TensorFlow's fastest correct class."""

    at_most: float
    ours: str = AUTO
    quantity: str = "seconds"


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of `tfcdo bench`, and the targets of that run."""

    arguments: str
    targets: tuple[Target, ...]


CASES = (
    Case("--model resnet50 -g 4", (Target(0.75),)),
    Case("--model resnet50 -g 8", (Target(0.55),)),
    Case("--model bert-base -g 4", (Target(0.75),)),
    Case("--model mobilenet -g 4", (Target(0.65),)),
    Case("--model tiny-matrices -g 8", (Target(0.75),)),
    Case("workers 2 -g 1 --rate 1gbit", (Target(0.85, HOSTS),)),
    Case(
        "workers 2 -g 2 --rate 1gbit",
        (
            Target(0.70, HOSTS),
            Target(0.67, HOSTS, "bytes_sent"),
            Target(0.50, HOSTS_CAST),
            Target(0.34, HOSTS_CAST, "bytes_sent"),
        ),
    ),
)


def bench(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Runs `tfcdo bench` in a process of its own; raises if one of tfcdo's results is wrong."""
    command = [sys.executable, "-m", "tfcdo.cli.main", "bench", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results.json")
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text(encoding="utf-8"))


def fastest(results: Sequence[Result], kind: str) -> Result | None:
    """Returns the fastest correct result of a kind; None without one."""
    correct = [one for one in results if one["kind"] == kind and not one["wrong"]]
    return min(correct, key=lambda one: one["seconds"], default=None)


def named(results: Sequence[Result], name: str) -> Result | None:
    """Returns the result of one implementation; None without one."""
    return next((one for one in results if one["name"] == name), None)


def ratio(target: Target, results: Sequence[Result]) -> float:
    """Returns the ratio that a target is about; NaN if TensorFlow's time is lost in its spread."""
    ours, theirs = named(results, target.ours), fastest(results, "tf")
    assert ours
    assert theirs
    if min(ours["seconds"], theirs["seconds"] - theirs["spread"]) <= 0:
        return math.nan
    return float(ours[target.quantity] / theirs[target.quantity])


def verdict(target: Target, case: Case, results: Sequence[Result]) -> str:
    """Says whether a target is met."""
    found = ratio(target, results)
    met = "lost in noise" if math.isnan(found) else "met" if found <= target.at_most else "missed"
    return f"{case.arguments}: {target.ours} {target.quantity} {found:.2f} of TensorFlow's, "\
        f"at most {target.at_most:.2f} wanted: {met}"  # fmt: skip


def table(runs: Mapping[Case, Mapping[str, Any]]) -> list[str]:
    """Makes the table, in Markdown: a row for each case, in milliseconds."""
    first = next(iter(runs.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    machine = first["machine"]
    lines = [
        f"Virtual CPU devices of {machine['processor']} with {machine['cores']} cores, {versions}, "
        f"{first['date'][:10]}. Milliseconds.",
        "",
        "| `tfcdo bench` | tfcdo | TensorFlow's fastest | TensorFlow's default | floor |",
        "|---|---:|---:|---:|---:|",
    ]
    for case, run in runs.items():
        results = run["results"]
        compared = (
            named(results, case.targets[0].ours),
            fastest(results, "tf"),
            named(results, DEFAULT),
            fastest(results, "floor") or fastest(results, "computing alone"),
        )
        cells = ["" if one is None else f"{one['seconds'] * 1e3:.1f}" for one in compared]
        lines.append(f"| `{case.arguments}` | {' | '.join(cells)} |")
    return lines


def replace_table(page: str, lines: Sequence[str]) -> str:
    """Returns a page with other lines between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def draw(results: Sequence[Result]) -> Figure:
    """Draws busbw over size, a line for each implementation; none where a time is below noise."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for kind, style in {"tfcdo": "-o", "tf": "--s", "floor": ":"}.items():
        for name in dict.fromkeys(one["name"] for one in results if one["kind"] == kind):
            line = [one for one in results if one["name"] == name]
            speeds = [one["busbw"] / 1e9 if one["busbw"] else math.nan for one in line]
            axes.plot([one["size"] for one in line], speeds, style, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes on each device", ylabel="busbw, GB/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def main(path: pathlib.Path, cases: Sequence[Case] = CASES, extra: Sequence[str] = ()) -> None:
    """Measures and changes the page; the picture goes next to it."""
    page = path.read_text(encoding="utf-8")
    replace_table(page, [])
    runs = {}
    for case in cases:
        runs[case] = bench([*case.arguments.split(), *extra])
        for target in case.targets:
            print(verdict(target, case, runs[case]["results"]), flush=True)
    draw(bench(["-g", "4", *extra])["results"]).savefig(path.with_suffix(".png"), dpi=120)
    path.write_text(replace_table(page, table(runs)), encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), extra=sys.argv[2:])
