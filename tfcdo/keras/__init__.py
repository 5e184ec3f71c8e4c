"""Additions for Keras, next to the strategies."""

from __future__ import annotations

from tfcdo.keras.backup import BackupAndRestore
from tfcdo.keras.data_order import resumable_dataset
from tfcdo.keras.distribution import set_distribution
from tfcdo.keras.trace_summary import TraceSummary
from tfcdo.training.global_batch import global_batch
from tfcdo.training.jit import jit_compile

__all__ = [
    "BackupAndRestore",
    "TraceSummary",
    "global_batch",
    "jit_compile",
    "resumable_dataset",
    "set_distribution",
]
