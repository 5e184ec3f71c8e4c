"""Additions for Keras: training on K replicas of a strategy ends as on one device."""

from __future__ import annotations

from tfcdo import keras_steps
from tfcdo.keras.backup import BackupAndRestore
from tfcdo.keras.data_order import resumable
from tfcdo.keras.in_sync import CheckInSync
from tfcdo.keras.optimizer import DistributedOptimizer
from tfcdo.keras.statistics import SynchronizeStatistics
from tfcdo.keras.trace_summary import TraceSummary
from tfcdo.keras.uneven import weight_by_examples
from tfcdo.xla import jit_compile

__all__ = [
    "BackupAndRestore",
    "CheckInSync",
    "DistributedOptimizer",
    "SynchronizeStatistics",
    "TraceSummary",
    "jit_compile",
    "resumable",
    "weight_by_examples",
]

keras_steps.install()
