"""Tells where the workers of a job are: on which hosts, and which of them are on this machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from tfcdo.cluster import config

_SLURM_NUMBERS = ("JOB_ID", "STEP_ID", "NTASKS", "PROCID", "NODEID", "LOCALID")


class Place(NamedTuple):
    """The addresses of all workers, those that this launcher starts, and all of its machine."""

    addresses: tuple[str, ...]  # Empty where all are on this machine.
    own: range
    first_here: int  # Which of the machine's workers the launcher's first one is,
    here: int  # and how many it has.


def parse_hosts(text: str) -> tuple[str, ...]:
    """Returns the addresses in a text such as "a:2222,[::1]:2222"; raises a `ValueError`."""
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        config.split_address(address)
        if addresses.count(address) > 1:
            raise ValueError(f"each host must be named once; got {address!r} twice")
    return addresses


def in_slurm(variables: Mapping[str, str]) -> Place:
    """Returns the place of a task of `srun`, which is one worker; raises a `ValueError`."""
    numbers = {name: variables.get(f"SLURM_{name}", "") for name in _SLURM_NUMBERS}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise ValueError(f"srun must set SLURM_{name} to a number; got {text!r}")
    job, step, count, rank, node, local = map(int, numbers.values())
    names = variables.get("SLURM_STEP_NODELIST", "")
    try:
        command = ["scontrol", "show", "hostnames", names]
        hosts = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split()
    except FileNotFoundError as error:
        raise ValueError("no `scontrol`: use --hosts with --index $SLURM_NODEID") from error
    if not hosts:
        raise ValueError(f"`scontrol show hostnames {names}` has named no host: see its error")
    deals = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    # Such as "2(x3),1": two tasks on each of three nodes, one on the fourth.
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", deals)
    tasks = [int(each) for each, times in found for _ in range(int(times or 1))]
    if len(tasks) != len(hosts) or sum(tasks) != count or sum(tasks[:node]) + local != rank:
        raise ValueError(
            f"task {rank} of {count} must be task {local} of node {node} of {hosts}, with "
            f"SLURM_STEP_TASKS_PER_NODE={deals}: use srun --distribution=block"
        )
    # One of 1,250 ranges below Linux's own choices; steps' ranges are far from the next jobs'.
    first = 10_000 + 16 * ((job + 1 + 617 * (step - 1)) % 1_250)
    addresses = [f"{h}:{first + task}" for h, each in zip(hosts, tasks) for task in range(each)]
    return Place(tuple(addresses), range(rank, rank + 1), local, tasks[node])


def are_gpus_bound_by_slurm(variables: Mapping[str, str]) -> bool:
    """Returns whether a task of `srun` has GPUs of its own, and sees no others."""
    binding = variables.get("SLURM_GPU_BIND") or variables.get("SLURM_TRES_BIND")
    if binding:  # It stands above the others, which bind by default.
        return not binding.endswith("none")
    # The last one has --cpus-per-task, too.
    counts = map(variables.get, ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"))
    return any(counts) or "gpu" in variables.get("SLURM_TRES_PER_TASK", "")
