"""Sums on the owners of variables, and the variables that the owners send back.

Both are halves of one plan: its packs are reduced up, the root updates, and the variables are
broadcast down the same trees. The update itself is the caller's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfcdo.execute import interpreter, request
from tfcdo.execute.between import Network, begin_exchange
from tfcdo.execute.feedback import Residuals
from tfcdo.execute.interpreter import Runtime
from tfcdo.execute.question import Question
from tfcdo.execute.request import Reduction
from tfcdo.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Owned:
    """Values that were summed on their owners.

    Attributes:
      sums: each sum, on its owner.
      halves: the plans that say how the variables are sent, with their questions.
    """

    sums: tuple[Any, ...]
    halves: tuple[tuple[Question, Plan], ...]

    def send(self, values: Sequence[Any]) -> list[list[Any]]:
        """Sends a tensor, or some rows of it, for each value from its owner: `[value][device]`."""
        results: dict[int, list[Any]] = {}
        for question, plan in self.halves:
            here = [values[position] for position in question.positions]
            arrived = interpreter.broadcast(plan, here, question.devices)
            results.update(zip(question.positions, arrived, strict=True))
        return [results[position] for position in range(len(values))]


def check_owned(
    values: Sequence[Any], owners: Sequence[int], devices: Sequence[str]
) -> list[Reduction]:
    """Checks values, one component a device, of which each is to be summed on one device."""
    pairs = request.check_pairs([(value, value) for value in values])
    return [
        dataclasses.replace(pair, devices=tuple(devices), destinations=tuple(devices), owner=owner)
        for pair, owner in zip(pairs, owners, strict=True)
    ]


def reduce(
    found: Sequence[tuple[Question, Plan]],
    network: Network | None,
    residuals: Sequence[Residuals | None],
) -> Owned:
    """Runs the first half of plans: sums on the owners."""
    sums: dict[int, Any] = {}
    for (question, plan), kept in zip(found, residuals, strict=True):
        runtime = Runtime(begin_exchange(network, plan), kept)
        results = interpreter.run(plan, question.values, question.devices, runtime)
        for position, result, asked in zip(
            question.positions, results, question.batch.requests, strict=True
        ):
            assert asked.owner is not None
            sums[position] = result[asked.owner]
    return Owned(tuple(sums[position] for position in range(len(sums))), tuple(found))
