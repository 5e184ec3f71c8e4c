"""Hosts that are threads of this process, to try an exchange out without a network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfcdo.exchange.protocol import CheckedPeers, Collective, Exchange, Kind, PackSpec

_SECONDS = 60.0  # To wait for the other threads; only an exchange that hangs needs them.


class Rehearsal:
    """Runs an exchange on hosts that are threads, and holds it to its contract.

    Args:
      exchange: the exchange.
      shapes: the shapes of the tensors of a pack; one vector unless `exchange.whole_values`.
      hosts: the number of hosts.
      dtype: the tensors' dtype, "float32" or "float64".

    Attributes:
      states: the state of each host, by name.
      calls: the calls of `Peers` in the last step.

    Example:
      >>> import tfcdo
      >>> hosts = Rehearsal(tfcdo.exchange.Cast("bfloat16"), [(3,)])
      >>> [total] = hosts.step([[np.float32([1, 2, 3])], [np.float32([4, 5, 6])]])
      >>> total
      array([5., 7., 9.], dtype=float32)
    """

    def __init__(
        self,
        exchange: Exchange,
        shapes: Sequence[tuple[int, ...]],
        hosts: int = 2,
        dtype: str = "float32",
    ) -> None:
        self.exchange, self.hosts = exchange, hosts
        self.spec = PackSpec(dtype, tuple(tuple(shape) for shape in shapes))
        self.states = [dict(exchange.state(self.spec, hosts)) for _ in range(hosts)]
        self.calls: list[Collective] = []

    def step(self, values: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Sums the tensors of all hosts.

        Args:
          values: `values[h]` are the tensors of host `h`.

        Returns:
          The sums, which are bitwise the same on all hosts.

        Raises:
          RuntimeError: if the calls differ from `cost`, a result is of another dtype or shape,
            the hosts' sums differ, or a host waits for another one.
        """
        room = _Room(self.hosts)
        results: list[Any] = [None] * self.hosts
        errors: list[Exception] = []

        def run(host: int) -> None:
            try:
                results[host] = self._run(host, values[host], room)
            except Exception as error:
                errors.append(error)
                room.barrier.abort()

        threads = [threading.Thread(target=run, args=(host,)) for host in range(self.hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            if isinstance(error, threading.BrokenBarrierError):
                raise RuntimeError(f"{self.exchange}: a host waits for a call of another one")
            raise error
        for host, sums in enumerate(results):
            for index, (total, first) in enumerate(zip(sums, results[0], strict=True)):
                if total.tobytes() != first.tobytes():
                    raise RuntimeError(
                        f"{self.exchange}: sum {index} differs between hosts 0 and {host}"
                    )
        return list(results[0])

    def _run(self, host: int, tensors: Sequence[np.ndarray], room: _Room) -> list[np.ndarray]:
        import tensorflow as tf

        with room.turn, tf.device("/cpu:0"):
            given = [tf.constant(tensor, self.spec.dtype) for tensor in tensors]
            state = {name: tf.constant(value) for name, value in self.states[host].items()}
            peers = _Threads(self.exchange, self.spec, host, room)
            sums, changed = self.exchange.run(given, state, peers)
        peers.check_end(given, sums, state, changed)
        self.states[host] = {name: value.numpy() for name, value in changed.items()}
        if host == 0:
            self.calls = peers.calls
        return [total.numpy() for total in sums]


class _Room:
    """Where threads lay down arrays for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.turn = threading.Lock()  # One thread runs at a time.
        self.size = size
        self._arrays: list[Any] = [None] * size

    def swap(self, host: int, array: np.ndarray) -> list[np.ndarray]:
        """Returns the arrays of all hosts."""
        self._arrays[host] = array
        self.turn.release()
        try:
            self.barrier.wait(_SECONDS)
            found = list(self._arrays)
            self.barrier.wait(_SECONDS)
        finally:
            self.turn.acquire()
        return found


class _Threads(CheckedPeers):
    def __init__(self, exchange: Exchange, spec: PackSpec, host: int, room: _Room) -> None:
        super().__init__(exchange, spec, host, room.size)
        self._room = room

    def emit(self, kind: Kind, tensor: Any, number: int) -> Any:
        import tensorflow as tf

        arrays = self._room.swap(self.rank, tensor.numpy())
        match kind:
            case "all_reduce":
                result = np.sum(np.stack(arrays), axis=0, dtype=arrays[0].dtype)
            case "all_to_all":
                result = np.stack([array[self.rank] for array in arrays])
            case "all_gather":
                result = np.concatenate(arrays)
            case "broadcast":
                result = arrays[0]
        return tf.constant(result)
