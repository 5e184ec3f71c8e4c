"""Finds the sub-commands of `tfcdo` by name, each imported when it is needed, and runs them."""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from tfcdo.version import __version__

# Each is a function in a module, both of this name.
COMMANDS = ("doctor", "bench", "plan", "trace", "launch")


class LazyGroup(click.Group):
    """A click group that imports a sub-command's module when the sub-command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names the sub-commands, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Imports one sub-command."""
        if cmd_name not in COMMANDS:
            raise click.UsageError(f"no command {cmd_name!r}: there are {', '.join(COMMANDS)}", ctx)
        module = importlib.import_module(f"tfcdo.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="tfcdo", message="%(prog)s %(version)s")
@click.pass_context
def tfcdo(context: click.Context) -> None:
    """Train Keras on several devices and hosts, with one-device results."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs `tfcdo` with these arguments."""
    if sys.stdout is None:
        return _complain("standard output is closed")
    if sys.stderr is None:  # It is closed: another file would get its number.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_SPELLED)
    try:
        # Not click's standalone mode, which prints three lines where one says it all.
        status = tfcdo.main(list(arguments), prog_name="tfcdo", standalone_mode=False) or 0
        sys.stdout.flush()
    except click.UsageError as error:
        # click does not tell the command of an option whose value is missing.
        names = [name for name in arguments[:1] if error.ctx is None and name in COMMANDS]
        command = error.ctx.command_path if error.ctx else " ".join(["tfcdo", *names])
        message = error.format_message().rstrip(".?")
        return _complain(f"{message}; see {command} --help", error.exit_code)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except click.Abort:
        return _complain("interrupted", 130)
    except OSError as error:
        name = error.filename
        if name is None and error.errno in _ERRORS_OF_OUTPUT:
            # The rest of its buffer would fail, and be reported, once more at the exit.
            name, sys.stdout = "standard output", io.StringIO()
        reason = error.strerror or str(error)
        return _complain(f"{name}: {reason}" if name else reason)
    return status


# Errors of a write, which names no file. Too few file handles give others without a name.
_ERRORS_OF_OUTPUT = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)


# Letters that the terminal does not have, such as one of a file's name, stop no command.
_SPELLED = "tfcdo.spelled"
_ASCII = str.maketrans({"→": "->", "µ": "u", "±": "+-"})


def _spell(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_ASCII)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_SPELLED, _spell)


def _complain(message: str, status: int = 1) -> int:
    click.echo(f"tfcdo: {message}", err=True)
    return status
