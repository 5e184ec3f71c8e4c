"""A process between the launcher and one worker, which leaves nothing behind: a script.

Each byte of its input is a signal for the worker, which needs its children until it has a backup.
At the end of the input, also when the launcher is killed, it kills the worker. When the worker has
ended, it first writes how and when to a named pipe, and then ends all that the worker has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A process that is not ours to kill (setuid), or that the kernel cannot end now, is left then.
_ROUNDS = 5
_SECONDS_A_ROUND = 1.0
# Signals that the launcher only passes on to all workers, and with those that end the job.
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *PASSED_SIGNALS)

_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process, rather than process 1, the parent of descendants that lose theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kills every process that descends from this one, and reaps them."""
    for _ in range(_ROUNDS):
        descendants = psutil.Process().children(recursive=True)
        if not descendants:
            return
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()
        # One that was an orphan's child becomes ours now, and is reaped in the next round.
        psutil.wait_procs(descendants, timeout=_SECONDS_A_ROUND)


def handle(handler: Callable[..., Any]) -> None:
    """Handles signals, except those that `nohup` and the like ignore."""
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def main(end: str, command: Sequence[str]) -> int:
    """Runs a worker until it ends or the launcher does; returns its status as a shell does."""
    adopt_orphans()
    wakeups, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    # SIGCHLD is ignored by default, and what is ignored wakes nobody.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # A service manager sends a SIGTERM to each process of a job. The launcher passes it on.
    handle(lambda number, frame: None)
    signal.set_wakeup_fd(wakeup_writer)

    guard = os.getpid()
    worker = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _end_with_parent(guard),
    )
    sources = [sys.stdin.fileno(), wakeups]
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # It is left to be reaped.
    while not (result := os.waitid(os.P_ALL, 0, ended)) or result.si_pid != worker.pid:
        if result:
            os.waitpid(result.si_pid, 0)  # An orphan.
            continue
        for source in select.select(sources, [], [])[0]:
            received = os.read(source, 4096)
            if source == wakeups:
                continue
            if not received:
                sources.remove(source)
            for number in received or [signal.SIGKILL]:
                # Not reaped yet, so its number is still its own.
                os.kill(worker.pid, number)
    status = result.si_status + (0 if result.si_code == os.CLD_EXITED else 128)
    with contextlib.suppress(OSError):  # The launcher is gone.
        writer = os.open(end, os.O_WRONLY | os.O_NONBLOCK)
        os.write(writer, f"{status} {time.monotonic()}\n".encode())
    worker.wait()
    end_descendants()
    if sys.stdin.fileno() not in sources:  # The launcher is gone, and its pipe's folder is left.
        shutil.rmtree(pathlib.Path(end).parent, ignore_errors=True)
    return status


def _end_with_parent(parent: int) -> None:
    """Asks for a SIGKILL when the guard ends, in the worker before it becomes its program."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
