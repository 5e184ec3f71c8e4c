"""The rows of docs/compat.md: outcomes of cases, in few words."""

from __future__ import annotations

import re
from typing import NamedTuple

# A table of three such columns fits a screen.
MAX_CELL = 56
_MAX_MESSAGE = 140


class Row(NamedTuple):
    """The outcome of a case: ✓ if the user got a correct result, or the clear error there is."""

    name: str
    mark: str
    text: str

    @property
    def cell(self) -> str:
        """Returns the cell of a table."""
        return escaped(f"{self.mark} {_shortened(self.text, MAX_CELL)}")

    @property
    def verdict(self) -> str:
        """Returns the mark with the first number, or the kind of the error."""
        return escaped(f"{self.mark} {re.split('[,:]', self.text)[0]}")


def escaped(text: str) -> str:
    """Returns text for a cell or a line of Markdown."""
    # Half a pair of backquotes would turn what follows into code.
    text = text.replace("`", "") if text.count("`") % 2 else text
    return text.replace("|", "\\|").replace("\n", " ")


def first_words(message: str) -> str:
    """Returns the beginning of an error message, without what differs from run to run."""
    # The rest is the stack of the run; text between \033 and m is a color.
    message = re.sub("\033\\[[0-9;]*m", "", message).partition("defined at (most recent")[0]
    words = " ".join(message.replace("{{function_node ", "").split())
    for name in ("/job:localhost/replica:0/task:0/device:", "__wrapped__"):
        words = words.replace(name, "")
    return _shortened(words, _MAX_MESSAGE)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
