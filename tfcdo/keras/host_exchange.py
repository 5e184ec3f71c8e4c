"""Bytes that the hosts of a strategy exchange between steps."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import tensorflow as tf

_CHUNK = 64 << 20  # Bytes that are sent at once from one host to all.


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
    _, hosts = host_of(strategy)
    if hosts == 1:
        return [data]
    sizes = _gathered(strategy, np.frombuffer(np.int64(len(data)).tobytes(), np.uint8), hosts)
    lengths = [int(np.frombuffer(size.tobytes()[:8], np.int64)[0]) for size in sizes]
    padded = np.zeros(max(max(lengths), 1), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _gathered(strategy, padded, hosts)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def gather_json(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """Returns the JSON value of each host, in order, on every host."""
    return [json.loads(data) for data in gather(strategy, json.dumps(value).encode())]


def copy_from(strategy: tf.distribute.Strategy, data: bytes, source: int) -> bytes:
    """Returns the bytes of one host on every host; all must call it."""
    host, hosts = host_of(strategy)
    if hosts == 1:
        return data
    length = gather_json(strategy, len(data))[source]
    parts = []
    for start in range(0, length, _CHUNK):
        end = min(length, start + _CHUNK)
        # Sums of integers are exact, and all other hosts add zeros.
        part = np.zeros(-(-(end - start) // 4), np.int32)
        if host == source:
            part.view(np.uint8)[: end - start] = np.frombuffer(data[start:end], np.uint8)
        whole = strategy.reduce("SUM", _on_first_replica(strategy, part), axis=None).numpy()
        parts.append(whole.tobytes()[: end - start])
    return b"".join(parts)


def _gathered(strategy: tf.distribute.Strategy, row: np.ndarray, hosts: int) -> np.ndarray:
    """Gathers one row of bytes a host, each of which is split among the host's replicas."""
    devices = strategy.num_replicas_in_sync // hosts
    row = np.concatenate([row, np.zeros(-len(row) % devices, np.uint8)])
    parts = np.split(row, devices)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group % devices][None])
    )
    gathered: np.ndarray = strategy.gather(values, axis=0).numpy()
    return gathered.reshape(hosts, -1)


def _on_first_replica(strategy: tf.distribute.Strategy, value: np.ndarray) -> Any:
    devices = len(strategy.extended.worker_devices)
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            value if context.replica_id_in_sync_group % devices == 0 else np.zeros_like(value)
        )
    )


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array of a dtype that numpy can save, with the same bits."""
    if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
        return array
    return array.view(f"u{array.dtype.itemsize}")
