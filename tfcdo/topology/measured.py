"""Keeps measurements of this machine in files, in the user's folder unless another one is named."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
import re

import msgspec
import numpy as np

from tfcdo import log
from tfcdo.cache_folder import cache_folder, write_whole
from tfcdo.topology.serialization import FORMAT, TopologyDocument, upgraded
from tfcdo.topology.topology import Topology

# A measurement of another version may mean something else.
_VERSION = 2


class _MeasuredDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    topology: TopologyDocument
    date: str
    nccl: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured topology, whose name names the devices, and says when it was measured."""

    topology: Topology
    date: str
    # Bytes on each device, ascending, and the seconds of an all-reduce by NCCL; none if it does not
    # run.
    nccl: tuple[tuple[int, float], ...] = ()

    def nccl_seconds(self, num_bytes: int) -> float | None:
        """Returns the seconds of NCCL, between the measured sizes; None if it was not measured."""
        if not self.nccl:
            return None
        # Below the smallest size it takes as long as there, above the largest in proportion.
        sizes, seconds = np.array(self.nccl).T
        between = np.interp(math.log(max(num_bytes, 1)), np.log(sizes), np.log(seconds))
        return math.exp(float(between)) * max(1.0, num_bytes / float(sizes[-1]))


def read(path: str | os.PathLike[str]) -> Measured:
    """Reads a file of `tfcdo.topology.measure` or `Topology.to_json`, or raises `ValueError`."""
    try:
        content = pathlib.Path(path).read_bytes()
        if b'"date"' in content:
            return _decode(content)
        return Measured(Topology.from_json(content.decode()), "")
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: {error.strerror or error}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _decode(content: bytes) -> Measured:
    document = msgspec.convert(upgraded(msgspec.json.decode(content)), _MeasuredDocument)
    return Measured(Topology.from_document(document.topology), document.date, document.nccl)


def load(name: str) -> Measured | None:
    """Reads the measurement of this name from the user's folder; None, logged, if it cannot."""
    try:
        file = _file(name)
        found = _decode(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        return None  # Nothing was measured, or this user has no folder to keep it in.
    except OSError as error:
        log.warn_once(f"ignoring what was measured of this machine: {file}: {error.strerror}")
        return None
    except (ValueError, msgspec.MsgspecError) as error:
        log.warn_once(f"ignoring {file}, which is no measurement: {error}; delete or renew it")
        return None
    # Two names may have one file only by a mistake of the user's, who copies files.
    return found if found.topology.name == name else None


def save(measured: Measured, path: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Writes a measurement, by default in the user's folder; returns the file."""
    file = _file(measured.topology.name) if path is None else pathlib.Path(path)
    document = {"format": FORMAT} | vars(measured) | {"topology": measured.topology.to_document()}
    write_whole(file, msgspec.json.format(msgspec.json.encode(document), indent=1))
    return file


def _file(name: str) -> pathlib.Path:
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return cache_folder() / f"{readable}-{_VERSION}-{digest}.json"
