"""Shared by tests of commands: runs `tfcdo` in this process and reads what it prints."""

import contextlib
import io
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple
from unittest import mock

from absl import logging
from absl.testing import parameterized

from tfcdo.cli import commands
from tfcdo.plan import packed_trees


class Finished(NamedTuple):
    status: int
    output: str
    errors: str


def run_tfcdo(*arguments: str, stdin: str | None = None) -> Finished:
    """Runs a command, neither of whose outputs is a terminal."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        # Warnings are logged, as in `tfcdo`, where a test that runs alone logs all.
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.WARNING)
        given = sys.stdin if stdin is None else io.StringIO(stdin)
        stack.enter_context(mock.patch.object(sys, "stdin", given))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        status = commands.run(arguments)
    return Finished(status, output.getvalue(), errors.getvalue())


def check_refused(finished: Finished, pattern: str) -> None:
    (line,) = finished.errors.splitlines()
    assert finished[:2] == (2, "") and re.search(f"^tfcdo: .*{pattern}", line), (pattern, finished)


def rows_of_table(output: str) -> dict[str, list[str]]:
    """Returns the cells of a table with lines between its columns, by the first of each row."""
    _, _, body = output.partition("┼")
    lines = [line for line in body.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    return {name: rest for name, *rest in cells}


class CommandTestCase(parameterized.TestCase):
    """A test of commands, which has a folder, and plans in less time."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(mock.patch.object(packed_trees, "_TASKS", 5_000))

    def output_of(self, *arguments: str, stdin: str | None = None) -> str:
        status, output, errors = run_tfcdo(*arguments, stdin=stdin)
        self.assertEqual(status, 0, output + errors)
        return output

    def assert_refused(self, pattern: str, *arguments: str) -> None:
        """Checks that wrong arguments get one line, which fits a pattern, and status 2."""
        check_refused(run_tfcdo(*arguments), pattern)
