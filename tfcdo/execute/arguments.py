"""Checks of the arguments of the cross-device ops that name algorithms, machines and plans."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tfcdo.plan import algorithms, copy_tree
from tfcdo.plan.evaluation import Evaluation
from tfcdo.topology import measured
from tfcdo.topology.measured import Measured
from tfcdo.topology.topology import Topology


def read_topology(given: Any) -> Measured | None:
    """Returns the argument `topology`, or the file that it names, as a measurement."""
    if given is None:
        return None
    if isinstance(given, Topology):
        return Measured(given, "")
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"topology must be a tfcdo.topology.Topology, the path of a file or None; got {given!r}"
        )
    try:
        return measured.read(given)
    except ValueError as error:
        raise ValueError(
            "topology must be a file that tfcdo.topology.measure or Topology.to_json has written: "
            f"{error}"
        ) from None


def check_algorithm(algorithm: Any) -> str | tuple[copy_tree.CopyTree, ...]:
    """Returns the argument `all_reduce_alg`: a known name, or copy trees."""
    trees = tuple(algorithm) if isinstance(algorithm, Sequence) else ()
    if trees and all(isinstance(tree, copy_tree.CopyTree) for tree in trees):
        return trees
    known = ("nccl", *algorithms.ALGORITHMS)
    if not isinstance(algorithm, str) or algorithm not in known:
        raise ValueError(
            f"all_reduce_alg must be one of {', '.join(map(repr, known))}, or a list of "
            f"tfcdo.plan.copy_tree.CopyTree; got {algorithm!r}"
        )
    return algorithm


def read_plan(path: Any) -> Evaluation:
    """Reads the file that the argument `plan` names."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"plan must be the path of a file, or None; got {path!r}")
    try:
        return Evaluation.read(os.fspath(path))
    except ValueError as error:
        raise ValueError(
            f"plan must be a file that `tfcdo plan --save` has written: {error}"
        ) from None
