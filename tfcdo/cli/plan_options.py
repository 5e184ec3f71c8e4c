"""The options of `tfcdo plan`, in the order of its help, and which of them go together."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import click

from tfcdo.bench import workloads
from tfcdo.cli import options
from tfcdo.cli.here import Here
from tfcdo.cli.machine_types import Devices, Machine
from tfcdo.plan import algorithms
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.topology import Topology

_MAX_HOSTS = 1024
# More packs take more time to simulate than anyone waits.
_MAX_PACKS = 4096

_OPTIONS = (
    click.option(
        "-t",
        "--topology",
        type=Machine(),
        metavar="NAME|FILE",
        help=f"The machine: {', '.join(PRESETS)} (those of any size also with a number of "
        "devices, as in nvswitch:16); here, or here:8 for so many devices, to measure this "
        "machine; or a file, either JSON as Topology.to_json writes it or what "
        "`nvidia-smi topo -m` printed; - for standard input.",
    ),
    click.option(
        "-b",
        "--bytes",
        "num_bytes",
        type=options.Size(),
        default="100MB",
        show_default=True,
        help="The bytes that each device holds; K, M and G are powers of 1024, KB, MB and GB of "
        "1000.",
    ),
    click.option(
        "--devices", type=Devices(), metavar="0,1,...", help="Only these devices of the machine."
    ),
    click.option(
        "-a",
        "--algorithm",
        type=click.Choice(algorithms.ALGORITHMS),
        default="auto",
        show_default=True,
        help="The algorithm whose row stands out, and that is drawn or printed.",
    ),
    click.option(
        "--num-packs",
        type=click.IntRange(1, _MAX_PACKS),
        help="Cut the data into so many packs of one size; by default as each algorithm asks for. "
        "TensorFlow's classes have 1 by default.",
    ),
    click.option(
        "--save",
        "saved_file",
        type=options.NewFile(".json"),
        help="Write the highlighted algorithm's plan to this file, for "
        "tfcdo.AutoAllReduce(plan=...).",
    ),
    click.option(
        "--draw",
        "trees_file",
        type=options.NewFile(".png", ".svg"),
        help="Draw the machine and the copy trees: .png or .svg",
    ),
    click.option(
        "--gantt",
        "gantt_file",
        type=options.NewFile(".png", ".svg"),
        help="Draw the transfers over time: .png or .svg",
    ),
    click.option(
        "--hosts",
        "num_hosts",
        type=click.IntRange(1, _MAX_HOSTS),
        help="Number of hosts, all like this machine.",
    ),
    click.option(
        "--network",
        type=options.Bandwidth(),
        default="12.5G",
        show_default=True,
        help="What each host can send to the others, in bytes per second (K, M and G are powers of "
        "1000, as vendors count), or as 100gbit.",
    ),
    click.option(
        "--model",
        type=click.Choice(workloads.model_names()),
        metavar="NAME",
        help="The gradients of this model instead of --bytes: resnet50, bert-base, mobilenet, tiny "
        "or tiny-matrices.",
    ),
    click.option(
        "--wire",
        type=options.WIRE_DTYPES,
        help="The bytes are of float32 and travel as this: half of them, added in 32 bits.",
    ),
    click.option(
        "--wire-between",
        type=options.BETWEEN_DTYPES,
        help="With --hosts: the bytes are of float32 and are sent between hosts as this: half of "
        "them, or a quarter.",
    ),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print the plan, as --save writes it, not the table.",
    ),
    click.option(
        "--measure",
        "measures",
        is_flag=True,
        help="With -t here: measure this machine again, even if that was done before.",
    ),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line: each option by the name of its parameter.

    Attributes:
      given: the options that the command line has, such as --bytes, by their parameters.
    """

    topology: Topology | Here | None
    num_bytes: int
    devices: tuple[int, ...] | None
    algorithm: str
    num_packs: int | None
    saved_file: pathlib.Path | None
    trees_file: pathlib.Path | None
    gantt_file: pathlib.Path | None
    num_hosts: int | None
    network: float
    model: str | None
    wire: str | None
    wire_between: str | None
    as_json: bool
    measures: bool
    given: Mapping[str, str]

    @property
    def gradients(self) -> workloads.Workload | None:
        """Returns the model's gradients; None without a model."""
        return workloads.gradients_of(self.model) if self.model else None

    @property
    def size(self) -> int:
        """Returns the bytes that each device holds."""
        return self.gradients.size if self.gradients else self.num_bytes

    def check(self) -> None:
        """Refuses options that do not go together, before a machine is measured or planned for.

        Raises:
          click.UsageError: if there are any.
          ModuleNotFoundError: if they need matplotlib, and it is not installed.
        """
        drawn = [path.resolve() for path in (self.trees_file, self.gantt_file) if path]
        if self.topology is None:
            raise click.UsageError(
                "Missing option '-t' / '--topology': the machine to plan for, such as dgx1, or "
                "here for this one"
            )
        if len(set(drawn)) < len(drawn):
            raise click.UsageError(
                f"--draw and --gantt need different files; both are {self.gantt_file}"
            )
        if drawn:
            options.require_matplotlib()
        if self.measures and not isinstance(self.topology, Here):
            raise click.UsageError("--measure measures this machine: it needs -t here")
        if self.model and "num_bytes" in self.given:
            raise click.UsageError("--model has bytes of its own: leave --bytes out")
        if "network" in self.given and not self.num_hosts:
            raise click.UsageError("--network is between hosts: it needs --hosts")
        if self.num_hosts:
            if drawn:
                raise click.UsageError("--draw and --gantt draw one host: leave --hosts out")
            if self.num_packs or self.saved_file:
                raise click.UsageError("--num-packs and --save are for one host: leave --hosts out")
            if self.as_json:
                raise click.UsageError("--json prints the plan of one host: leave --hosts out")
            if self.wire:
                raise click.UsageError("--wire is of the copies inside a host: leave --hosts out")
        elif self.wire_between:
            raise click.UsageError("--wire-between needs --hosts")


add_to = options.as_one_value(Options, _OPTIONS)
