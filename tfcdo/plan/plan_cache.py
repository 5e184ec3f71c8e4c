"""The plan cache: tree packings that earlier searches have found, in a folder of the user's."""

from __future__ import annotations

import contextlib
import os
import pathlib

import msgspec

from tfcdo import log
from tfcdo.cache_folder import cache_folder
from tfcdo.cache_folder import write_whole
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.plan.tree_packing import TreePackingDocument
from tfcdo.topology.topology import Topology

# What another version of the search has found is not what this one would find.
_VERSION = 5
# At most so many files, of some kilobytes each; beyond, those that were used longest ago are
# deleted. Files rather than a database: the folder may be on a network and used by several hosts.
_MAX_FILES = 500


class KeptPlan(TreePackingDocument, frozen=True, kw_only=True):
    """Describes a tree packing in a file, and for people what it was found for.

    Attributes:
      topology: the machine's name.
      found_for: the size in bytes and the number of packs, or "any"; "trees" for all sizes.
    """

    topology: str = ""
    found_for: str = ""


def load(topology: Topology, key: str) -> TreePacking | None:
    """Reads a tree packing from the user's cache folder.

    Args:
      topology: the machine.
      key: what else it was found for.

    Returns:
      The packing; None if there is none, or none that can be read, which is logged.
    """
    folder = _folder()
    if folder is None:
        return None
    file = folder / _name(topology, key)
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn_not_kept(f"{folder} cannot be used: {error.strerror or error}")
        return None
    with contextlib.suppress(OSError):  # A folder may be read, but not written.
        os.utime(file)  # It was used now.
    try:
        document = msgspec.json.decode(content, type=TreePackingDocument)
        return TreePacking.from_document(document, topology.num_devices)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        log.warn_once(f"ignoring {file}, which is not a plan: {error}; delete it, or leave it be")
        return None


def save(topology: Topology, key: str, packing: TreePacking) -> None:
    """Writes a tree packing into the user's cache folder; where it cannot, that is logged.

    Args:
      topology: the machine.
      key: what else it was found for.
      packing: the packing.
    """
    folder = _folder()
    if folder is None:
        return
    try:
        document = KeptPlan(
            **msgspec.structs.asdict(packing.to_document()), topology=topology.name, found_for=key
        )
        write_whole(folder / _name(topology, key), msgspec.json.encode(document))
        _delete_oldest(folder)
    except OSError as error:
        _warn_not_kept(f"{folder} cannot be used: {error.strerror or error}")


def kept() -> list[tuple[pathlib.Path, KeptPlan]]:
    """Lists the plans that this version of the search has kept, the one used last first.

    Returns:
      The file of each plan, and the plan. Files that cannot be read as plans are left out.
    """
    folder = _folder()
    files = folder.glob(f"plan-{_VERSION}-*.json") if folder else ()
    found = []
    for file in files:
        with contextlib.suppress(OSError, RecursionError, msgspec.MsgspecError):
            plan = msgspec.json.decode(file.read_bytes(), type=KeptPlan)
            found.append((file.stat().st_mtime, file, plan))
    found.sort(key=lambda one: (-one[0], one[1]))
    return [(file, plan) for _, file, plan in found]


def _delete_oldest(folder: pathlib.Path) -> None:
    """Deletes the plans that were used longest ago, of any version, if there are too many."""
    files = list(folder.glob("plan-*.json"))
    if len(files) <= _MAX_FILES:
        return
    with contextlib.suppress(FileNotFoundError):  # Another process is deleting them.
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[:-_MAX_FILES]:
            file.unlink()


def _folder() -> pathlib.Path | None:
    """Returns where plans are kept; None, which is logged, if the user has no place for them."""
    try:
        return cache_folder()
    except RuntimeError as error:
        _warn_not_kept(str(error))
        return None


def _name(topology: Topology, key: str) -> str:
    return f"plan-{_VERSION}-{topology.fingerprint}-{key}.json"


def _warn_not_kept(reason: str) -> None:
    # Reading and writing mostly fail alike, and so with the same line, which is logged once.
    log.warn_once(
        f"plans are searched for again in each process, because {reason}; "
        "TFCDO_CACHE_DIR may name a directory to keep them in"
    )
