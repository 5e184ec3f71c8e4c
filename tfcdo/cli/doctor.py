"""`tfcdo doctor`: checks this machine, and shows what tfcdo would do on it."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.cli import options
from tfcdo.doctor import answers, examination, findings
from tfcdo.doctor import blackbox as black_boxes
from tfcdo.units import format_bytes

_STYLES = {findings.OK: "green", findings.NOTE: "yellow", findings.WRONG: "bold red"}
# A table of more devices would be wider than a screen.
_MOST_COLUMNS = 8


@click.command()
@click.option(
    "-g",
    "--devices",
    "num_devices",
    type=click.IntRange(2, 16),
    help="Number of devices; default: all GPUs, or 4 virtual CPU devices.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
@click.option(
    "--blackbox",
    is_flag=True,
    help="Comparison of hosts' black boxes: which host stopped where.",
)
@click.argument("files", nargs=-1, type=click.Path(path_type=pathlib.Path))
def doctor(
    num_devices: int | None, as_json: bool, blackbox: bool, files: tuple[pathlib.Path, ...]
) -> int:
    """Check this machine, and show what tfcdo would do here.

    Copies a known pattern between every two devices, then all-reduces on all of them with tfcdo's
    and TensorFlow's classes. All this runs in a process that is ended if it hangs. Each finding
    has its remedy; the last line can be pasted into a script. The exit status is 1 if there is a
    problem; TensorFlow's own errors are reported but do not affect it.
    """
    if blackbox != bool(files):
        raise click.UsageError("--blackbox takes files, and files take --blackbox")
    if blackbox:
        return _print_black_boxes(files)
    console = options.make_console(width_of_a_pipe=120)
    limits = examination.Limits()
    with (
        options.status(console, "Starting ...") as shown,
        examination.Probes(num_devices, limits) as probes,
    ):
        report = examination.examine(
            probes.ask, num_devices, limits, lambda message: shown.update(f"{message} ...")
        )
    found = findings.findings_of(report)
    is_wrong = any(finding.severity == findings.WRONG for finding in found)
    line = findings.script_line(report)
    if as_json:
        click.echo(json.dumps(_content(report, found, line), indent=2))
    else:
        _print(report, found, console)
        click.echo(line)
    return int(is_wrong)


def _print_black_boxes(files: Sequence[pathlib.Path]) -> int:
    try:
        lines = black_boxes.compare(black_boxes.read(files))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for line in lines:
        click.echo(line)
    return 0


def _content(
    report: examination.Report, found: Sequence[findings.Finding], line: str
) -> dict[str, object]:
    return {
        **dataclasses.asdict(report),
        "models": [
            {"model": name, **dataclasses.asdict(plan)} for name, plan in report.models.items()
        ],
        "pairs": [
            {"source": source, "target": target, **dataclasses.asdict(copies)}
            for (source, target), copies in report.pairs.items()
        ],
        "findings": [dataclasses.asdict(finding) for finding in found],
        "script": line,
    }


def _print(report: examination.Report, found: Sequence[findings.Finding], console: Console) -> None:
    wrong = sum(finding.severity == findings.WRONG for finding in found)
    notes = sum(finding.severity == findings.NOTE for finding in found)
    verdict = f"{wrong} problem{'' if wrong == 1 else 's'}" if wrong else "no problem"
    style = _STYLES[findings.WRONG if wrong else findings.OK]
    noted = f", {notes} note{'' if notes == 1 else 's'}" if notes else ""
    console.print(Text.assemble("This machine: ", (verdict, style), noted))
    for finding in found:
        mark = Text(f"  {finding.severity:5}  ", _STYLES[finding.severity])
        console.print(Text.assemble(mark, finding.text), soft_wrap=True)
        if finding.severity != findings.OK:
            console.print(
                options.printable(f"         → {finding.remedy}", console), soft_wrap=True
            )
    for heading, lines in _facts(report):
        console.print(Text(heading, "bold"))
        for line in lines:
            console.print(options.printable(f"  {line}", console), soft_wrap=True)
    on_gpus = isinstance(report.devices, answers.SeenDevices) and not report.devices.on_cpu
    if report.pairs and on_gpus:
        console.print(_table_of_pairs(report))
    if report.sums:
        console.print(_table_of_sums(report))
    console.print(Text("To paste into your script", "bold"))


def _facts(report: examination.Report) -> Iterator[tuple[str, list[str]]]:
    """Yields what is known of the machine: headings, and the lines below them."""
    names = ("tfcdo", "tensorflow", "keras", "python", "numpy")
    versions = [f"{name} {getattr(report.versions, name, None) or 'none'}" for name in names]
    versions.append(f"built for cuda {getattr(report.versions, 'cuda', None) or 'none'}")
    yield "Versions", [", ".join(versions)]
    devices, topology = report.devices, report.topology
    if isinstance(devices, answers.SeenDevices):
        logical = map(findings.short_name, devices.logical)
        physical = map(findings.short_name, devices.physical)
        yield (
            "Devices",
            [
                f"physical: {', '.join(physical)}; logical: {', '.join(logical)}",
                f"examined: {devices.description}",
            ],
        )
    if report.all_reduces:
        yield "All-reduces that can run", [_can_run(found) for found in report.all_reduces]
    if isinstance(topology, answers.FoundTopology):
        yield "Topology", [f"{topology.name}: {topology.reason}", _links(topology)]
    if report.models:
        yield "What AutoAllReduce would do", [_plan(*model) for model in report.models.items()]
    config = report.tf_config
    hosts = [f"{host.name}: {host.status}" for host in config.hosts]
    alone = "not set: this process trains alone"
    yield "TF_CONFIG", hosts or [config.problem or (config.text or alone)]


def _can_run(found: answers.AllReduce | answers.Failure) -> str:
    if isinstance(found, answers.Failure):
        return found.error
    return f"{found.name}: {'yes' if found.can_run else 'no'}, {found.reason}"


def _links(topology: answers.FoundTopology) -> str:
    """Describes the speeds of the links, grouped by speed."""
    by_speed = collections.Counter(link.bandwidth for link in topology.links)
    parts = [
        f"{count} links {'in one memory' if speed is None else f'of {speed / 1e9:g} GB/s'}"
        for speed, count in sorted(by_speed.items(), key=lambda item: -(item[0] or 0))
    ]
    return ", ".join(parts) or "no links"


def _plan(model: str, plan: answers.ModelPlan | answers.Failure) -> str:
    if isinstance(plan, answers.Failure):
        return f"{model}: {plan.error}"
    return (
        f"{model} ({format_bytes(plan.bytes)} in {plan.values} gradients): "
        f"{plan.algorithm} in {plan.packs} pack{'' if plan.packs == 1 else 's'}, "
        f"{plan.graph_ops} graph ops; Adam's state {format_bytes(plan.state_bytes)} a device, "
        f"{format_bytes(plan.sharded_state_bytes)} with shard_optimizer_state"
    )


def _table_of_pairs(report: examination.Report) -> Table:
    """Makes the table of bandwidths, measured and of the topology; a row a sending device."""
    names = [findings.short_name(name) for name in report.examined][:_MOST_COLUMNS]
    title = "GB/s from device (row) to device (column): measured / of the topology"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left")
    for heading in ("", *names):
        table.add_column(heading, justify="right", no_wrap=True)
    cells = {
        pair: _bandwidths(copies, report.planned_bandwidth(pair))
        for pair, copies in report.pairs.items()
    }
    for source, name in enumerate(names):
        row = [cells.get((source, target), Text("-")) for target in range(len(names))]
        table.add_row(name, *row)
    return table


def _bandwidths(copies: answers.CopiesAnswer, planned: float | None) -> Text:
    if isinstance(copies, answers.Failure):
        return _failure(copies)
    if isinstance(copies, answers.Skipped):
        return Text("?")
    style = _STYLES[findings.WRONG] if copies.wrong else ""
    expected = "-" if planned is None else f"{planned / 1e9:.1f}"
    return Text(f"{copies.bandwidth / 1e9:.1f} / {expected}", style)


def _failure(failure: answers.Failure) -> Text:
    return Text("hangs" if answers.hangs(failure) else "fails", _STYLES[findings.WRONG])


def _table_of_sums(report: examination.Report) -> Table:
    sizes = {found.elements for found in report.sums.values() if isinstance(found, answers.Sums)}
    of_size = f" of {max(sizes)} elements" if sizes else ""
    title = f"Incorrect elements of an all-reduce{of_size} on all devices"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left")
    for heading in ("tfcdo", "#wrong", "TensorFlow", "#wrong"):
        table.add_column(heading, justify="right" if heading == "#wrong" else "left")
    for names in examination.COMPARED:
        cells = [
            (name.partition(".")[2], _wrong(report.sums[name]))
            for name in names
            if name in report.sums
        ]
        table.add_row(*(cell for pair in cells for cell in pair))
    return table


def _wrong(found: answers.SumsAnswer) -> Text:
    if isinstance(found, answers.Failure):
        return _failure(found)
    if isinstance(found, answers.Skipped):
        return Text("-", "dim")
    style = _STYLES[findings.WRONG] if found.wrong else ""
    return Text(str(found.wrong), style)
