"""DiLoCo: hosts train alone, and exchange the changes of the parameters after `every` steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfcdo import checks


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Hosts train alone, and exchange the differences of their parameters every `every` updates.

    For `outer=` of `tfcdo.MultiWorkerMirroredStrategy`. docs/wire.md, "Send less often", says what
    hosts share between two exchanges, and what is saved.

    Args:
      every: the number of updates of the weights from one exchange to the next.
      optimizer: makes the outer Keras optimizer, whose gradient is the mean over the hosts of the
        last common parameters less the current ones: a function without arguments, or a name or
        configuration that `keras.optimizers.get` takes. It is called on each host, for
        each fragment, after the strategy, before which TensorFlow must not start. None for
        `SGD(0.7, momentum=0.9, nesterov=True)`.
      fragments: the number of groups that the parameters are divided into. Each group is exchanged
        every `every` updates, and a group every `every / fragments` updates. The bytes are the
        same, in smaller portions. With several, a group is sent while the next step is computed;
        what this step trains is added to the result.

    Raises:
      TypeError: if a number is not an int, or `optimizer` is of another type.
      ValueError: if a number is less than 1, or `fragments` does not divide `every`.

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
      arXiv 2311.08105; "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512
      (fragments; an overlap of one step).

    Example:
      >>> DiLoCo(every=50, fragments=5).fragments
      5
    """

    every: int
    optimizer: Callable[[], Any] | Mapping[str, Any] | str | None = None
    fragments: int = 1

    def __post_init__(self) -> None:
        checks.check_int("every", self.every, at_least=1)
        checks.check_int("fragments", self.fragments, at_least=1)
        if self.every % self.fragments:
            raise ValueError(
                f"fragments must divide every, {self.every}; got fragments={self.fragments}"
            )
        one = self.optimizer
        if one is not None and not isinstance(one, (str, Mapping)) and not callable(one):
            raise TypeError(
                "optimizer must be a function that makes a Keras optimizer, such as "
                "lambda: keras.optimizers.SGD(0.7), because an optimizer has variables and "
                "TensorFlow must not start before the strategy; or a name or configuration that "
                f"keras.optimizers.get takes, or None; got {one!r}"
            )
