"""Measures the first table of docs/performance.md and its picture: `make bench`.

Each row is a run of `tfcdo bench` in a process of its own. All of them take half an hour on two
cores, and want the machine for themselves.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pages
import tensorflow as tf
from matplotlib.figure import Figure

from tfcdo.bench import results
from tfcdo.bench.results import ALONE, Measurement

AUTO, DEFAULT = "tfcdo.AutoAllReduce", "tf.CollectiveAllReduce"
HOSTS = "tfcdo.MultiWorkerMirroredStrategy"
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


def bench(arguments: Sequence[str]) -> tuple[dict[str, Any], list[Measurement]]:
    """Runs `tfcdo bench` in a process of its own; raises if one of tfcdo's results is wrong."""
    command = [sys.executable, "-m", "tfcdo", "bench", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results.json")
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        run = msgspec.json.decode(path.read_bytes())
    return run, msgspec.convert(run["results"], list[Measurement])


def floor_seconds(num_devices: int, size: int) -> float:
    """Returns the time of one fused pass over the bytes of all devices, the faster of two ways."""
    counts = [_CHUNK] * (size // 4 // _CHUNK) + [size // 4 % _CHUNK]
    chunks = [[tf.Variable(tf.ones([n])) for _ in range(num_devices)] for n in counts if n]

    def add_n() -> list[tf.Tensor]:
        return [tf.add_n([one.read_value() for one in values]) for values in chunks]

    def seconds(function: Callable[[], Any], **options: Any) -> float:
        call = tf.function(function, autograph=False, **options)
        call()
        return statistics.median(timeit.repeat(call, repeat=20, number=1))

    passes = seconds(add_n), seconds(add_n, jit_compile=True)
    return max(0.0, min(passes) - seconds(lambda: tf.constant(0.0)))


def row(case: str, measured: Sequence[Measurement]) -> list[str]:
    """Makes the cells of a row, in milliseconds."""
    named = {one.name: one for one in measured}
    ours = named[AUTO if AUTO in named else HOSTS]
    compared = (ours, results.fastest(measured, "tf"), named.get(DEFAULT))
    floor = named[ALONE].seconds if ALONE in named else floor_seconds(ours.num_devices, ours.size)
    times = [f"{one.seconds * 1e3:.1f}" if one else "" for one in compared]
    return [f"`{case}`", *times, f"{floor * 1e3:.1f}"]


def draw(measured: Sequence[Measurement]) -> Figure:
    """Draws busbw over size, a line for each implementation; none where a time is below noise."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for kind, style in {"tfcdo": "-o", "tf": "--s"}.items():
        for name in dict.fromkeys(one.name for one in measured if one.kind == kind):
            line = [(one.size, one.busbw / 1e9) for one in measured if one.name == name]
            axes.plot(*zip(*line), style, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes on each device", ylabel="busbw, GB/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def lines() -> Iterator[str]:
    """Measures, and makes the lines of the page."""
    run, sweep = bench(["-g", "4"])
    draw(sweep).savefig(pages.ROOT / "docs" / "performance.png", dpi=120)
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    machine = f"{run['machine']['processor']} with {run['machine']['cores']} cores"
    yield f"Virtual CPU devices of {machine}, {versions}, {run['date'][:10]}. Milliseconds."
    yield ""
    heading = "`tfcdo bench` | tfcdo | TensorFlow's fastest | TensorFlow's default | floor"
    rows = (row(case, bench(case.split())[1]) for case in pages.with_progress(CASES))
    yield from pages.table(heading, rows, numbers=4)


if __name__ == "__main__":
    pages.replace("docs/performance.md", "performance.py", lines())
