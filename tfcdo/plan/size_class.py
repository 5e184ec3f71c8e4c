"""Size classes: sizes that differ little share what was planned for one of them."""

from __future__ import annotations

import math

# 1, 2**(1/16), 2**(2/16), ..., in thousandths: sizes may be too large for a float.
_ROOTS = tuple(round(1000 * 2 ** (part / 16)) for part in range(16))


def size_class(num_bytes: int, per_doubling: int = 4) -> int:
    """Returns the size that stands for all sizes of a class.

    There are `per_doubling` classes between a size and its double, a divisor of 16. By default no
    size is further from its class than an eighth, apart from a few bytes.

    Example:
      >>> [size_class(size) for size in (0, 1, 99_000_000, 100_000_000, 101_000_000, 110_000_000)]
      [0, 1, 94891933, 94891933, 94891933, 112877109]
      >>> size_class(100_000_000, per_doubling=1) == 2**27
      True
    """
    if not num_bytes:
        return 0
    # Through the finest classes, so that all sizes of one of them share a class of any fineness.
    step = round(per_doubling * round(len(_ROOTS) * math.log2(num_bytes)) / len(_ROOTS))
    doublings, part = divmod(step, per_doubling)
    return (_ROOTS[part * len(_ROOTS) // per_doubling] << doublings) // 1000
