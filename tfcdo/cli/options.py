"""What several sub-commands have in common: kinds of options, and where the output goes."""

from __future__ import annotations

import decimal
import fractions
import importlib
import pathlib
import re
import sys
from typing import Any, NoReturn

import click
from rich.console import Console

# What TensorFlow can count.
_LARGEST_SIZE = 2**63 - 1
_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3}


class Size(click.ParamType):
    """A number of bytes such as 4096, 64K, 100M or 1.5G.

    Args:
      kilo: what K stands for, 1000 or 1024; M and G are its powers.
    """

    name = "size"

    def __init__(self, kilo: int) -> None:
        self.kilo = kilo

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads it."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", str(value).upper())
        if not found:
            return self._fail(value, param, ctx)
        # A Decimal takes any number of digits, and a Fraction does not round what it multiplies.
        number = fractions.Fraction(decimal.Decimal(found[1]))
        size = round(number * self.kilo ** _EXPONENTS[found[2]])
        if size > _LARGEST_SIZE:
            self.fail("there can be at most 2^63 - 1 bytes", param, ctx)
        return size or self._fail(value, param, ctx)

    def _fail(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> NoReturn:
        self.fail(f"{value!r} is no number of bytes such as 4096, 64K, 100M or 1.5G", param, ctx)


class NewFile(click.ParamType):
    """A file to write, in a folder that is there.

    Args:
      *suffixes: how its name may end.
    """

    name = "file"

    def __init__(self, *suffixes: str) -> None:
        self.suffixes = suffixes

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> pathlib.Path:
        """Checks it before time is spent on what would go there."""
        path = pathlib.Path(value)
        if path.suffix not in self.suffixes:
            self.fail(f"{value!r} does not end in {' or '.join(self.suffixes)}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        if path.is_dir():
            self.fail(f"{value!r} is a folder, not a file", param, ctx)
        return path


def make_console(width_of_a_pipe: int) -> Console:
    """Where a sub-command prints.

    Args:
      width_of_a_pipe: how many columns it has where there is no terminal whose width to keep to.

    Returns:
      A console that prints what it is given, without colours or pictures of its own. What the user
      named may have square brackets: none are markup.
    """
    width = None if sys.stdout.isatty() else width_of_a_pipe
    return Console(highlight=False, emoji=False, markup=False, width=width)


def need_matplotlib() -> None:
    """Raises ModuleNotFoundError, which `main` tells, before time is spent on what it would draw.

    Raises:
      ModuleNotFoundError: if matplotlib is not installed.
    """
    importlib.import_module("matplotlib")
