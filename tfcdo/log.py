"""Telling the user once what cannot be done as asked, or what was found out."""

from __future__ import annotations

import functools

from absl import logging


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning, the first time that this process has it to say.

    Args:
      message: the whole line: what happens instead of what was asked for, why, and the remedy.
    """
    logging.warning("tfcdo: %s", message)


@functools.lru_cache(maxsize=256)
def info_once(message: str) -> None:
    """Logs what was found out, the first time that this process has it to say.

    Args:
      message: the whole line.
    """
    logging.info("tfcdo: %s", message)
