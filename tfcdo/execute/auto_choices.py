"""Checks what a user of `AutoAllReduce` chooses after all, and puts it into the config."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfcdo.execute.config import AllReduceConfig
from tfcdo.execute.config import read_plan


def with_choices(
    config: AllReduceConfig, plan: Any, nccl: Any, backward_seconds: Any
) -> AllReduceConfig:
    """Returns the config of an `AutoAllReduce` with these arguments.

    Args:
      config: that of all defaults.
      plan: see `AutoAllReduce`, as are the others.
      nccl: whether NCCL may be taken.
      backward_seconds: the length of the backward pass.

    Raises:
      TypeError: if one of them is of another type.
      ValueError: if one of them has a wrong value, or plan and backward pass are both given.
    """
    if not isinstance(nccl, bool):
        raise TypeError(f"nccl must be True or False; got {nccl!r}")
    if not nccl:
        config = dataclasses.replace(config, nccl="never")
    if backward_seconds is not None:
        _check_backward_seconds(backward_seconds, plan)
        config = dataclasses.replace(config, backward_seconds=float(backward_seconds))
    if plan is not None:
        saved = read_plan(plan)
        config = dataclasses.replace(config, algorithm=saved.schedule, nccl="never", saved=saved)
    return config


def _check_backward_seconds(seconds: Any, plan: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"backward_seconds must be a number of seconds or None; got {seconds!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"backward_seconds must be above 0; got {seconds}")
    if plan is not None:
        raise ValueError(
            f"backward_seconds must be None beside plan, whose packs are fixed; got {seconds} and "
            f"plan={plan!r}"
        )
