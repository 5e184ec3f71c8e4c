"""Runs `tfcdo bench`, and puts sections into docs/performance.md."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any


def bench(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs `tfcdo bench` in a process of its own.

    Args:
      arguments: its options.

    Returns:
      What it wrote with `--json`.

    Raises:
      subprocess.CalledProcessError: if it fails, as it does if a result of tfcdo's is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results.json")
        subprocess.run(
            [sys.executable, "-m", "tfcdo.cli.main", "bench", "--json", str(path), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(path.read_text(encoding="utf-8"))


def replace_section(page: str, section: str) -> str:
    """Puts a section in the place of the one with its heading, or at the end.

    Args:
      page: Markdown.
      section: the section; its first line is its heading.

    Returns:
      Markdown.
    """
    heading = section.partition("\n")[0]
    before, found, after = page.partition(f"{heading}\n")
    if not found:
        return f"{page.rstrip()}\n\n{section}".lstrip()
    _, other, rest = after.partition("\n## ")
    return f"{before}{section}" + (f"\n## {rest}" if other else "")


def write_section(path: pathlib.Path, section: str) -> None:
    """Puts a section into a page, which need not be there yet.

    Args:
      path: the page.
      section: see `replace_section`.
    """
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(replace_section(page, section), encoding="utf-8")
