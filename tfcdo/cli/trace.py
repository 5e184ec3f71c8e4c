"""`tfcdo trace`: runs a script and writes what its all-reduces really did."""

from __future__ import annotations

import pathlib
import runpy
import sys
import threading
import types
from typing import TYPE_CHECKING

import click

from tfcdo.cli import options

if TYPE_CHECKING:
    from tfcdo.tracing.recording import Recording


@click.command(
    # Later arguments go to the script, even if they look like options.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--output",
    type=options.NewFile(".json"),
    default="trace.json",
    show_default=True,
    help="The Chrome trace, for chrome://tracing or ui.perfetto.dev.",
)
@click.option(
    "--draw",
    "picture",
    type=options.NewFile(".png", ".svg"),
    help="Picture of a typical step and its plan: .png or .svg",
)
@click.option(
    "--after",
    type=click.FloatRange(0.0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to wait, to skip graph tracing.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.0, min_open=True),
    default=60.0,
    show_default=True,
    help="Longest recording.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def trace(
    output: pathlib.Path,
    picture: pathlib.Path | None,
    after: float,
    seconds: float,
    script: pathlib.Path,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT and write what its all-reduces did, edge by edge.

    The script runs in this process, under TensorFlow's profiler. At the end its summary is
    printed: the share of a step in all-reduces, how much of that nothing else hides, and the
    slowest edge. The exit status is the script's.
    """
    if picture:
        options.require_matplotlib()
    recorder = _Recorder(seconds)
    begin = threading.Timer(after, recorder.start)
    begin.daemon = True
    if after:
        begin.start()
    else:
        recorder.start()
    try:
        status = _run(script, arguments)
    finally:
        begin.cancel()
        recording = recorder.finish()
        if recording is None:
            click.echo(f"tfcdo: the script ended before --after {after:g} s", err=True)
        else:
            from tfcdo.plot import trace as trace_plot
            from tfcdo.tracing import chrome

            chrome.write(recording, output)
            if picture:
                trace_plot.save(recording, picture)
            click.echo(f"tfcdo: {recording.summary}")
            written = f"{output} and {picture}" if picture else str(output)
            click.echo(f"tfcdo: wrote {written}")
    return status


class _Recorder:
    """Records for a limited time, whichever thread begins and ends it."""

    def __init__(self, seconds: float) -> None:
        with options.quiet_start():
            from tfcdo.tracing.recording import Profiler

        self._profiler = Profiler()
        self._recording: Recording | None = None
        self._lock = threading.Lock()
        self._is_running = False
        self._end = threading.Timer(seconds, self._stop)
        self._end.daemon = True

    def start(self) -> None:
        """Begins to record."""
        with self._lock:
            self._profiler.start()
            self._is_running = True
        self._end.start()

    def _stop(self) -> None:
        with self._lock:
            if self._is_running:
                self._is_running = False
                self._recording = self._profiler.stop()

    def finish(self) -> Recording | None:
        """Ends, if it has begun and not ended yet; returns the recording, or None."""
        self._end.cancel()
        self._stop()
        return self._recording


def _run(script: pathlib.Path, arguments: tuple[str, ...]) -> int:
    """Runs a script as Python would; returns the status that it exits with."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.absolute()))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            click.echo(error.code, err=True)
            return 1
        return error.code or 0
    except Exception as error:
        # Reported here, as the command line takes some errors for its own: what the script does not
        # find is no file of the command's, nor is a module that it lacks one of tfcdo's.
        error.__traceback__ = _of_script(error.__traceback__, script)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _of_script(
    frames: types.TracebackType | None, script: pathlib.Path
) -> types.TracebackType | None:
    """Leaves out the frames above the script's: all, if it could not be read as Python."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames
