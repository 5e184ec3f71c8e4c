"""Replaces the tables of pages that tools have measured."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).absolute().parents[1]


def replace_table(path: pathlib.Path, tool: str, lines: Sequence[str]) -> None:
    """Writes a page with other lines between the markers that name a tool."""
    begin, end = f"<!-- made by tools/{tool}: begin -->", "<!-- end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has no lines {begin!r} and {end!r}")
    path.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]), encoding="utf-8")
