"""Checks what a user of `AutoAllReduce` chooses after all, and puts it into the config."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.config import read_plan


def with_choices(config: AllReduceConfig, plan: Any, nccl: Any) -> AllReduceConfig:
    """Returns the config of an `AutoAllReduce` with these arguments.

    Args:
      config: that of all defaults.
      plan: see `AutoAllReduce`, as are the others.
      nccl: whether NCCL may be taken.

    Raises:
      TypeError: if one of them is of another type.
      ValueError: if one of them has a wrong value.
    """
    if not isinstance(nccl, bool):
        raise TypeError(f"nccl must be True or False; got {nccl!r}")
    if not nccl:
        config = dataclasses.replace(config, nccl="never")
    if plan is not None:
        saved = read_plan(plan)
        config = dataclasses.replace(config, algorithm=saved.schedule, nccl="never", saved=saved)
    return config
