"""`tfcdo launch`: starts the workers of a training job, and ends them together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

import click
from rich.console import Console
from rich.text import Text

from tfcdo.cli import options
from tfcdo.cluster import config, worker
from tfcdo.launch import places, supervisor

# On a machine, or in a worker; a mistyped number must not start more.
_MOST_WORKERS = _MOST_DEVICES = 256
_MOST_GPUS = 64
_LONGEST_GRACE = 86_400  # A day.
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_GROUPS = {
    "Workers": ("workers", "hosts", "index", "nnodes", "slurm"),
    "Devices": ("devices_per_worker", "gpus_per_worker"),
    "Failures": ("max_restarts", "grace"),
}


class _Command(click.Command):
    """Has the options of its help in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options in their groups."""
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx))
        }
        groups = {group: [records.pop(name) for name in names] for group, names in _GROUPS.items()}
        for group, rows in {**groups, "Other": [*records.values()]}.items():
            with formatter.section(group):
                formatter.write_dl(rows)


def _parse_workers(text: str) -> int:
    """Reads a number of workers."""
    if ":" in text:
        raise ValueError(
            f"a job has a fixed number of workers; got {text!r}: for workers that come and go use "
            "Ray Train, see docs/ray.md"
        )
    return int(options.number(1, _MOST_WORKERS)(text))


@click.command(
    cls=_Command,
    # Later arguments go to the script, even if they look like options.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    short_help="Run a script in several workers.",
)
@options.option(
    "--workers --nproc-per-node --nproc_per_node",
    options.parsed("workers", _parse_workers),
    "Number of workers on this machine.",
    metavar="N",
)
@options.option(
    "--hosts",
    options.parsed("hosts", places.parse_hosts),
    "Addresses of all machines, where their first workers listen.",
    metavar="A:PORT,...",
)
@options.option(
    "--index --node-rank --node_rank",
    options.number(0, metavar="I"),
    "Number of this machine in --hosts, from 0.",
)
@options.option("--nnodes", options.number(1), "Number of --hosts, as a check.")
@options.option("--slurm", bool, "Take the workers from Slurm's variables.", is_flag=True)
@options.option(
    "-g --devices-per-worker",
    options.number(1, _MOST_DEVICES),
    "Number of devices per worker; default: its GPUs, or one CPU.",
)
@options.option(
    "--gpus-per-worker",
    options.number(1, _MOST_GPUS),
    "Number of GPUs per worker; default: an equal share.",
)
@options.option("--max-restarts", options.number(0), "Number of restarts.", 0)
@options.option(
    "--grace",
    options.number(0, _LONGEST_GRACE, float, "SECONDS"),
    "Time from SIGTERM to SIGKILL for workers that must end.",
    10.0,
)
@options.option("-m --module", bool, "SCRIPT is a module's name, as in python -m.", is_flag=True)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def launch(
    workers: int | None,
    hosts: tuple[str, ...] | None,
    index: int | None,
    nnodes: int | None,
    slurm: bool,
    devices_per_worker: int | None,
    gpus_per_worker: int | None,
    max_restarts: int,
    grace: float,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a training script in several workers.

    \b
    Examples:
      Three workers with two devices each, on this machine:
        tfcdo launch --workers 3 --devices-per-worker 2 train.py --epochs 5
      Start all again after a failure, at most three times:
        tfcdo launch --workers 2 --max-restarts 3 train.py
      Two machines, one worker each: the first line on a, the second on b:
        tfcdo launch --hosts a:2222,b:2222 --index 0 train.py
        tfcdo launch --hosts a:2222,b:2222 --index 1 train.py
      Slurm: each task of srun is a worker:
        srun tfcdo launch --slurm train.py
      A module instead of a script:
        tfcdo launch --workers 2 -m my_project.train

    Each worker runs SCRIPT with this Python.

    TF_CONFIG gives it all addresses and its own index. Its name is in front of each line of its
    output. When a worker fails, the others are ended, and the exit status of the first failure is
    returned. SIGINT (Ctrl-C), SIGTERM and SIGHUP are passed on and end the job; SIGUSR1 and SIGUSR2
    are only passed on. No process that a worker started is left, even when the launcher is killed.
    After a restart, the script continues from its own checkpoint; TFCDO_RESTART_COUNT has the
    number of restarts. torchrun's names --nproc-per-node, --nnodes and --node-rank are accepted.

    Workers of one machine share its GPUs equally: --gpus-per-worker is for another division. On
    CPUs, or to leave GPUs of a worker out, --devices-per-worker sets the number of its devices.
    """  # noqa: D301 (click leaves lines after this character as they are)
    place = _place(workers, hosts, index, nnodes, slurm)
    # All workers of this machine share its GPUs, unless Slurm has bound some to each.
    sharing = 1 if slurm and places.are_gpus_bound_by_slurm(os.environ) else place.here
    gpus = _gpus(gpus_per_worker, sharing) * (place.here // sharing)
    if not module and not (script and pathlib.Path(script).exists()):
        raise click.UsageError(f"{script!r}: there is no such script (-m runs a module)")
    # The errors of the workers' TensorFlow are enough, unless the user wants more.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    variables = {worker.DEVICES_PER_WORKER: str(devices_per_worker)} if devices_per_worker else {}
    job = supervisor.Job(
        command=(sys.executable, *(["-m"] if module else []), script, *arguments),
        workers=functools.partial(_workers, place, variables, gpus),
        max_restarts=max_restarts,
        grace_seconds=grace,
    )
    return supervisor.run(job)


def _place(
    workers: int | None,
    hosts: tuple[str, ...] | None,
    index: int | None,
    nnodes: int | None,
    slurm: bool,
) -> places.Place:
    """Returns this machine's workers among all machines'; those of one get their ports later."""
    here, count = workers or 1, len(hosts or [1])
    several = hosts or nnodes or index is not None
    options.refuse(
        (
            slurm and (workers or several),
            "give --slurm without --workers, --hosts, --index and --nnodes, which Slurm tells",
        ),
        (
            not (slurm or workers or hosts),
            "give before SCRIPT either --workers N, to start all workers on this machine, "
            "--hosts A:PORT,B:PORT --index I, to start machine I's workers of several machines, or "
            "--slurm",
        ),
        (
            nnodes not in (None, 1) and not hosts,
            f"--nnodes {nnodes} needs --hosts: the addresses of all machines",
        ),
        (
            nnodes not in (None, count),
            f"--nnodes must be the number of --hosts, {count}; got {nnodes}",
        ),
        (index is not None and not hosts, "--index needs --hosts: --workers starts all workers"),
        (
            hosts and index is None,
            f"--hosts needs --index: which of the {count} this machine is, from 0",
        ),
        (
            index is not None and index >= count,
            f"--index must be less than the number of hosts, {count}; got {index}",
        ),
    )
    if slurm:
        with options.reported(click.UsageError, ValueError, about="--slurm: "):
            return places.in_slurm(os.environ)
    if hosts is None or index is None:
        return places.Place((), range(here), 0, here)
    # The ports of a host's workers begin with its own.
    split = [address.rpartition(":")[::2] for address in hosts]
    addresses = ",".join(f"{name}:{int(port) + w}" for name, port in split for w in range(here))
    with options.reported(click.UsageError, ValueError, about=f"--hosts with --workers {here}: "):
        own = range(index * here, (index + 1) * here)
        return places.Place(places.parse_hosts(addresses), own, 0, here)


@contextlib.contextmanager
def _workers(
    place: places.Place, variables: Mapping[str, str], gpus: Sequence[str]
) -> Iterator[Sequence[supervisor.WorkerSpec]]:
    """Gives the workers of one run; on one machine, with free ports and a token of their own."""
    with contextlib.ExitStack() as stack:
        addresses = place.addresses
        if not addresses:
            addresses = stack.enter_context(config.reserved_ports(place.here))
            # It keeps out workers that an earlier run has left.
            token = worker.cluster_token() or secrets.token_hex(16)
            variables = {**variables, worker.CLUSTER_TOKEN: token}
        width = len(f"worker {len(addresses) - 1}")
        specs = []
        for turn, number in enumerate(place.own):
            name = f"worker {number}"
            prefix = f"{name:{width}} | "
            shown, shown_errors = (_coloured(prefix, number, s) for s in (sys.stdout, sys.stderr))
            own = {"TF_CONFIG": config.tf_config(addresses, number), **variables}
            if gpus:
                own["CUDA_VISIBLE_DEVICES"] = gpus[place.first_here + turn]
            specs.append(supervisor.WorkerSpec(name, shown, shown_errors, own))
        yield specs


def _gpus(each: int | None, workers: int) -> list[str]:
    """Returns CUDA_VISIBLE_DEVICES of each worker of this machine; [] to leave it as it is."""
    if each is None and workers == 1:
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        from tfcdo.topology import detection

        names = [str(number) for number in range(len(detection.gpus_of_nvidia_smi()))]
    else:
        # As for CUDA, the first entry that is not a GPU, such as Slurm's NoDevFiles, ends the list.
        is_gpu = re.compile(r"\d+|(GPU|MIG)-.+").fullmatch
        names = [*itertools.takewhile(is_gpu, map(str.strip, given.split(",")))]
    if each is None:
        if not names:
            return []
        each = len(names) // workers or 1
        if len(names) > each * workers:
            supervisor.report(f"{workers} workers use {each * workers} of {len(names)} GPUs")
    if len(names) < each * workers:
        source = "nvidia-smi shows" if given is None else "CUDA_VISIBLE_DEVICES names"
        raise click.UsageError(
            f"{workers} workers on this machine with {each} GPU{'s' * (each > 1)} each need "
            f"{each * workers} GPUs; {source} {len(names)} (CUDA_VISIBLE_DEVICES=-1 trains on CPUs)"
        )
    return [",".join(names[each * number :][:each]) for number in range(workers)]


def _coloured(prefix: str, index: int, stream: TextIO) -> bytes:
    """Returns a worker's prefix, in its colour where the stream is a terminal that has colours."""
    console = Console(file=stream)
    with console.capture() as captured:
        console.print(Text(prefix, _COLOURS[index % len(_COLOURS)]), end="")
    return captured.get().encode("ascii")
