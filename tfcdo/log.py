"""What users read: log lines that appear once, and numbers with their units."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from absl import logging

_Units = Sequence[tuple[float, str]]
_BYTE_UNITS: _Units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIME_UNITS: _Units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning the first time that this process calls it with this message."""
    logging.warning("tfcdo: %s", message)


@functools.lru_cache(maxsize=256)
def info_once(message: str) -> None:
    """Logs a piece of information the first time that this process calls it with this message."""
    logging.info("tfcdo: %s", message)


def format_count(number: int, noun: str) -> str:
    """Writes a number of things, such as "1 pack" or "3,000 packs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(size: int) -> str:
    """Writes a number of bytes in powers of 1000, with three digits or more."""
    if size < _BYTE_UNITS[-1][0]:
        return f"{size} B"
    return _with_unit(size, 3, _BYTE_UNITS)


def format_seconds(seconds: float) -> str:
    """Writes a time with four digits."""
    return _with_unit(seconds, 4, _TIME_UNITS) if seconds else "0 s"


def _with_unit(value: float, digits: int, units: _Units) -> str:
    # Rounded before the unit is chosen: 999,999 bytes are 1.00 MB, not 1000 kB.
    rounded = float(f"{value:.{digits}g}")
    unit, name = next((unit for unit in units if rounded >= unit[0]), units[-1])
    scaled = rounded / unit
    number = f"{scaled:.0f}" if scaled >= 10**digits else f"{scaled:#.{digits}g}".rstrip(".")
    return f"{number} {name}"
