"""`tfcdo launch`: starts the workers of a training job, and ends them together."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import click
from rich.console import Console
from rich.text import Text

from tfcdo import environment
from tfcdo.cli import options
from tfcdo.launch import cluster, supervisor

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class HostList(options.ParamType):
    """Addresses of workers, separated by commas."""

    name = "hosts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Reads them."""
        try:
            return cluster.parse_hosts(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    # Later arguments go to the script, even if they look like options.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    *("--workers", "--nproc-per-node", "--nproc_per_node"),
    type=click.IntRange(1, 256),
    help="Number of workers, all on this host.",
)
@click.option(
    "--hosts",
    type=HostList(),
    metavar="A:PORT,...",
    help="Addresses of the workers, one a host.",
)
@click.option(
    "--nnodes", type=click.IntRange(1), help="Number of hosts, to be checked against --hosts."
)
@click.option(
    *("--index", "--node-rank", "--node_rank"),
    type=click.IntRange(0),
    help="Number of this host in --hosts, from 0.",
)
@click.option(
    "-g",
    "--devices-per-worker",
    type=click.IntRange(1, 256),
    metavar="D",
    help="Number of devices of each worker; default: visible GPUs, or one CPU.",
)
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(1, 64),
    metavar="D",
    help="Number of GPUs that each worker sees, the first worker the first.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of restarts of all workers after a failure.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, 86_400),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL for workers that must end.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT as a module's name, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def launch(
    workers: int | None,
    hosts: tuple[str, ...] | None,
    nnodes: int | None,
    index: int | None,
    devices_per_worker: int | None,
    gpus_per_worker: int | None,
    max_restarts: int,
    grace: float,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a training script in several workers.

    Each worker is this Python with SCRIPT and ARGS. It finds in TF_CONFIG where the workers are
    and which it is. Its output has its name in front of each line. When a worker fails, the others
    are ended, and the first failure's exit status is returned. SIGINT (Ctrl-C), SIGTERM and
    SIGHUP are passed on and end the job; SIGUSR1 and SIGUSR2 are only passed on. No process that a
    worker started is left, even when the launcher is killed. After a restart, the script continues
    from its own checkpoint; TFCDO_RESTART_COUNT has the number of restarts. torchrun's names
    --nproc-per-node, --nnodes and --node-rank are accepted.

    \b
    Three workers with two devices each, on this host:
      tfcdo launch --workers 3 --devices-per-worker 2 train.py --epochs 5
    Two hosts: the first line on host a, the second on host b:
      tfcdo launch --hosts a:2222,b:2222 --index 0 train.py
      tfcdo launch --hosts a:2222,b:2222 --index 1 train.py
    A module instead of a script, started again at most three times:
      tfcdo launch --workers 2 --max-restarts 3 -m my_project.train
    """  # noqa: D301 - click wants the character \b itself, and not its two letters.
    _check_where(workers, hosts, nnodes, index)
    gpus = _gpus(gpus_per_worker, workers or 1)
    if not module and not pathlib.Path(script).exists():
        raise click.UsageError(f"{script!r}: there is no such script (-m runs a module)")
    make_workers = functools.partial(_workers, workers, hosts, index, devices_per_worker, gpus)
    job = supervisor.Job(
        command=(sys.executable, *(["-m"] if module else []), script, *arguments),
        workers=make_workers,
        max_restarts=max_restarts,
        grace_seconds=grace,
    )
    return supervisor.run(job, lambda message: click.echo(f"tfcdo: {message}", err=True))


def _check_where(
    workers: int | None, hosts: tuple[str, ...] | None, nnodes: int | None, index: int | None
) -> None:
    """Raises a UsageError unless it is said on which hosts the workers are."""
    if nnodes is not None and nnodes != len(hosts or [1]):
        raise click.UsageError(
            f"--nnodes must be the number of --hosts, {len(hosts or [1])}; got {nnodes}"
        )
    # torchrun's users write --nproc-per-node 1 for one worker on each host.
    if hosts is not None and workers == 1:
        workers = None
    if (workers is None) == (hosts is None):
        raise click.UsageError(
            "give either --workers N, to start all workers on this host, or --hosts A:PORT,B:PORT "
            "--index I, to start worker I of several hosts"
        )
    if hosts is None:
        if index is not None:
            raise click.UsageError("--index needs --hosts: --workers starts all workers")
        return
    if index is None:
        raise click.UsageError(
            f"--hosts needs --index: which of the {len(hosts)} this host is, from 0"
        )
    if index >= len(hosts):
        raise click.UsageError(
            f"--index must be less than the number of hosts, {len(hosts)}; got {index}"
        )


@contextlib.contextmanager
def _workers(
    count: int | None,
    hosts: tuple[str, ...] | None,
    index: int | None,
    devices_per_worker: int | None,
    gpus: Sequence[str],
) -> Iterator[Sequence[supervisor.WorkerSpec]]:
    """Gives what each worker of one run is; on one host, with free ports of its own."""
    with contextlib.ExitStack() as stack:
        variables = {}
        if devices_per_worker:
            variables[environment.DEVICES_PER_WORKER] = str(devices_per_worker)
        if hosts is None:
            assert count is not None
            # A new one for each run keeps out workers that an earlier run has left.
            token = environment.cluster_token() or secrets.token_hex(16)
            variables[environment.CLUSTER_TOKEN] = token
            addresses = stack.enter_context(cluster.reserved_ports(count))
            indices: Sequence[int] = range(count)
        else:
            assert index is not None
            _check_own_port(hosts[index])
            addresses, indices = hosts, [index]
        # Each worker's GPUs, in the order of the workers of this host.
        visible = [{"CUDA_VISIBLE_DEVICES": names} for names in gpus] or [{}] * len(indices)
        yield [
            _worker(worker, addresses, {**variables, **own})
            for worker, own in zip(indices, visible, strict=True)
        ]


def _gpus(each: int | None, num_workers: int) -> list[str]:
    """Returns for each worker of this host the value of CUDA_VISIBLE_DEVICES; [] to leave it."""
    if each is None:
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        from tfcdo.topology import detection

        names = [str(number) for number in range(len(detection.gpus_of_nvidia_smi()))]
    else:
        names = [name.strip() for name in given.split(",") if name.strip()]
    if len(names) < each * num_workers:
        source = "nvidia-smi shows" if given is None else "CUDA_VISIBLE_DEVICES names"
        raise click.UsageError(
            f"--gpus-per-worker {each} needs {each * num_workers} GPUs for {num_workers} workers "
            f"on this host; {source} {len(names)}"
        )
    return [",".join(names[each * worker :][:each]) for worker in range(num_workers)]


def _check_own_port(address: str) -> None:
    try:
        cluster.check_port_is_free(address)
    except OSError as error:
        raise click.ClickException(
            f"--hosts {address}: this host's worker cannot listen at port "
            f"{address.rpartition(':')[2]}: {error.strerror}"
        ) from error


def _worker(
    index: int, addresses: Sequence[str], variables: dict[str, str]
) -> supervisor.WorkerSpec:
    name = f"worker {index}"
    prefix = f"{name:{len(f'worker {len(addresses) - 1}')}} | "
    return supervisor.WorkerSpec(
        name=name,
        prefix=_coloured(prefix, index, sys.stdout),
        error_prefix=_coloured(prefix, index, sys.stderr),
        environment={"TF_CONFIG": cluster.tf_config(addresses, index), **variables},
    )


def _coloured(prefix: str, index: int, stream: TextIO) -> bytes:
    """Returns a worker's prefix, in its colour where the stream is a terminal that has colours."""
    console = Console(file=stream)
    with console.capture() as captured:
        console.print(Text(prefix, _COLOURS[index % len(_COLOURS)]), end="")
    return captured.get().encode("ascii")
