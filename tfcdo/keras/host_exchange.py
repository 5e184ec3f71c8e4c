"""Bytes that the hosts of a strategy exchange between steps."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import tensorflow as tf

_CHUNK = 64 << 20  # Bytes that hosts exchange at once; 4 divides it.


def host_of(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Returns the number of this host, and of all hosts, of a strategy."""
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return 0, 1
    hosts = replicas // len(strategy.extended.worker_devices)
    return (strategy.cluster_resolver.task_id if hosts > 1 else 0), hosts


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns arrays as bytes; `unpack` reads them."""
    file = io.BytesIO()
    save(file, arrays)
    return file.getvalue()


def save(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a file; dtypes that numpy does not have become bits."""
    np.savez(file, **{key: _plain(array) for key, array in arrays.items()})  # type: ignore[arg-type]


def unpack(data: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays that `pack` got."""
    with np.load(io.BytesIO(data)) as arrays:
        return dict(arrays)


def gather(strategy: tf.distribute.Strategy, data: bytes) -> list[bytes]:
    """Returns the bytes of each host, in order, on every host; all must call it."""
    host, hosts = host_of(strategy)
    if hosts == 1:
        return [data]
    lengths = np.zeros(hosts, np.int64)
    lengths[host] = len(data)
    ends = np.cumsum(np.frombuffer(_joined(strategy, lengths.view(np.uint8)), np.int64)).tolist()
    start = ends[host] - len(data)
    whole = bytearray()
    for begin in range(0, ends[-1], _CHUNK):
        chunk = np.zeros(min(_CHUNK, ends[-1] - begin), np.uint8)
        own = data[max(0, begin - start) : max(0, begin + _CHUNK - start)]
        chunk[max(0, start - begin) :][: len(own)] = np.frombuffer(own, np.uint8)
        whole += _joined(strategy, chunk)
    return [bytes(whole[begin:end]) for begin, end in itertools.pairwise([0, *ends])]


def gather_json(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """Returns the JSON value of each host, in order, on every host."""
    return [json.loads(data) for data in gather(strategy, json.dumps(value).encode())]


def _joined(strategy: tf.distribute.Strategy, own: np.ndarray) -> bytes:
    """Returns bytes of which each host gives its own, and zeros elsewhere."""
    # Sums of integers are exact.
    own = np.concatenate([own, np.zeros(-len(own) % 4, np.uint8)]).view(np.int32)
    devices = len(strategy.extended.worker_devices)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            own if context.replica_id_in_sync_group % devices == 0 else np.zeros_like(own)
        )
    )
    joined: bytes = strategy.reduce("SUM", values, axis=None).numpy().tobytes()
    return joined


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array of a dtype that numpy can save, with the same bits."""
    if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
        return array
    return array.view(f"u{array.dtype.itemsize}")
