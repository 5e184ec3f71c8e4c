"""Forests that were found before: those that come with the package, and the user's own."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfcdo import log
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.isomorphism import isomorphisms
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

PRESETS_FILE = pathlib.Path(__file__).with_name("bundled_plans.json")
# A forest found by another version of the search is not what this one would find.
_VERSION = 1
# What reading something else than a plan may raise; a number or a nest of lists may be too large.
_NO_PLAN = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


def presets(topology: Topology) -> list[TreePacking]:
    """The forests that come with the package for a machine, found for various sizes.

    Args:
      topology: the machine, under whatever name.

    Returns:
      The forests; none for a machine that is not known.
    """
    return list(_matching_presets(topology))


@functools.lru_cache(maxsize=64)
def _matching_presets(topology: Topology) -> tuple[TreePacking, ...]:
    for machine, forests in _all_presets():
        # The same machine may number its devices differently. Where many numberings match as far
        # as single links go, all of them do, or hardly any.
        for images in isomorphisms(machine, topology, limit=16):
            if topology.subset(images).fingerprint == machine.fingerprint:
                return tuple(forest.expanded([images]) for forest in forests)
    return ()


@functools.lru_cache(maxsize=1)
def _all_presets() -> Sequence[tuple[Topology, Sequence[TreePacking]]]:
    found: dict[Topology, list[TreePacking]] = {}
    for entry in json.loads(PRESETS_FILE.read_text(encoding="utf-8")):
        machine = preset(entry["topology"], entry["num_devices"])
        machine = machine.subset(entry.get("subset", range(machine.num_devices)))
        found.setdefault(machine, []).append(decode(entry["forest"], machine.num_devices))
    return list(found.items())


def encode(forest: TreePacking) -> dict[str, Any]:
    """A forest as a value that JSON can hold.

    Args:
      forest: the forest.

    Returns:
      Its shares and the parents of each tree.
    """
    return {
        "shares": list(forest.shares),
        "parents": [list(tree.parents) for tree in forest.trees],
    }


def decode(content: Mapping[str, Any], num_devices: int) -> TreePacking:
    """The forest that `encode` has written.

    Args:
      content: what `encode` returned.
      num_devices: how many devices its trees must span.

    Returns:
      The forest.

    Raises:
      ValueError, TypeError, KeyError, OverflowError: if this is not such a forest.
    """
    trees = tuple(CopyTree(tuple(parents)) for parents in content["parents"])
    forest = TreePacking(trees, tuple(map(float, content["shares"])))
    if trees[0].num_devices != num_devices:
        raise ValueError(f"its trees span {trees[0].num_devices} devices, not {num_devices}")
    return forest


def load(topology: Topology, key: str) -> TreePacking | None:
    """A forest from the user's cache directory.

    Args:
      topology: the machine.
      key: what else it was found for.

    Returns:
      The forest; None if there is none, or none that can be read, which is logged.
    """
    directory = _directory()
    if directory is None:
        return None
    path = directory / _name(topology, key)
    try:
        return decode(json.loads(path.read_text(encoding="utf-8")), topology.num_devices)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _tell_not_kept(f"{directory} cannot be used: {error.strerror or error}")
        return None
    except _NO_PLAN as error:
        log.warn_once(f"ignoring {path}, which is no plan: {error}; delete it, or let it be")
        return None


def save(topology: Topology, key: str, forest: TreePacking) -> None:
    """Puts a forest into the user's cache directory; where it cannot, that is logged.

    Args:
      topology: the machine.
      key: what else it was found for.
      forest: the forest.
    """
    directory = _directory()
    if directory is None:
        return
    name = _name(topology, key)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Another process may read or write the same file: it appears whole or not at all.
        with tempfile.TemporaryDirectory(dir=directory) as unfinished:
            file = pathlib.Path(unfinished) / name
            file.write_text(json.dumps(encode(forest)), encoding="utf-8")
            file.replace(directory / name)
    except OSError as error:
        _tell_not_kept(f"{directory} cannot be used: {error.strerror or error}")


def _directory() -> pathlib.Path | None:
    """Where plans are kept; None, which is logged, if the user has no place for them."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # The XDG base directory specification has such a path ignored.
        base = pathlib.Path("~/.cache")
    directory = os.environ.get("TFCDO_CACHE_DIR") or base / "tfcdo"
    try:
        return pathlib.Path(directory).expanduser()
    except RuntimeError:
        # As in a container whose user is a mere number.
        _tell_not_kept(f"there is no home directory for {directory}")
        return None


def _name(topology: Topology, key: str) -> str:
    return f"plan-{_VERSION}-{topology.fingerprint}-{key}.json"


def _tell_not_kept(reason: str) -> None:
    # Reading and writing mostly fail alike, and so with the same line, which is logged once.
    log.warn_once(
        f"plans are searched for again in each process, because {reason}; "
        "TFCDO_CACHE_DIR may name a directory to keep them in"
    )
