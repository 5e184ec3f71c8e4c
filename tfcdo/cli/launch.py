"""`tfcdo launch`: starts the workers of a training job, and ends them together."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import click
from rich.console import Console
from rich.text import Text

from tfcdo import environment
from tfcdo.cli import options
from tfcdo.cluster import config
from tfcdo.launch import cluster, member, pool, supervisor, worker

_MOST_WORKERS = 256
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def _parse_workers(text: str) -> tuple[int, int]:
    """Reads "4" as (4, 4) and "1:4" as (1, 4)."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(":")]
    least, most = numbers[0], numbers[-1]
    if len(numbers) > 2 or not 1 <= least <= most <= _MOST_WORKERS:
        raise ValueError(
            f"expected N or MIN:MAX with 1 <= MIN <= MAX <= {_MOST_WORKERS}, such as 4 or 1:4; "
            f"got {text!r}"
        )
    return least, most


_HOSTS = options.Parsed("hosts", cluster.parse_hosts)


def _seconds(name: str, text: str, default: float) -> Any:
    # A day is the longest of all times.
    return options.option(name, click.FloatRange(0, 86_400), text, default, metavar="SECONDS")


@click.command(
    # Later arguments go to the script, even if they look like options.
    context_settings={"allow_interspersed_args": False},
)
@options.option(
    "--workers --nproc-per-node --nproc_per_node",
    options.Parsed("workers", _parse_workers),
    "Number of workers, all on this host unless --meet is given.",
    metavar="N|MIN:MAX",
)
@options.option("--hosts", _HOSTS, "Addresses of the workers, one a host.", metavar="A:PORT,...")
@options.option("--nnodes", click.IntRange(1), "Number of hosts, to be checked against --hosts.")
@options.option(
    "--index --node-rank --node_rank", click.IntRange(0), "Number of this host in --hosts, from 0."
)
@options.option(
    "--meet",
    _HOSTS,
    "Address of the first host's launcher, for --workers MIN:MAX with --hosts.",
    metavar="A:PORT",
)
@_seconds("--join-timeout", "Time to wait for MAX workers at the start, MIN after faults.", 600.0)
@_seconds("--rejoin-after", "Time until a worker that was left out is tried again.", 60.0)
@options.option(
    "-g --devices-per-worker",
    click.IntRange(1, 256),
    "Number of devices of each worker; default: visible GPUs, or one CPU.",
    metavar="D",
)
@options.option(
    "--gpus-per-worker",
    click.IntRange(1, 64),
    "Number of GPUs that each worker sees, the first worker the first.",
    metavar="D",
)
@options.option(
    "--max-restarts", click.IntRange(0), "Number of restarts of all workers after a failure.", 0
)
@_seconds("--grace", "Time between SIGTERM and SIGKILL for workers that must end.", 10.0)
@options.option("-m --module", bool, "SCRIPT as a module's name, as in `python -m`.", is_flag=True)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def launch(
    workers: tuple[int, int] | None,
    hosts: tuple[str, ...] | None,
    nnodes: int | None,
    index: int | None,
    meet: tuple[str, ...] | None,
    join_timeout: float,
    rejoin_after: float,
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
    Two to four workers, of which some may fail and come back:
      tfcdo launch --workers 2:4 train.py
    A module instead of a script, started again at most three times:
      tfcdo launch --workers 2 --max-restarts 3 -m my_project.train
    """  # noqa: D301 - click wants the character \b itself, and not its two letters.
    # torchrun's users write --nproc-per-node 1 for one worker on each host.
    if hosts is not None and meet is None and workers == (1, 1):
        workers = None
    _check_where(workers, hosts, nnodes, index, meet)
    gpus = _gpus(gpus_per_worker, workers[1] if workers and not hosts else 1)
    if not module and not pathlib.Path(script).exists():
        raise click.UsageError(f"{script!r}: there is no such script (-m runs a module)")
    # Of the workers' TensorFlow, errors are enough, unless the user wants more.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    command = (sys.executable, *(["-m"] if module else []), script, *arguments)
    each = devices_per_worker
    variables = {environment.DEVICES_PER_WORKER: str(each)} if each else {}
    address = config.split_address(meet[0]) if meet else None
    if address and index:
        assert hosts
        spec = _spec(index, len(hosts), _visible(gpus, 0))
        token = environment.cluster_token()
        return member.Member(command, spec, address, token, join_timeout, grace).run()
    elastic = None
    if workers and (workers[0] < workers[1] or address):
        port = address[1] if address else None
        if meet:
            _check_port(meet[0], "--meet", "launcher")
        token = environment.cluster_token()
        elastic = pool.Pool(*workers, max_restarts, join_timeout, rejoin_after, port, token)
    job = supervisor.Job(
        command=command,
        workers=functools.partial(_workers, workers, hosts, index, variables, gpus, elastic),
        max_restarts=max_restarts,
        grace_seconds=grace,
        pool=elastic,
    )
    return supervisor.run(job)


def _check_where(
    workers: tuple[int, int] | None,
    hosts: tuple[str, ...] | None,
    nnodes: int | None,
    index: int | None,
    meet: tuple[str, ...] | None,
) -> None:
    """Raises a UsageError unless it is said on which hosts the workers are."""
    count = len(hosts or [1])
    most = workers and workers[1]
    options.refuse(
        {
            f"--nnodes must be the number of --hosts, {count}; got {nnodes}": (
                nnodes not in (None, count)
            ),
            "give either --workers N, to start all workers on this host, or --hosts A:PORT,B:PORT "
            "--index I, to start worker I of several hosts": workers is None and hosts is None,
            "--index needs --hosts: --workers starts all workers": not hosts and index is not None,
            "--meet needs --hosts: --workers starts all workers": not hosts and meet,
            "give --hosts either alone, or with both --workers MIN:MAX and --meet A:PORT": (
                hosts and (workers is None) != (meet is None)
            ),
            f"--hosts needs --index: which of the {count} this host is, from 0": (
                hosts and index is None
            ),
            f"--index must be less than the number of hosts, {count}; got {index}": (
                (index or 0) >= count
            ),
            f"--meet must be one address; got {','.join(meet or ())}": meet and len(meet) != 1,
            f"MAX of --workers must be the number of hosts, {count}; got {most}": (
                hosts and workers and most != count
            ),
        }
    )


@contextlib.contextmanager
def _workers(
    count: tuple[int, int] | None,
    hosts: tuple[str, ...] | None,
    index: int | None,
    variables: Mapping[str, str],
    gpus: Sequence[str],
    elastic: pool.Pool | None,
) -> Iterator[Sequence[worker.WorkerSpec]]:
    """Gives the place of each worker of one run; on one host, with free ports of its own."""
    most = count[1] if count else len(hosts or ())
    slots = elastic.ready if elastic else range(most)
    if hosts is not None and index is not None and index in slots:
        _check_port(hosts[index], "--hosts", "worker")
    if count:
        # A token of each run's own keeps out workers that an earlier run has left.
        token = environment.cluster_token() or secrets.token_hex(16)
        variables = {**variables, environment.CLUSTER_TOKEN: token}
    with contextlib.ExitStack() as stack:
        if hosts is None:
            addresses = stack.enter_context(cluster.reserved_ports(len(slots)))
        else:
            addresses = tuple(hosts[slot] for slot in slots)
        yield [
            _spec(
                slot,
                most,
                {
                    "TF_CONFIG": cluster.tf_config(addresses, task),
                    **variables,
                    # Those of another host are its own launcher's.
                    **_visible(gpus, slot if hosts is None else 0),
                },
            )
            for task, slot in enumerate(slots)
            if count or slot == index
        ]


def _visible(gpus: Sequence[str], number: int) -> dict[str, str]:
    """Returns the variable by which one of this host's workers sees its GPUs."""
    return {"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else {}


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


def _check_port(address: str, option: str, listener: str) -> None:
    try:
        cluster.check_port_is_free(address)
    except OSError as error:
        raise click.ClickException(
            f"{option} {address}: this host's {listener} cannot listen at port "
            f"{address.rpartition(':')[2]}: {error.strerror}"
        ) from error


def _spec(slot: int, count: int, variables: Mapping[str, str]) -> worker.WorkerSpec:
    name = f"worker {slot}"
    prefix = f"{name:{len(f'worker {count - 1}')}} | "
    return worker.WorkerSpec(
        name=name,
        prefix=_coloured(prefix, slot, sys.stdout),
        error_prefix=_coloured(prefix, slot, sys.stderr),
        environment=variables,
        slot=slot,
    )


def _coloured(prefix: str, index: int, stream: TextIO) -> bytes:
    """Returns a worker's prefix, in its colour where the stream is a terminal that has colours."""
    console = Console(file=stream)
    with console.capture() as captured:
        console.print(Text(prefix, _COLOURS[index % len(_COLOURS)]), end="")
    return captured.get().encode("ascii")
