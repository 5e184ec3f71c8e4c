"""The machines that a user names on the command line: presets, files, and this one."""

from __future__ import annotations

import dataclasses
import re
import sys

import click
from rich.console import Console

from tfcdo import topology
from tfcdo.cli import options
from tfcdo.plan.evaluation import check_num_devices
from tfcdo.topology import detection, measurement
from tfcdo.topology.measurement import MOST_DEVICES
from tfcdo.topology.presets import PRESETS, preset
from tfcdo.topology.topology import Topology


@dataclasses.dataclass(frozen=True)
class Here:
    """A number of devices of this machine; None for all GPUs, or some virtual CPU devices."""

    count: int | None


def parse(text: str) -> Topology | Here:
    """Looks a preset up, reads a file, or names this machine."""
    name, _, count = text.partition(":")
    if name == "here" and re.fullmatch(r"([1-9]\d?)?", count):
        if count and int(count) > MOST_DEVICES:
            raise ValueError(f"{text!r}: at most {MOST_DEVICES} devices can be measured")
        return Here(int(count) if count else None)
    # Limited to 9 digits: int() refuses huge strings.
    if name in PRESETS and re.fullmatch(r"(\d{1,9})?", count):
        # Checked first, as making the links of many devices takes seconds.
        check_num_devices(name, int(count or 1))
        return preset(name, int(count) if count else None)
    content = _read(text)
    is_json = content.lstrip().startswith(("{", "["))
    read = Topology.from_json if is_json else Topology.from_nvidia_smi
    try:
        return read(content)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _read(name: str) -> str:
    if name == "-" and sys.stdin is None:
        raise ValueError("-: standard input is closed")
    try:
        with click.open_file(name, encoding="utf-8") as file:
            return str(file.read()).removeprefix("\ufeff")
    except FileNotFoundError:
        raise ValueError(
            f"{name!r} is neither a file nor a known machine: {', '.join((*PRESETS, 'here'))}"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: expected text; the file holds something else") from None
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from error


def measure(here: Here, measure_again: bool) -> Topology:
    """Returns the topology of devices of this machine; measures it unless that was done before."""
    # On standard error: the output is the table.
    console = Console(stderr=True, highlight=False, emoji=False, markup=False)
    with options.status(console, "Starting TensorFlow ..."), options.quiet_start():
        import tensorflow as tf

        from tfcdo.bench.devices import choose_devices

        devices = choose_devices(here.count)
        tf.config.list_logical_devices()
    name = detection.name_of_measured(devices.names)
    known = measurement.load(name) if name else None
    if known is not None and not measure_again:
        console.print(f"{name}: as on {known.date}; --measure measures again", soft_wrap=True)
        return known.topology
    with options.status(console, "Measuring ...") as shown:
        found = topology.measure(
            devices.names, progress=lambda done, what: shown.update(f"{done:.0%} {what}")
        )
    console.print(f"{found.name}: measured now, and kept", soft_wrap=True)
    return found
