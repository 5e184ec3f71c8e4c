"""`tfcdo doctor`: says what tfcdo would do on this machine, and tests that it does it right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcdo.cli import options
from tfcdo.doctor import examination
from tfcdo.doctor import findings
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
    help="How many devices to examine: GPUs if there are that many, else virtual CPU devices. "
    "Without it, all GPUs if there are several, else 4 virtual CPU devices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(num_devices: int | None, as_json: bool) -> int:
    """Examine this machine: what tfcdo would do here, and whether it is right.

    Copies a known pattern between every two devices and all-reduces on all of them, with
    TensorFlow's own classes beside tfcdo's, in a process that is given up if it hangs. Each finding
    has its remedy, and the last line is what to paste into a script. The exit status is 1 if
    something is wrong here; what only TensorFlow's classes get wrong is told, and does not count.
    """
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


def _content(
    report: examination.Report, found: Sequence[findings.Finding], line: str
) -> dict[str, object]:
    return {
        **dataclasses.asdict(report),
        "findings": [dataclasses.asdict(finding) for finding in found],
        "script": line,
    }


def _print(report: examination.Report, found: Sequence[findings.Finding], console: Console) -> None:
    for heading, lines in _facts(report):
        console.print(Text(heading, "bold"))
        for line in lines:
            console.print(options.printable(f"  {line}", console), soft_wrap=True)
    if report.pairs and report.devices and not report.devices["on_cpu"]:
        console.print(_table_of_pairs(report))
    if report.sums:
        console.print(_table_of_sums(report))
    console.print(Text("Findings", "bold"))
    for finding in found:
        mark = Text(f"  {finding.severity:5}  ", _STYLES[finding.severity])
        console.print(Text.assemble(mark, finding.text), soft_wrap=True)
        if finding.severity != findings.OK:
            console.print(
                options.printable(f"         → {finding.remedy}", console), soft_wrap=True
            )
    console.print(Text("To paste into your script", "bold"))


def _facts(report: examination.Report) -> Iterator[tuple[str, list[str]]]:
    """Yields what is known of the machine: headings, and the lines below them."""
    names = ("tfcdo", "tensorflow", "keras", "python", "numpy", "cuda")
    versions = [f"{name} {report.versions.get(name) or 'none'}" for name in names]
    yield "Versions", [", ".join(versions)]
    if report.devices and "error" not in report.devices:
        logical = map(findings.short_name, report.devices["logical"])
        physical = map(findings.short_name, report.devices["physical"])
        yield (
            "Devices",
            [
                f"physical: {', '.join(physical)}; logical: {', '.join(logical)}",
                f"examined: {report.devices['description']}",
            ],
        )
    if report.all_reduces:
        yield "All-reduces that can run", [_can_run(found) for found in report.all_reduces]
    if report.topology and "error" not in report.topology:
        topology = report.topology
        yield "Topology", [f"{topology['name']}: {topology['reason']}", _links(report)]
    if report.models:
        yield "What AutoAllReduce would do", [_plan(model) for model in report.models]
    config = report.tf_config
    hosts = [f"{host.name}: {host.status}" for host in config.hosts]
    alone = "not set: this process trains alone"
    yield "TF_CONFIG", hosts or [config.problem or (config.text or alone)]


def _can_run(found: dict[str, object]) -> str:
    if "error" in found:
        return str(found["error"])
    return f"{found['name']}: {'yes' if found['can_run'] else 'no'}, {found['reason']}"


def _links(report: examination.Report) -> str:
    """Says how fast the links are, those of one speed together."""
    by_speed: dict[float | None, int] = {}
    for link in (report.topology or {})["links"]:
        by_speed[link["bandwidth"]] = by_speed.get(link["bandwidth"], 0) + 1
    parts = [
        f"{count} links {'in one memory' if speed is None else f'of {speed / 1e9:g} GB/s'}"
        for speed, count in sorted(by_speed.items(), key=lambda item: -(item[0] or 0))
    ]
    return ", ".join(parts) or "no links"


def _plan(model: dict[str, object]) -> str:
    if "error" in model:
        return f"{model['model']}: {model['error']}"
    size, packs = model["bytes"], model["packs"]
    assert isinstance(size, int)
    return (
        f"{model['model']} ({format_bytes(size)} in {model['values']} gradients): "
        f"{model['algorithm']} in {packs} pack{'' if packs == 1 else 's'}, "
        f"{model['graph_ops']} graph ops"
    )


def _table_of_pairs(report: examination.Report) -> Table:
    """Makes the table of bandwidths, measured and of the topology; a row a sending device."""
    assert report.devices
    names = [findings.short_name(name) for name in report.devices["examined"]][:_MOST_COLUMNS]
    title = "GB/s from device (row) to device (column): measured / of the topology"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left")
    for heading in ("", *names):
        table.add_column(heading, justify="right", no_wrap=True)
    cells = {(pair["source"], pair["target"]): _bandwidths(pair, report) for pair in report.pairs}
    for source, name in enumerate(names):
        row = [cells.get((source, target), Text("-")) for target in range(len(names))]
        table.add_row(name, *row)
    return table


def _bandwidths(pair: dict[str, object], report: examination.Report) -> Text:
    source, target = pair["source"], pair["target"]
    assert isinstance(source, int) and isinstance(target, int)
    planned = findings.bandwidth_in_topology(report, source, target)
    beside = "-" if planned is None else f"{planned / 1e9:.1f}"
    if pair.get("hangs") or "error" in pair:
        return Text("hangs" if pair.get("hangs") else "fails", _STYLES[findings.WRONG])
    measured = pair.get("bandwidth")
    if not isinstance(measured, float):
        return Text("?")
    style = _STYLES[findings.WRONG] if pair.get("wrong") else ""
    return Text(f"{measured / 1e9:.1f} / {beside}", style)


def _table_of_sums(report: examination.Report) -> Table:
    title = "Wrong elements of an all-reduce on all devices"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left")
    for heading in ("tfcdo", "#wrong", "TensorFlow", "#wrong"):
        table.add_column(heading, justify="right" if heading == "#wrong" else "left")
    for names in examination.COMPARED:
        cells = [(name, _wrong(report.sums[name])) for name in names if name in report.sums]
        table.add_row(*(cell for pair in cells for cell in pair))
    return table


def _wrong(found: dict[str, object]) -> Text:
    if "error" in found:
        return Text("hangs" if found.get("hangs") else "fails", _STYLES[findings.WRONG])
    if found["skipped"]:
        return Text("cannot run", "dim")
    style = _STYLES[findings.WRONG] if found["wrong"] else ""
    return Text(f"{found['wrong']} of {found['elements']}", style)
