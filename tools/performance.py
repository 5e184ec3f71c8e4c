"""Measures the table of docs/performance.md and its picture.

    python tools/performance.py docs/performance.md

Each row is a run of `tfcdo bench` in a process of its own. All of them take half an hour on two
cores, and want the machine for themselves.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pages
from matplotlib.figure import Figure

AUTO, DEFAULT = "tfcdo.AutoAllReduce", "tf.CollectiveAllReduce"
HOSTS, ALONE = "tfcdo.MultiWorkerMirroredStrategy", "computing alone"
# The arguments of `tfcdo bench`.
CASES = (
    "--model resnet50 -g 4",
    "--model resnet50 -g 8",
    "--model bert-base -g 4",
    "--model mobilenet -g 4",
    "--model tiny-matrices -g 8",
    "workers 2 -g 1 --rate 1gbit",
    "workers 2 -g 2 --rate 1gbit",
)
# Elements that the floor adds at once. The memory of much larger tensors would be requested from
# the system again in each step.
_CHUNK = 2**20

# A file that `tfcdo bench --json` writes, and one of its measurements.
Run = Mapping[str, Any]
Result = Mapping[str, Any]


def bench(arguments: Sequence[str]) -> Run:
    """Runs `tfcdo bench` in a process of its own; raises if one of tfcdo's results is wrong."""
    command = [sys.executable, "-m", "tfcdo.cli.main", "bench", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results.json")
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text(encoding="utf-8"))


def floor_seconds(num_devices: int, size: int) -> float:
    """Returns the time of one fused pass over the bytes of all devices, the faster of two ways."""
    import tensorflow as tf

    counts = [_CHUNK] * (size // 4 // _CHUNK) + [size // 4 % _CHUNK]
    chunks = [[tf.Variable(tf.ones([n])) for _ in range(num_devices)] for n in counts if n]

    def add_n() -> list[tf.Tensor]:
        return [tf.add_n([one.read_value() for one in values]) for values in chunks]

    def seconds(function: Callable[[], Any], **options: Any) -> float:
        call = tf.function(function, autograph=False, **options)
        call()
        return statistics.median(timeit.repeat(call, repeat=20, number=1))

    passes = seconds(add_n), seconds(add_n, jit_compile=True)
    return min(passes) - seconds(lambda: tf.constant(0.0))


def fastest(results: Sequence[Result], kind: str) -> Result | None:
    """Returns the fastest correct result of a kind; None without one."""
    correct = [one for one in results if one["kind"] == kind and not one["wrong"]]
    return min(correct, key=lambda one: one["seconds"], default=None)


def row(case: str, run: Run, floor: Callable[[int, int], float]) -> str:
    """Makes a row of the table, in Markdown, in milliseconds."""
    named = {one["name"]: one for one in run["results"]}
    ours = named[AUTO if AUTO in named else HOSTS]
    compared = (ours, fastest(run["results"], "tf"), named.get(DEFAULT), named.get(ALONE))
    times = [one["seconds"] if one else None for one in compared]
    if ALONE not in named:
        times[-1] = floor(ours["num_devices"], ours["size"])
    cells = ["" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in times]
    return f"| `{case}` | {' | '.join(cells)} |"


def heading(run: Run) -> list[str]:
    """Makes the lines above the rows."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    machine = run["machine"]
    return [
        f"Virtual CPU devices of {machine['processor']} with {machine['cores']} cores, {versions}, "
        f"{run['date'][:10]}. Milliseconds.",
        "",
        "| `tfcdo bench` | tfcdo | TensorFlow's fastest | TensorFlow's default | floor |",
        "|---|---:|---:|---:|---:|",
    ]


def draw(results: Sequence[Result]) -> Figure:
    """Draws busbw over size, a line for each implementation; none where a time is below noise."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for kind, style in {"tfcdo": "-o", "tf": "--s"}.items():
        for name in dict.fromkeys(one["name"] for one in results if one["kind"] == kind):
            line = [one for one in results if one["name"] == name]
            speeds = [one["busbw"] / 1e9 if one["busbw"] else math.nan for one in line]
            axes.plot([one["size"] for one in line], speeds, style, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes on each device", ylabel="busbw, GB/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def main(path: pathlib.Path) -> None:
    """Measures and changes the page; the picture goes next to it."""
    lines: list[str] = []
    for case in pages.with_progress(CASES):
        run = bench(case.split())
        lines = [*(lines or heading(run)), row(case, run, floor_seconds)]
        print(lines[-1], flush=True)
    draw(bench(["-g", "4"])["results"]).savefig(path.with_suffix(".png"), dpi=120)
    pages.replace_table(path, "performance.py", lines)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
