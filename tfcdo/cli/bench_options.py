"""The options of `tfcdo bench`, in the order of its help, and which of them go together."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import click

from tfcdo.bench import link
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
        help="Train a real Keras model (--model mobilenet, the default, or resnet50) and time its "
        "steps instead.",
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


_SWEEP = ("minbytes", "maxbytes", "stepfactor")
# Of all-reduces of values that are measured by themselves.
_PLAIN = ("datatype", "eager", "plot_file", "timeout")
# What chooses what is measured, and the options that have no effect then. If several of these are
# given, the first one counts.
_WITHOUT_EFFECT = {
    "num_workers": (
        "--workers, which trains one model under two strategies",
        (*_SWEEP, *_PLAIN, "models", "names", "fit", "wire", "earlier", "sparse_rows"),
    ),
    "fit": (
        "--fit, which only times the steps of a model in training",
        (*_SWEEP, *_PLAIN, "warmup", "sparse_rows"),
    ),
    "sparse_rows": (
        "--sparse, which reduces rows of a table of its own",
        (*_SWEEP, *_PLAIN, "models", "wire", "earlier"),
    ),
    "models": ("--model, as a model's gradients have sizes of their own", _SWEEP),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line: each option by the name of its parameter.

    Attributes:
      given: the options that the command line has, such as --minbytes, by their parameters.
    """

    minbytes: int
    maxbytes: int
    stepfactor: int
    num_devices: int
    iterations: int
    warmup: int
    datatype: str
    models: Sequence[str]
    names: Sequence[str]
    wire: str | None
    eager: bool
    fit: bool
    sparse_rows: int | None
    repeat: float | None
    num_workers: int | None
    rate: link.Rate | None
    json_file: pathlib.Path | None
    earlier: bench_compare.Earlier | None
    timeout: float | None
    plot_file: pathlib.Path | None
    given: Mapping[str, str]

    @property
    def dtype(self) -> str:
        """Returns the datatype as TensorFlow calls it."""
        return workloads.DTYPES[self.datatype]

    @property
    def sizes(self) -> list[int]:
        """Returns the sizes of one value, in bytes."""
        return list(workloads.sizes(self.minbytes, self.maxbytes, self.stepfactor))

    @property
    def measured(self) -> list[workloads.Workload]:
        """Returns what is all-reduced."""
        found = [workloads.gradients_of(name, self.dtype) for name in self.models] or [
            workloads.one_value(size, self.dtype) for size in self.sizes
        ]
        # Sizes below that of one element are all rounded up to it: each is measured once.
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """Refuses options that do not go together; does not wait for TensorFlow to start.

        Raises:
          click.UsageError: if there are any.
          ModuleNotFoundError: if they need matplotlib, and it is not installed.
        """
        in_one_process = not self.num_workers
        if in_one_process and self.rate:
            raise click.UsageError("--rate limits the link between --workers, which are not given")
        if in_one_process and self.num_devices < 2:
            raise click.UsageError(
                f"--devices must be at least 2 without --workers; got {self.num_devices}"
            )
        self._check_effects()
        untrained = [name for name in self.models if name not in workloads.KERAS_MODELS]
        if self.fit and untrained:
            known = " or ".join(workloads.KERAS_MODELS)
            raise click.UsageError(f"--fit can train --model {known}, not {untrained[0]}")
        if self.repeat is not None and not self.sparse_rows:
            raise click.UsageError("--repeat is about the rows of --sparse, which is not given")
        if self.minbytes > self.maxbytes:
            raise click.UsageError(
                "--minbytes must be at most --maxbytes; "
                f"got {self.minbytes} and {self.maxbytes} bytes"
            )
        if self.plot_file:
            options.require_matplotlib()
        if self.wire and self.dtype not in ("float32", "float64"):
            raise click.UsageError(f"--wire casts float and double; --datatype is {self.datatype}")

    def _check_effects(self) -> None:
        """Refuses options that would have no effect beside another one."""
        mode = next((parameter for parameter in _WITHOUT_EFFECT if getattr(self, parameter)), None)
        if mode:
            beside, parameters = _WITHOUT_EFFECT[mode]
            found = [option for parameter, option in self.given.items() if parameter in parameters]
            if found:
                raise click.UsageError(f"{' and '.join(found)} cannot be given beside {beside}")


add_to = options.as_one_value(Options, _OPTIONS)
