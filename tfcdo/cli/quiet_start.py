"""Starting TensorFlow without a screenful of its log in front of a command's own output."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

import click


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Holds back what is written to standard error while TensorFlow is imported and started.

    `TF_CPP_MIN_LOG_LEVEL` alone does not do it: the C++ half of recent versions also logs before
    it has read that variable, straight to file descriptor 2. If the block raises, what was held
    back is shown, unless it is about the user's options or from the user's keyboard.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except (click.ClickException, KeyboardInterrupt):
            raise
        except BaseException:
            held_back.seek(0)
            os.write(shown, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
