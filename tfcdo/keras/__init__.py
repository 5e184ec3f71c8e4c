"""Additions for Keras, next to the strategies."""

from __future__ import annotations

from tfcdo.keras.backup import BackupAndRestore
from tfcdo.keras.callbacks import TraceSummary
from tfcdo.keras.data_order import resumable_dataset
from tfcdo.strategies import set_distribution
from tfcdo.training.jit import jit_compile
from tfcdo.training.losses import global_batch

__all__ = [
    "BackupAndRestore",
    "TraceSummary",
    "global_batch",
    "jit_compile",
    "resumable_dataset",
    "set_distribution",
]
