"""`tfcdo doctor`: checks this machine."""

from __future__ import annotations

import collections
import math
import pathlib
from collections.abc import Iterator, Sequence

import click
from rich.console import Console
from rich.text import Text

from tfcdo.cli import options
from tfcdo.doctor import blackbox as black_boxes
from tfcdo.doctor import examination
from tfcdo.doctor.examination import NOTE, OK, WRONG, Finding, Report
from tfcdo.log import format_count
from tfcdo.topology.topology import Topology

_STYLES = {OK: "green", NOTE: "yellow", WRONG: "bold red"}


@click.command()
@options.option(
    "-g --devices num_devices",
    options.number(2, options.MOST_DEVICES),
    "Number of devices; default: all GPUs if several, else 4 CPUs.",
)
@options.option("--blackbox", bool, "Comparison of FILES, the hosts' black boxes.", is_flag=True)
@click.argument("files", nargs=-1, type=click.Path(path_type=pathlib.Path))
def doctor(num_devices: int | None, blackbox: bool, files: tuple[pathlib.Path, ...]) -> int:
    """Check this machine, and print a line for your script.

    Copies a known pattern between every two devices, then all-reduces on all of them with tfcdo's
    and TensorFlow's classes, and trains a tiny model with fit, whose metrics are checked. All this
    runs in a process that is ended if it hangs. Each finding has its remedy; the last line can be
    pasted into a script. The exit status is 1 if there is a problem; TensorFlow's own errors are
    reported but do not affect it.
    """
    options.refuse(
        (files and not blackbox, "files require --blackbox"),
        (blackbox and not files, "--blackbox requires files"),
    )
    if blackbox:
        with options.reported(click.ClickException, ValueError):
            click.echo("\n".join(black_boxes.compare(black_boxes.read(files))))
        return 0
    console = options.make_console()
    with options.status("Starting ...") as tell, examination.Probes(num_devices) as probes:
        report = examination.examine(probes.ask, num_devices, tell)
    found = examination.findings_of(report)
    _print(report, found, console)
    click.echo(examination.script_line(report))
    return int(any(finding.severity == WRONG for finding in found))


def _print(report: Report, found: Sequence[Finding], console: Console) -> None:
    wrong = sum(finding.severity == WRONG for finding in found)
    notes = sum(finding.severity == NOTE for finding in found)
    verdict = format_count(wrong, "problem") if wrong else "no problem"
    style = _STYLES[WRONG if wrong else OK]
    noted = f", {format_count(notes, 'note')}" if notes else ""
    console.print(Text.assemble("This machine: ", (verdict, style), noted))
    for finding in found:
        mark = Text(f"  {finding.severity:5}  ", _STYLES[finding.severity])
        console.print(Text.assemble(mark, finding.text), soft_wrap=True)
        if finding.severity != OK:
            console.print(f"         → {finding.remedy}", soft_wrap=True)
    for heading, text in _facts(report):
        console.print(Text(heading, "bold"))
        console.print(f"  {text}", soft_wrap=True)
    console.print(Text("To paste into your script", "bold"))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yields the facts about the machine: headings, and the text below them."""
    names = ("tfcdo", "tensorflow", "keras", "python", "numpy")
    versions = [f"{name} {getattr(report.versions, name, None) or 'none'}" for name in names]
    versions.append(f"built for cuda {getattr(report.versions, 'cuda', None) or 'none'}")
    yield "Versions", ", ".join(versions)
    machine = report.machine
    if isinstance(machine, examination.Machine):
        physical, logical = (
            ", ".join(map(examination.short_name, names))
            for names in (machine.physical, machine.logical)
        )
        yield "Devices", f"physical: {physical}; logical: {logical}"
        topology = machine.topology
        yield "Topology", f"{topology.name}: {machine.topology_reason}\n  {_links(topology)}"
    # Its hosts and problems are findings.
    if not report.tf_config.hosts and not report.tf_config.problem:
        yield "TF_CONFIG", report.tf_config.text or "not set: this process trains alone"


def _links(topology: Topology) -> str:
    """Describes the speeds of the links, grouped by speed."""
    by_speed = collections.Counter(topology.bandwidth(*pair) for pair in topology.link_by_pair)
    parts = [
        f"{count} links {'in one memory' if speed == math.inf else f'of {speed / 1e9:g} GB/s'}"
        for speed, count in sorted(by_speed.items(), reverse=True)
    ]
    return ", ".join(parts) or "no links"
