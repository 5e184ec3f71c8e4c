"""The program of `warm_python`: hands what it was given to the server, and ends as it does."""

import array
import json
import os
import signal
import socket
import sys

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str, arguments: list[str]) -> int:
    """Has the server run Python's arguments; returns the status, below 0 for a signal."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: server.send(bytes([received])))
    # The server ends the process when this socket closes, as it does if this one is killed.
    # pathlib takes longer to import than all else here.
    content = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()  # noqa: PTH109
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([len(content).to_bytes(4, "big")], rights)
    server.sendall(content)
    return int(server.recv(16) or -signal.SIGKILL)


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2:])
    if status < 0:
        if -status in _FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
