"""The options of `tfcdo bench`, in the order of its help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tfcdo.bench import workloads
from tfcdo.cli import bench_compare
from tfcdo.cli import options
from tfcdo.cli.bench_hosts import RateType

# More would not end in a day.
_MAX_ITERATIONS = 10**6

_OPTIONS = (
    click.option(
        "-b",
        "--minbytes",
        type=options.Size(),
        default="8",
        show_default=True,
        help="Smallest size of the one value that is all-reduced; K, M and G are powers of 1024, "
        "KB, MB and GB of 1000.",
    ),
    click.option(
        "-e",
        "--maxbytes",
        type=options.Size(),
        default="128M",
        show_default=True,
        help="Largest size.",
    ),
    click.option(
        "-f",
        "--stepfactor",
        type=click.IntRange(2),
        default=8,
        show_default=True,
        help="From one size to the next.",
    ),
    click.option(
        "-g",
        "--devices",
        "num_devices",
        type=click.IntRange(1, 16),
        default=4,
        show_default=True,
        help="How many devices: GPUs if there are that many, else virtual CPU devices; with "
        "--workers, virtual CPU devices of each worker.",
    ),
    click.option(
        "-n",
        "--iters",
        "iterations",
        type=click.IntRange(1, _MAX_ITERATIONS),
        default=20,
        show_default=True,
        help="How many samples of each implementation count, taken in turn.",
    ),
    click.option(
        "-w",
        "--warmup",
        type=click.IntRange(0, _MAX_ITERATIONS),
        default=5,
        show_default=True,
        help="How many are taken before.",
    ),
    click.option(
        "-d",
        "--datatype",
        type=click.Choice(list(workloads.DTYPES)),
        default="float",
        show_default=True,
        help="The type of the numbers.",
    ),
    click.option(
        "--model",
        "models",
        type=click.Choice(workloads.model_names()),
        multiple=True,
        metavar="NAME",
        help="All-reduce a model's gradients instead of one value: resnet50, bert-base, mobilenet, "
        "tiny (500 values of 64 numbers) or tiny-matrices (500 of 8 x 8). Can be repeated.",
    ),
    click.option(
        "--ops",
        "names",
        multiple=True,
        metavar="NAME",
        default=("all",),
        show_default=True,
        help="Which implementations: tfcdo, tf or all; or one, as Python writes it, such as "
        "'tf.HierarchicalCopyAllReduce(num_packs=8)'. Can be repeated.",
    ),
    click.option(
        "--wire",
        type=options.WIRE_DTYPES,
        help="Send float and double as this: wire_dtype= of tfcdo's classes. busbw counts the "
        "bytes that travel.",
    ),
    click.option(
        "--eager",
        is_flag=True,
        help="Run op by op instead of in a graph.",
    ),
    click.option(
        "--fit",
        is_flag=True,
        help="Train a real Keras model (--model mobilenet or resnet50) and time its steps instead.",
    ),
    click.option(
        "--sparse",
        "sparse_rows",
        type=click.IntRange(1, 10**6),
        metavar="ROWS",
        help="Reduce so many rows of a table of 1,000,000 x 64 on each device and update the "
        "table, by SGD and with momentum, instead.",
    ),
    click.option(
        "--repeat",
        type=click.FloatRange(0.0, 1.0),
        help="With --sparse: the share of a device's rows that all devices have; 0.5 if not given.",
    ),
    click.option(
        "--predict",
        "predicts",
        is_flag=True,
        help="Measure this machine, then print the simulated and the measured time of every "
        "algorithm side by side; by default from 1M to 256M.",
    ),
    click.option(
        "--workers",
        "num_workers",
        type=click.IntRange(2, 16),
        help="Train a model on so many processes of this host instead, under TensorFlow's and "
        "tfcdo's MultiWorkerMirroredStrategy in turn: step time, and bytes between the processes.",
    ),
    click.option(
        "--rate",
        type=RateType(),
        metavar="1gbit",
        help="Limit the link between the workers, in a network namespace of its own.",
    ),
    click.option(
        "-J",
        "--json",
        "json_file",
        type=options.NewFile(".json"),
        help="Write the results to this file.",
    ),
    click.option(
        "--compare",
        "earlier",
        type=bench_compare.EarlierFile(),
        metavar="OLD.json",
        help="Show the times beside those of an earlier run, which --json wrote.",
    ),
    click.option(
        "-T",
        "--timeout",
        type=click.FloatRange(0.0, min_open=True),
        metavar="SECONDS",
        help="End with status 124 if building an implementation, or a sample of it, takes longer.",
    ),
    click.option(
        "--plot",
        "plot_file",
        type=options.NewFile(".png"),
        help="Draw the results in this file.",
    ),
)


def add_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds all options to the function that becomes the command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
