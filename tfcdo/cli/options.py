"""Options and consoles of the commands. A letter means the same in all, as in nccl-tests."""

from __future__ import annotations

import contextlib
import decimal
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich import progress as rich_progress
from rich.console import Console

from tfcdo import checks

if TYPE_CHECKING:
    from tfcdo.bench.devices import ChosenDevices

_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3}
# nccl-tests' unit, and the other units of GNU's coreutils.
_KILO = {"": 1024, "IB": 1024, "B": 1000}
# Devices, or workers, that the bench and the doctor start on a machine.
MOST_DEVICES = 16
_MOST_SAMPLES = 10**6  # More would not end in a day.


@contextlib.contextmanager
def reported(
    kind: type[click.ClickException], *errors: type[Exception], about: str = ""
) -> Iterator[None]:
    """Raises errors of some types as one of click's, which gets one line."""
    try:
        yield
    except errors as error:
        raise kind(f"{about}{error}") from error


def parsed(name: str, parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes the type of a value that a function reads; its ValueError refuses the text."""

    def convert(text: Any) -> Any:
        with reported(click.BadParameter, ValueError):
            return parse(text)

    convert.__name__ = name  # The help shows it.
    return convert


def number(
    least: float, most: float = math.inf, kind: Callable[[str], float] = int, metavar: str = "N"
) -> Callable[[Any], Any]:
    """Makes the type of a number in a range."""
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ValueError(f"expected a number {limits}; got {text!r}")
        return value

    return parsed(metavar, read)


def parse_size(text: str) -> int:
    """Reads a number of bytes such as 4096, 64K (65536) or 100MB (100000000)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(|B|(?<=[KMG])IB)", text.upper())
    # A Decimal accepts any number of digits.
    unit = _KILO[found[3]] ** _EXPONENTS[found[2]] if found else 0
    size = round(decimal.Decimal(found[1]) * unit) if found else 0
    if size > checks.LARGEST_INT:  # TensorFlow cannot count them.
        raise ValueError("there can be at most 2^63 - 1 bytes")
    if not size:
        raise ValueError(f"{text!r} is not a number of bytes such as 4096, 64K, 1.5G or 100MB")
    return size


def parse_bandwidth(text: str) -> float:
    """Reads bytes per second, such as 12.5G (10^9), or bits, such as 100gbit."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([KMG]?)(BIT|B|B/S)?", text.upper())
    number = float(found[1]) * 1000 ** _EXPONENTS[found[2]] if found else 0.0
    if not found or not number:
        raise ValueError(f"{text!r} is not a bandwidth such as 12.5G (bytes per second) or 100gbit")
    return number / 8 if found[3] == "BIT" else number


SIZE = parsed("size", parse_size)


def new_file(*suffixes: str) -> Callable[[Any], Any]:
    """Makes the type of a file to write, which is checked before time is spent on its content."""

    def check(value: str) -> pathlib.Path:
        path = pathlib.Path(value)
        if path.suffix not in suffixes:
            raise ValueError(f"{value!r} does not end in {' or '.join(suffixes)}")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {str(path.parent)!r}")
        if path.is_dir():
            raise ValueError(f"{value!r} is a folder, not a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"there is no permission to write {value!r}")
        return path

    return parsed("file", check)


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Names a file in an error that does not: without a name it is taken for standard output's."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def option(names: str, kind: Any, text: str, default: Any = None, **settings: Any) -> Any:
    """Makes an option, with names such as "-n --iters iterations"; the help shows its default."""
    if default is not None:
        settings |= {"default": default, "show_default": True}
    return click.option(*names.split(), type=kind, help=text, **settings)


def make_console(stderr: bool = False) -> Console:
    """Makes the console that a sub-command prints on."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 120  # A pipe or a file has none.
    return Console(stderr=stderr, highlight=False, emoji=False, markup=False, width=width)


@contextlib.contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is being done: on a terminal a message, else lines of news."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda news: console.print(news, soft_wrap=True)
        return
    with console.status(message, spinner="line") as shown:
        yield shown.update


@contextlib.contextmanager
def progress() -> Iterator[Callable[..., Iterable[Any]]]:
    """Shows on standard error how far sequences are: bars, or lines for the outermost one."""
    console = make_console(stderr=True)
    # Without refreshes by a thread, which would run in the middle of a measurement.
    with rich_progress.Progress(
        console=console, transient=True, disable=not console.is_terminal, auto_refresh=False
    ) as bars:

        def track(sequence: Sequence[Any], *, description: str) -> Iterable[Any]:
            has_lines = not console.is_terminal and not bars.task_ids
            task = bars.add_task(description, total=len(sequence))
            bars.refresh()
            for number, item in enumerate(bars.track(sequence, task_id=task), 1):
                if has_lines:
                    console.print(f"{description}: {number} of {len(sequence)}")
                yield item
            bars.remove_task(task)

        yield track


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Holds back the output to standard error while TensorFlow is imported and started."""
    # The C++ half of recent versions also logs before it has read this, straight to descriptor 2.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except (click.ClickException, KeyboardInterrupt):
            raise
        except BaseException:  # The output may say why.
            held_back.seek(0)
            os.write(shown, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)


def start_tensorflow(count: int | None) -> ChosenDevices:
    """Starts TensorFlow and chooses devices: None for all GPUs, or some virtual CPU devices."""
    os.environ.pop("TF_CONFIG", None)  # It is about this machine alone.
    with status("Starting TensorFlow ..."), quiet_start():
        import tensorflow as tf

        from tfcdo.bench.devices import choose_devices

        tf.get_logger().setLevel("ERROR")
        with reported(click.ClickException, RuntimeError):
            devices = choose_devices(count)
        tf.config.list_logical_devices()
    return devices


def refuse(*cases: tuple[object, str]) -> None:
    """Raises a UsageError with the reason of the first case that is true."""
    for is_refused, reason in cases:
        if is_refused:
            raise click.UsageError(reason)


# Options that the commands of the bench share.
ITERATIONS = option(
    "-n --iters iterations",
    number(1, _MOST_SAMPLES),
    "Samples of each implementation, taken in turn.",
    20,
)
WARMUP = option("-w --warmup", number(0, _MOST_SAMPLES), "Samples before those that count.", 5)
JSON_FILE = option("-J --json json_file", new_file(".json"), "File for the results.")
