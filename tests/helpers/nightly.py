"""Cases that only `make test-nightly` runs: in each run, others execute the same lines."""

from __future__ import annotations

import os
from typing import Any


def cases(*given: Any) -> tuple[Any, ...]:
    """Returns the cases where TFCDO_NIGHTLY is set, and otherwise none."""
    return given if "TFCDO_NIGHTLY" in os.environ else ()
