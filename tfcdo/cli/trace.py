"""`tfcdo trace`: runs a script and writes the timeline of its all-reduces."""

from __future__ import annotations

import pathlib
import runpy
import sys
import threading
from concurrent import futures

import click

from tfcdo.cli import options

_MOST_SECONDS = 604_800.0  # A week: threads cannot wait for any number.


@click.command(
    # Later arguments go to the script, even if they look like options.
    context_settings={"allow_interspersed_args": False},
)
@options.option(
    "-o --output",
    options.new_file(".json"),
    "The Chrome trace, for chrome://tracing or ui.perfetto.dev.",
    "trace.json",
)
@options.option(
    "--after",
    options.number(0.0, _MOST_SECONDS, float, metavar="SECONDS"),
    "Time to wait, to skip graph tracing.",
    0.0,
)
@options.option(
    "--seconds",
    options.number(0.001, _MOST_SECONDS, float, metavar="SECONDS"),
    "Longest time to record.",
    60.0,
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def trace(
    output: pathlib.Path,
    after: float,
    seconds: float,
    script: pathlib.Path,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT and write what its all-reduces did, edge by edge.

    The script runs in this process, under TensorFlow's profiler. At the end a summary is printed on
    standard error: the share of a step in all-reduces, the part of it that does not overlap with
    other ops, and the slowest edge. The exit status is the script's.
    """
    with options.quiet_start():
        import tensorflow as tf

        from tfcdo.tracing import recording
    began, ended = threading.Event(), threading.Event()
    place = output.absolute()  # The script may change folders.

    def record() -> recording.Trace | None:
        try:
            if ended.wait(after):
                return None
            with options.writing(output), recording.trace(place) as traced:
                began.set()
                ended.wait(seconds)
            return traced
        finally:
            began.set()

    recorded = futures.ThreadPoolExecutor(1).submit(record)
    if not after:
        began.wait()
    try:
        return _run(script, arguments)
    finally:
        # Also where the user has interrupted the script.
        ended.set()
        with options.reported(click.ClickException, tf.errors.OpError, about="not recorded: "):
            traced = recorded.result()
        if traced:
            click.echo(f"tfcdo: {traced.summary}\ntfcdo: wrote {output}", err=True)
        else:
            click.echo(f"tfcdo: the script ended before --after {after:g} s", err=True)


def _run(script: pathlib.Path, arguments: tuple[str, ...]) -> int:
    """Runs a script as Python would; returns the status that it exits with."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    path = str(script.absolute())  # The script's `__file__`.
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            click.echo(error.code, err=True)
            return 1
        return error.code or 0
    except Exception as error:
        # Reported here, as the command line takes some errors for its own: what the script does not
        # find is no file of the command's, nor is a module that it lacks one of tfcdo's.
        frames = error.__traceback__
        # Without the frames above the script's: without any, if it could not be read as Python.
        while frames is not None and frames.tb_frame.f_code.co_filename != path:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0
