"""Writes docs/performance.md: tables, targets and profiles as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from performance_targets import FASTEST
from performance_targets import FLOOR
from performance_targets import MAX_TRIES
from performance_targets import TARGETS
from performance_targets import UNDISTURBED
from performance_targets import Case
from performance_targets import Outcome
from performance_targets import Result
from performance_targets import outcome
from performance_targets import reference


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
    floor, fastest = reference(results, FLOOR), reference(results, FASTEST)
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
