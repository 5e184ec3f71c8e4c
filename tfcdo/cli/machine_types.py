"""Reads the machines and devices that a user names on the command line."""

from __future__ import annotations

import re
import sys
from typing import Any

import click

from tfcdo.cli import options
from tfcdo.cli.here import Here
from tfcdo.plan.evaluation import check_num_devices
from tfcdo.topology.measurement import MOST_DEVICES
from tfcdo.topology.presets import PRESETS, preset
from tfcdo.topology.topology import Topology

# Limited to 9 digits: int() refuses huge strings.
_NUMBER = r"\d{1,9}"


class Devices(options.ParamType):
    """Device numbers separated by commas."""

    name = "devices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Reads the numbers."""
        if not re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", str(value)):
            self.fail(f"{value!r} is not a list of device numbers such as 0,1,2")
        return tuple(map(int, value.split(",")))


class Machine(options.ParamType):
    """A preset, a file that describes a machine, or this one."""

    name = "topology"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Topology | Here:
        """Looks the preset up, or reads the file."""
        name, _, count = str(value).partition(":")
        if name == "here" and re.fullmatch(r"([1-9]\d?)?", count):
            if count and int(count) > MOST_DEVICES:
                self.fail(f"{value!r}: at most {MOST_DEVICES} devices can be measured", param, ctx)
            return Here(int(count) if count else None)
        try:
            if name in PRESETS and re.fullmatch(f"({_NUMBER})?", count):
                # Checked first, as making the links of many devices takes seconds.
                check_num_devices(name, int(count or 1))
                return preset(name, int(count) if count else None)
        except ValueError as error:
            self.fail(str(error))
        text = self._read(value)
        is_json = text.lstrip().startswith(("{", "["))
        read = Topology.from_json if is_json else Topology.from_nvidia_smi
        try:
            return read(text)
        except ValueError as error:
            self.fail(f"{value}: {error}")

    def _read(self, value: str) -> str:
        try:
            if value == "-":
                if sys.stdin is None:
                    self.fail("-: standard input is closed")
                text = sys.stdin.read()
            else:
                # Not a Path: it takes an empty name for the current folder.
                with open(value, encoding="utf-8") as file:  # noqa: PTH123
                    text = file.read()
        except FileNotFoundError:
            self.fail(
                f"{value!r} is neither a file nor a known machine: {', '.join((*PRESETS, 'here'))}"
            )
        except UnicodeDecodeError:
            self.fail(f"{value}: expected text; the file holds something else")
        except OSError as error:
            self.fail(f"{value}: {error.strerror}")
        return text.removeprefix("\ufeff")
