"""The exchanges that the contract is tested with: all of tfcdo's, and the documentation's."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfcdo.exchange import Blocks, Cast, Exchange, PowerSGD, Sum, TopK

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own-exchange.md"


def _of_the_page() -> Any:
    names: dict[str, Any] = {"__name__": "own_exchange"}
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(blocks[0], _PAGE.name, "exec", dont_inherit=True), names)
    return names["Gathered"]


Gathered = _of_the_page()


@dataclasses.dataclass(frozen=True)
class Case:
    exchange: Exchange
    relative: float  # Error of a sum, a part of the sum over hosts of the largest magnitudes.
    keeps: tuple[str, ...] = ()  # State that holds, in the values' shape, all that is not sent.
    devices: int = 2  # Of each host, in hosts_test.
    is_late: bool = False  # Its first steps are exact.


CASES = {
    "Sum": Case(Sum(), 2.0**-22),
    "Cast": Case(Cast("bfloat16", True), 2.01 * 2.0**-8, devices=1),
    "Blocks": Case(Blocks(error_feedback=True), 2.01 / 254),
    "PowerSGD": Case(PowerSGD(2), 1.5, ("error",)),
    "PowerSGD late": Case(PowerSGD(2, start_step=2), 2.0**-22, devices=1, is_late=True),
    "TopK": Case(TopK(0.01), 1.0, ("error",), devices=1),
    "Gathered": Case(Gathered(), 2.0**-8 + 2.0**-22, ("error",)),
}
# A matrix, a kernel, vectors, and a matrix that PowerSGD sends as it is.
SHAPES = ((64, 48), (48,), (3, 3, 8, 24), (700,), (4, 5))
STEPS = 8


def shapes_for(
    exchange: Exchange, order: Sequence[int] = range(len(SHAPES))
) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the tensors that an exchange gets for a pack of all values."""
    if exchange.whole_values:
        return tuple(SHAPES[index] for index in order)
    return ((sum(int(np.prod(shape)) for shape in SHAPES),),)


def numbers(replica: int, step: int, dtype: str = "float32") -> list[np.ndarray]:
    draw = np.random.default_rng([replica, step])
    return [draw.normal(size=shape).astype(dtype) for shape in SHAPES]


def given(
    exchange: Exchange, values: Sequence[np.ndarray], order: Sequence[int] = range(len(SHAPES))
) -> list[np.ndarray]:
    values = [values[index] for index in order]
    return values if exchange.whole_values else [np.concatenate([np.ravel(v) for v in values])]
