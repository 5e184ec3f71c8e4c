"""Python processes, forked from one that has imported TensorFlow, which takes 6 s."""

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing
import os
import pathlib
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from typing import Any, NoReturn

import warm_python_client

# The program of a process that others have started, for those that inherit its environment.
VARIABLE = "TFCDO_TESTS_WARM_PYTHON"
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    ["tensorflow", "keras", "tfcdo.strategies", "tfcdo.keras", "tensorflow_quirks"]
)

_lock = threading.Lock()


def run(*arguments: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Runs Python with this process's path and without GPUs until it ends, and keeps its output."""
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    return subprocess.run(
        [executable(), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, **variables},
    )


def run_cold(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python of its own, which has imported nothing, until it ends, and keeps its output."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def executable() -> str:
    """Returns a program to be called as `python` is, with a file, -c CODE or -m MODULE."""
    with _lock:
        return os.environ.get(VARIABLE) or _start()


@functools.cache
def _start() -> str:
    """Starts the process, which ends with this one, and returns its program."""
    folder = pathlib.Path(tempfile.mkdtemp())
    program, address = folder / "python", folder / "socket"
    command = [sys.executable, "-IS", warm_python_client.__file__, str(address)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        # No daemon, as multiprocessing lets those, and what is forked from them, start nothing.
        server = _FORKING.Process(target=_serve, args=(listener, str(program)), daemon=False)
        server.start()

    def end() -> None:
        server.kill()
        for path in (program, address):
            path.unlink()
        folder.rmdir()

    atexit.register(end)
    return str(program)


def _serve(listener: socket.socket, program: str) -> None:
    """Forks a process for each client, until it is killed or the process that started it ends."""
    sys.executable = program
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # They need not be waited for.
    importlib.import_module("tensorflow_quirks").end_iterators_at_once()
    gc.freeze()  # So that no collection in a fork copies the pages of what was imported.
    gc.set_threshold(10_000, 10, 10)
    starter = multiprocessing.parent_process()
    assert starter is not None
    watched: list[Any] = [listener, starter.sentinel]
    while listener in select.select(watched, [], [])[0]:
        client = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            _attend(client)
        client.close()


def _attend(client: socket.socket) -> NoReturn:
    """Runs what a client asks for in a process that gets its signals and ends when it does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, rights, _, _ = client.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i", rights[0][2])
    with client.makefile("rb") as stream:
        arguments, folder, variables = json.loads(stream.read(int.from_bytes(size, "big")))
    process = os.fork()
    if process == 0:
        _enter_network(client)
        client.close()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _run(arguments, folder, variables)
    for descriptor in streams:
        os.close(descriptor)
    ended = os.pidfd_open(process)
    while ended not in select.select([client.fileno(), ended], [], [])[0]:
        received = client.recv(1)
        os.kill(process, received[0] if received else signal.SIGKILL)
        if not received:
            os.waitpid(process, 0)
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(str(status).encode())
    os._exit(0)


def _enter_network(client: socket.socket) -> None:
    """Moves this process to the network that the client was started in."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    peer = int.from_bytes(credentials[:4], sys.byteorder)
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        own, theirs = (pathlib.Path("/proc", str(pid), "ns", kind) for pid in ("self", peer))
        if own.samefile(theirs):
            continue
        with theirs.open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns to the {kind} namespace of {peer}")


def _run(arguments: list[str], folder: str, variables: dict[str, str]) -> NoReturn:
    """Does what Python does with its arguments, and ends the process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))
    status: object = 0
    try:
        _run_main(arguments)
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _run_main(arguments: list[str]) -> None:
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [entry for entry in path if entry and entry not in sys.path]
    if arguments[0] == "-u":  # As pytest-xdist starts it.
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[1], "<string>", "exec"), vars(module))
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(pathlib.Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(pathlib.Path(arguments[0]).parent.absolute()))
        runpy.run_path(arguments[0], run_name="__main__")
