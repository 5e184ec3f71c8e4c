"""The rows of docs/compat.md: outcomes of cases, in few words."""

from __future__ import annotations

import re
from typing import NamedTuple


class Row(NamedTuple):
    """The outcome of a case: ✓ if the user got a correct result, or the clear error there is."""

    name: str
    mark: str
    text: str

    @property
    def cell(self) -> str:
        """Returns the cell of a table."""
        return f"{self.mark} {self.text}".replace("|", "\\|").replace("\n", " ")


def first_words(message: str) -> str:
    """Returns the beginning of an error message, without what differs from run to run."""
    # The rest is the stack of the run; text between \033 and m is a color.
    message = re.sub("\033\\[[0-9;]*m", "", message).partition("defined at (most recent")[0]
    words = " ".join(message.replace("{{function_node ", "").split())
    for name in ("/job:localhost/replica:0/task:0/device:", "__wrapped__"):
        words = words.replace(name, "")
    return words if len(words) <= 110 else f"{words[:107]}..."
