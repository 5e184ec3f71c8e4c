"""`-t here`: this machine, as it was measured or is measured now."""

from __future__ import annotations

import dataclasses

from rich import progress as rich_progress
from rich.console import Console

from tfcdo import topology
from tfcdo.cli import options
from tfcdo.topology import detection, measured
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class Here:
    """Stands for a number of devices of this machine.

    Attributes:
      count: how many; None for all GPUs, or some virtual CPU devices where there are not two.
    """

    count: int | None


def topology_of(here: Here, measure_again: bool) -> Topology:
    """Returns what joins some devices of this machine; measures it unless that was done before."""
    # Beside the output, which may be a plan as JSON.
    console = Console(stderr=True, highlight=False, emoji=False, markup=False)
    with options.status(console, "Starting TensorFlow ..."), options.quiet_start():
        import tensorflow as tf

        from tfcdo.bench.devices import choose_devices

        devices = choose_devices(here.count)
        tf.config.list_logical_devices()
    name = detection.name_of_measured(devices.names)
    known = measured.load(name) if name else None
    if known is not None and not measure_again:
        console.print(f"{name}: as on {known.date}; --measure measures again", soft_wrap=True)
        return known.topology
    columns = (rich_progress.BarColumn(), rich_progress.TextColumn("{task.description}"))
    with rich_progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task("measuring", total=1.0)
        found = topology.measure(
            devices.names,
            progress=lambda done, what: shown.update(task, completed=done, description=what),
        )
    console.print(f"{found.name}: measured now, and kept", soft_wrap=True)
    return found
