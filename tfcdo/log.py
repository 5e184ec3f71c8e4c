"""Logs once each result of a detection, and each request that cannot be met."""

from __future__ import annotations

import functools

from absl import logging


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning the first time that this process calls it with this message."""
    logging.warning("tfcdo: %s", message)


@functools.lru_cache(maxsize=256)
def info_once(message: str) -> None:
    """Logs a piece of information the first time that this process calls it with this message."""
    logging.info("tfcdo: %s", message)
