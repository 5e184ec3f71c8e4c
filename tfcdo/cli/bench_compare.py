"""`tfcdo bench --compare`: this run next to an earlier one."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tfcdo.cli import options

# The keys of a measurement, of an all-reduce or of a training step.
_KEYS = ("workload", "model", "size", "dtype", "num_devices", "name")

_Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The name of a file of `tfcdo bench --json`, its environment, and its measurements."""

    name: str
    where: Mapping[str, Any]
    results: Mapping[_Key, Mapping[str, Any]]


class EarlierFile(options.ParamType):
    """A file that `tfcdo bench --json` wrote."""

    name = "file"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Earlier:
        """Reads it, before time is spent on what it is to be compared with."""
        path = pathlib.Path(str(value))
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            results = {_key_of(one): one for one in content.pop("results")}
            times = [one["seconds"] + one["spread"] for one in results.values()]
        except OSError as error:
            self.fail(f"{path}: {error.strerror}", param, ctx)
        except (ValueError, KeyError, TypeError, AttributeError):
            times = []
        if not times:
            self.fail(f"{path} is not a file that tfcdo bench --json wrote", param, ctx)
        return Earlier(path.name, content, results)


def _key_of(one: Mapping[str, Any]) -> _Key:
    return tuple(one.get(key) for key in _KEYS)


def as_json(one: Any) -> dict[str, Any]:
    """Returns a measurement's fields and bandwidths; None for NaN, which JSON does not have."""
    found = dataclasses.asdict(one)
    for name in ("algbw", "busbw"):
        if hasattr(one, name):
            value = getattr(one, name)
            found[name] = None if math.isnan(value) else value
    return found


def show(
    earlier: Earlier, now: Mapping[str, Any], results: Sequence[Any], console: Console
) -> None:
    """Prints the table of times before and now, and the differences of the environments."""
    for name in ("machine", "devices", "versions"):
        if earlier.where.get(name) != now[name]:
            console.print(f"{earlier.name} has other {name}: {earlier.where.get(name)}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    table.title = f"Before ({earlier.name}, {earlier.where.get('date', 'no date')}) and after"
    table.add_column("what", overflow="fold")
    table.add_column("implementation", overflow="fold")
    for heading in ("before (us)", "after (us)", "after / before"):
        table.add_column(heading, justify="right", no_wrap=True)
    missing = []
    for one in results:
        row = dataclasses.asdict(one)
        before = earlier.results.get(_key_of(row))
        if before is None:
            missing.append(str(one.name))
            continue
        table.add_row(
            _what(row),
            one.name,
            f"{before['seconds'] * 1e6:.1f}",
            f"{one.seconds * 1e6:.1f}",
            options.printable(_change(before, one), console),
        )
    console.print(table)
    console.print(
        options.printable(
            "± marks a difference that is less than the quartiles' distance.", console
        )
    )
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        console.print(f"Not in {earlier.name}, or not of this size: {names}")


def _what(row: Mapping[str, Any]) -> str:
    if "model" in row:
        return str(row["model"])
    return f"{row['workload']}, {row['size']} bytes, {row['dtype']}"


def _change(before: Mapping[str, Any], after: Any) -> str:
    """Writes how the time has changed, and whether that is more than its spread."""
    if not before["seconds"] > 0 or not after.seconds > 0:
        return "-"
    ratio = after.seconds / before["seconds"]
    difference = abs(after.seconds - before["seconds"])
    is_lost = difference < max(before["spread"], after.spread) or math.isnan(ratio)
    return f"{'± ' if is_lost else ''}{ratio:.2f}"
