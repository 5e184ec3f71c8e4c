"""A folder of backups: each is one file, which is complete or not visible."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import secrets
import socket
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from tfcdo import log
from tfcdo.cluster import protocol

Header = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]
Position = tuple[int, int]  # The epoch, and how many of its batches are done.

_NAME = re.compile(r"epoch-(\d+)-batch-(\d+)\.npz")
_OWNER = "training.json"
_MARK = "progress"
_HEADER = "header"
_NAMES = "arrays"
_KEPT = 2


@dataclasses.dataclass(frozen=True)
class Backup:
    """One backup that has been read, and its file."""

    position: Position
    header: Header
    arrays: Arrays
    path: pathlib.Path

    @property
    def name(self) -> protocol.Position:
        """Returns the position and the run: another run's backup may have other bits."""
        return (*self.position, str(self.header.get("run", "")))


class BackupFolder:
    """Writes and reads the backups of one training, and keeps the two newest."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.run = secrets.token_hex(8)  # Names this process's part of the training.

    def take(self) -> None:
        """Makes this process the one that writes here; an earlier one then gets an error."""
        owner = {"run": self.run, "host": socket.gethostname(), "process": os.getpid()}
        entering = self.path / f"owner-{self.run}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for operation in protocol.take_folder():
                if operation == "enter name":
                    with entering.open("wb") as file:
                        file.write(json.dumps(owner).encode())
                        os.fsync(file.fileno())
                    self._publish(entering, _OWNER)
                elif operation == "remove unfinished":
                    for left in self.path.glob("writing-*"):
                        left.unlink(missing_ok=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                entering.unlink()
            raise _with_path(error, "backup_dir", self.path) from error

    def positions(self) -> list[Position]:
        """Returns the positions of all complete backups, the newest first."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = (path.name for path in self.path.iterdir() if not path.is_dir())
            found = map(_NAME.fullmatch, names)
            return sorted(((int(m[1]), int(m[2])) for m in found if m), reverse=True)
        return []

    def file(self, position: Position) -> pathlib.Path:
        """Returns the path of a backup."""
        return self.path / f"epoch-{position[0]:05d}-batch-{position[1]:08d}.npz"

    def newest(self) -> Backup | None:
        """Returns the newest backup that is as it was written; the log names damaged ones."""
        damaged = []
        for position in self.positions():
            path = self.file(position)
            try:
                with path.open("rb") as file:
                    header, arrays = read(file)
            except Exception as error:  # Damaged bytes end in errors of many kinds.
                damaged.append(f"{path.name} ({type(error).__name__}: {error})")
                log.warn_once(f"the backup {path} cannot be read, so an older one is used: {error}")
                continue
            return Backup(position, header, arrays, path)
        if damaged:
            raise RuntimeError(
                f"no backup in {str(self.path)!r} can be read: {', '.join(damaged)}; remove them "
                "to start from the beginning"
            )
        return None

    def write(self, position: Position, header: Header, arrays: Arrays) -> None:
        """Adds a backup, and removes all but the newest two; after an error these stay."""
        try:
            # The archive's list of its files has no checksum: one that is missing would not show.
            text = np.frombuffer(json.dumps({**header, _NAMES: [*arrays]}).encode(), np.uint8)
            self._add(self.file(position).name, {_HEADER: text, **arrays})
            for old in self.positions()[_KEPT:]:
                self.file(old).unlink(missing_ok=True)
        except OSError as error:
            raise _with_path(error, "a backup", self.file(position)) from error

    def remove_after(self, position: Position) -> None:
        """Removes backups of later positions: they could not be read."""
        for later in self.positions():
            if later > position:
                self.file(later).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes all backups, and the folder if nothing else is in it."""
        for path in (*map(self.file, self.positions()), self.path / _OWNER):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _add(self, name: str, arrays: Arrays) -> None:
        """Writes a file that becomes visible when it is complete, if the folder is still ours."""
        writing = self.path / f"writing-{self.run}"
        operations = protocol.add_backup(self.run)
        answer: Any = None
        try:
            # Open from its creation: a name that another owner has removed stays removed.
            with contextlib.ExitStack() as stack:
                while True:
                    operation = operations.send(answer)
                    if operation == "create":
                        file = stack.enter_context(writing.open("wb"))
                    elif operation == "read name":
                        answer = self._read_owner()["run"]
                    elif operation == "fill":
                        _save(file, arrays)
                        file.flush()
                        os.fsync(file.fileno())
                    elif operation == "publish":
                        answer = self._publish(writing, name)
                    else:
                        writing.unlink(missing_ok=True)
        except StopIteration as end:
            if not end.value:
                owner = self._read_owner()
                raise RuntimeError(
                    f"another job uses backup_dir {str(self.path)!r}: process {owner['process']} "
                    f"on {owner['host']} began after this one; give each job a folder of its own"
                ) from None
        except OSError:
            with contextlib.suppress(OSError):
                writing.unlink()
            raise

    def _read_owner(self) -> Mapping[str, Any]:
        """Returns which process has taken the folder last."""
        path = self.path / _OWNER
        try:
            owner = json.loads(path.read_text())
            return {key: owner[key] for key in ("run", "host", "process")}
        except (ValueError, TypeError, KeyError) as error:
            raise RuntimeError(
                f"no backup is made, because {str(path)!r}, which names the job that uses the "
                f"folder, is damaged: {type(error).__name__}: {error}; start again"
            ) from None

    def _publish(self, writing: pathlib.Path, name: str) -> bool:
        """Makes a file visible; returns whether it is still there."""
        try:
            writing.replace(self.path / name)
        except FileNotFoundError:
            return False
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True


class ProgressMark:
    """How many batches a training has done, written after each one: for the report of a restart.

    The time of a mark is the file's, so that it is of one clock. The write goes to the system's
    memory, which outlives the process. Without a mark, the report says less.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path / _MARK
        self._file: IO[bytes] | None = None

    def read(self) -> tuple[int, float] | None:
        """Returns the number of batches, and when the last one was done; None if not known."""
        try:
            with self._path.open("rb") as file:
                return int(file.read(32)), os.fstat(file.fileno()).st_mtime
        except (OSError, ValueError):
            return None

    def write(self, batches: int) -> None:
        """Notes the number of batches that are done."""
        with contextlib.suppress(OSError):
            if self._file is None:
                # A new file: an earlier job that still runs writes to its own.
                self._path.unlink(missing_ok=True)
                self._file = self._path.open("xb", buffering=0)
            os.pwrite(self._file.fileno(), b"%20d" % batches, 0)

    def close(self) -> None:
        """Ends writing; the mark stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Removes the mark, because the training is complete."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def read(file: IO[bytes]) -> tuple[Header, Arrays]:
    """Returns the header and the arrays of a backup; an error if a bit is not as it was."""
    with np.load(file) as archive:
        arrays = dict(archive)
    header = json.loads(arrays.pop(_HEADER).tobytes())
    names = header.pop(_NAMES, arrays)
    if sorted(arrays) != sorted(names):
        raise ValueError(f"it has {len(arrays)} of {len(names)} arrays")
    return header, arrays


def _with_path(error: OSError, name: str, path: pathlib.Path) -> OSError:
    """Returns the same error, whose message names the file."""
    return type(error)(
        error.errno,
        f"{name} cannot be written, {str(path)!r}: {error.strerror or error}; the backups before "
        "are kept",
    )


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns arrays as bytes; `unpack` reads them."""
    file = io.BytesIO()
    _save(file, arrays)
    return file.getvalue()


def _save(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a file; dtypes that numpy does not have become bits."""
    np.savez(file, **{key: _plain(array) for key, array in arrays.items()})  # type: ignore[arg-type]


def unpack(data: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays that `pack` got."""
    with np.load(io.BytesIO(data)) as arrays:
        return dict(arrays)


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array of a dtype that numpy can save, with the same bits."""
    if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
        return array
    return array.view(f"u{array.dtype.itemsize}")
