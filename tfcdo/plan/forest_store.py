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
from tfcdo.plan import forest as forest_lib
from tfcdo.plan import topology as topology_lib
from tfcdo.plan import tree as tree_lib

PRESETS_FILE = pathlib.Path(__file__).with_name("presets.json")
# A forest found by another version of the search is not what this one would find.
_VERSION = 1


def presets(topology: topology_lib.Topology) -> list[forest_lib.Forest]:
    """The forests that come with the package for a machine, found for various sizes.

    Args:
      topology: the machine, under whatever name.

    Returns:
      The forests; none for a machine that is not known.
    """
    return list(_matching_presets(topology))


@functools.lru_cache(maxsize=64)
def _matching_presets(topology: topology_lib.Topology) -> tuple[forest_lib.Forest, ...]:
    for machine, forests in _all_presets():
        # The same machine may number its devices differently. Where many numberings match as far
        # as single links go, all of them do, or hardly any.
        for images in topology_lib.isomorphisms(machine, topology, limit=16):
            if topology.subset(images).fingerprint == machine.fingerprint:
                return tuple(forest.expanded([images]) for forest in forests)
    return ()


@functools.lru_cache(maxsize=1)
def _all_presets() -> Sequence[tuple[topology_lib.Topology, Sequence[forest_lib.Forest]]]:
    found: dict[topology_lib.Topology, list[forest_lib.Forest]] = {}
    for entry in json.loads(PRESETS_FILE.read_text(encoding="utf-8")):
        machine = topology_lib.preset(entry["topology"], entry["num_devices"])
        machine = machine.subset(entry.get("subset", range(machine.num_devices)))
        found.setdefault(machine, []).append(decode(entry["forest"], machine.num_devices))
    return list(found.items())


def encode(forest: forest_lib.Forest) -> dict[str, Any]:
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


def decode(content: Mapping[str, Any], num_devices: int) -> forest_lib.Forest:
    """The forest that `encode` has written.

    Args:
      content: what `encode` returned.
      num_devices: how many devices its trees must span.

    Returns:
      The forest.

    Raises:
      ValueError, TypeError, KeyError: if this is not such a forest.
    """
    trees = tuple(tree_lib.CopyTree(tuple(parents)) for parents in content["parents"])
    forest = forest_lib.Forest(trees, tuple(map(float, content["shares"])))
    if trees[0].num_devices != num_devices:
        raise ValueError(f"its trees span {trees[0].num_devices} devices, not {num_devices}")
    return forest


def load(topology: topology_lib.Topology, key: str) -> forest_lib.Forest | None:
    """A forest from the user's cache directory.

    Args:
      topology: the machine.
      key: what else it was found for.

    Returns:
      The forest; None if there is none, or none that can be read, which is logged.
    """
    path = _path(topology, key)
    try:
        return decode(json.loads(path.read_text(encoding="utf-8")), topology.num_devices)
    except OSError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warn_once(f"ignoring {path}, which is no plan: {error}; delete it, or let it be")
        return None


def save(topology: topology_lib.Topology, key: str, forest: forest_lib.Forest) -> None:
    """Puts a forest into the user's cache directory, if it can be written to.

    Args:
      topology: the machine.
      key: what else it was found for.
      forest: the forest.
    """
    path = _path(topology, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read or write the same file: it appears whole or not at all.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, delete=False
        ) as file:
            json.dump(encode(forest), file)
        pathlib.Path(file.name).replace(path)
    except OSError as error:
        log.warn_once(
            f"plans are searched for again in the next process, because {path.parent} cannot be "
            f"written: {error}; TFCDO_CACHE_DIR may name another directory"
        )


def _path(topology: topology_lib.Topology, key: str) -> pathlib.Path:
    directory = os.environ.get("TFCDO_CACHE_DIR")
    if not directory:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path("~/.cache").expanduser()
        directory = str(pathlib.Path(base) / "tfcdo")
    return pathlib.Path(directory) / f"plan-{_VERSION}-{topology.fingerprint}-{key}.json"
