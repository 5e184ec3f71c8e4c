"""The protocol of exchanges between the roots of hosts, the exact sum, and a rehearsal."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from tfcdo import checks
from tfcdo.exchange import dtypes

_SECONDS = 60.0  # To wait for the other threads; only an exchange that hangs needs them.
Kind = Literal["all_reduce", "all_to_all", "all_gather", "broadcast"]


@dataclasses.dataclass(frozen=True)
class PackSpec:
    """Describes the tensors of a pack that an exchange gets.

    Attributes:
      dtype: their dtype, "float32" or "float64" unless the exchange is `Sum`.
      shapes: their shapes, in the order in which `Exchange.run` gets the tensors.
    """

    dtype: str
    shapes: tuple[tuple[int | None, ...], ...]

    @property
    def size(self) -> int:
        """Returns the number of elements; 0 if it is not known, which only `Sum` meets."""
        if any(None in shape for shape in self.shapes):
            return 0
        return sum(map(math.prod, self.shapes))  # type: ignore[arg-type]

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes; 0 if it is not known."""
        return self.size * dtypes.itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call of a method of `Peers`.

    Attributes:
      kind: the name of the method.
      num_bytes: the bytes of the tensor that it is given.
      varies: whether some steps send other numbers of bytes; `num_bytes` is then the usual one.
    """

    kind: Kind
    num_bytes: int
    varies: bool = False

    def bytes_sent(self, hosts: int) -> float:
        """Returns the bytes that each host sends; for a broadcast, on average."""
        others = hosts - 1
        parts = {"all_reduce": 2 * others / hosts, "all_gather": others}
        return self.num_bytes * parts.get(self.kind, others / hosts)


class Peers(Protocol):
    """The roots of a pack on all hosts, as `Exchange.run` sees them.

    Every host must call the same methods in the same order, with tensors of the same shapes, as
    `Exchange.cost` lists them. The results of all methods but `all_to_all` are bitwise identical on
    all hosts. The tensors may have any dtype of 2 bytes or more: bitcast smaller ones.

    Attributes:
      rank: this host's number.
      size: the number of hosts.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Any) -> Any:
        """Adds up the hosts' tensors: 16-bit floats as float32s; short ints are sent as int32s."""

    def all_to_all(self, rows: Any) -> Any:
        """Sends row `h` of a tensor to host `h`; returns the rows that arrive, in their order."""

    def all_gather(self, rows: Any) -> Any:
        """Concatenates the hosts' tensors along the first axis, in the order of the hosts."""

    def broadcast(self, tensor: Any) -> Any:
        """Returns host 0's tensor."""


@runtime_checkable
class Exchange(Protocol):
    """How the roots of hosts add up a pack's sums: a frozen dataclass that inherits from this.

    The class and its fields are compared among hosts, and name the state in checkpoints. Only
    gradients of float32 and float64 in packs of at least 4 KiB reach an exchange; all other values
    are summed exactly. docs/own-exchange.md has a complete example.

    Attributes:
      whole_values: whether `run` gets each value whole, with its shape. Else it gets all values of
        a pack as one vector, and large values are divided among packs.
    """

    whole_values: ClassVar[bool] = False

    def state(self, pack: PackSpec, hosts: int) -> Mapping[str, np.ndarray]:
        """Returns the values of the first step of the state that is kept for a pack.

        Args:
          pack: the tensors' dtype and shapes.
          hosts: the number of hosts.

        Returns:
          An array for each name, equal on all hosts; empty, as here, where nothing is kept.
        """
        return {}

    @abc.abstractmethod
    def cost(self, pack: PackSpec, hosts: int) -> Sequence[Collective]:
        """Returns the calls of `Peers` that a step makes for a pack, in their order.

        It must not depend on anything but the fields and arguments.

        Args:
          pack: the tensors' dtype and shapes.
          hosts: the number of hosts, at least 2.

        Returns:
          The calls. `run` is held to them: another call is a `RuntimeError`.
        """

    @abc.abstractmethod
    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Peers
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Adds up the tensors of all hosts, in a graph or eagerly, on the current device.

        Args:
          tensors: this host's sums, with the shapes of the `PackSpec`.
          state: the tensors of the state, by name.
          peers: the hosts.

        Returns:
          The sums, bitwise the same on all hosts, of the same dtypes and shapes as the tensors; and
          the state for the next step, finite where the tensors are not. The caller gives the sums
          the gradient of an exact sum.
        """


def state_of(exchange: Exchange, pack: PackSpec, hosts: int) -> Mapping[str, np.ndarray]:
    """Returns the state of an exchange in the first step, checked."""
    state = exchange.state(pack, hosts)
    arrays = state.values() if isinstance(state, Mapping) else [None]
    if not all(isinstance(array, (np.ndarray, np.generic)) for array in arrays):
        raise TypeError(f"the state of {exchange} must be a dict of numpy arrays; got {state!r}")
    return state


def calls_of(exchange: Exchange, pack: PackSpec, hosts: int) -> tuple[Collective, ...]:
    """Returns the calls that an exchange makes in a step, checked."""
    return checks.check_items(f"the cost of {exchange}", exchange.cost(pack, hosts), Collective)


class CheckedPeers(abc.ABC):
    """`Peers` that hold an exchange to its cost; subclasses emit the calls."""

    def __init__(self, exchange: Exchange, spec: PackSpec, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls: list[Collective] = []
        self._exchange, self._spec = exchange, spec
        self._cost = calls_of(exchange, spec, size)

    @abc.abstractmethod
    def emit(self, kind: Kind, tensor: Any, number: int) -> Any:
        """Emits a call, one of several that have a number."""

    def _checked(self, kind: Kind, tensor: Any) -> Any:
        import tensorflow as tf

        tensor = tf.convert_to_tensor(tensor)
        number, dtype = len(self.calls), tensor.dtype.name
        if kind == "all_to_all" and not tensor.shape[:1].is_compatible_with([self.size]):
            raise RuntimeError(
                f"peers.all_to_all must get a row for each of the {self.size} hosts; got the shape "
                f"{tensor.shape} from {self._exchange}"
            )
        itemsize = dtypes.itemsize(dtypes.SUM_DTYPE.get(dtype, dtype))
        if kind != "all_reduce":
            itemsize = dtypes.itemsize(dtype)
            if itemsize < 2:
                raise RuntimeError(
                    f"tensors of 8 bits must be bitcast to float16 for peers.{kind}, as no "
                    f"collective copies them; got {dtype} from {self._exchange}"
                )
        expected = self._cost[number] if number < len(self._cost) else None
        # The size of a tensor, or of the pack, may not be known until the step runs.
        elements = tensor.shape.num_elements()
        num_bytes = 0 if elements is None else elements * itemsize
        call = Collective(kind, num_bytes)
        if expected and (expected.varies or elements is None or not self._spec.size):
            call = dataclasses.replace(expected, kind=kind)
        self.calls.append(call)
        if expected != call:
            raise RuntimeError(
                f"run must make the calls that cost lists; call {number} of {self._exchange} is "
                f"{call}, and cost has {expected}"
            )
        return self.emit(kind, tensor, number)

    all_reduce = functools.partialmethod(_checked, "all_reduce")
    all_to_all = functools.partialmethod(_checked, "all_to_all")
    all_gather = functools.partialmethod(_checked, "all_gather")
    broadcast = functools.partialmethod(_checked, "broadcast")

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Runs the exchange; raises a `RuntimeError` unless its calls and results are correct."""
        import tensorflow as tf

        result = self._exchange.run(tensors, state, self)
        if len(self.calls) < len(self._cost):
            raise RuntimeError(
                f"run must make the calls that cost lists; {self._exchange} leaves out "
                f"{self._cost[len(self.calls) :]}"
            )
        names = [tensor.dtype.name for tensor in tensors]
        wanted = [dtypes.SUM_DTYPE.get(name, name) for name in names]
        shapes = [tensor.shape for tensor in tensors]
        specs = (
            tuple(map(tf.TensorSpec, shapes, wanted)),
            {name: tf.TensorSpec(old.shape, old.dtype) for name, old in state.items()},
        )
        try:
            are_like = tf.nest.map_structure(
                tf.TensorSpec.is_compatible_with, specs, result, check_types=False
            )
        except (TypeError, ValueError):  # It is another structure.
            are_like = False
        if not all(tf.nest.flatten(are_like)):
            raise RuntimeError(
                f"run must return sums of {wanted} and {shapes}, in a list, and must return a "
                f"state like {state}, in a dict; {self._exchange} returns {result}"
            )
        return result


@dataclasses.dataclass(frozen=True)
class Sum(Exchange):
    """Adds up values as they are, by one collective.

    Example:
      >>> Sum().cost(PackSpec("float32", ((1000,),)), hosts=2)
      (Collective(kind='all_reduce', num_bytes=4000, varies=False),)
    """

    def cost(self, pack: PackSpec, hosts: int) -> tuple[Collective, ...]:
        """Returns one all-reduce of all bytes."""
        return (Collective("all_reduce", pack.num_bytes),)

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Peers
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Adds up the tensors of all hosts; see `Exchange.run`."""
        [flat] = tensors
        return [peers.all_reduce(flat)], {}


SUM = Sum()


def check_comparable(name: str, exchange: Exchange) -> None:
    """Raises a `TypeError` unless hosts can compare the argument `name`, an exchange."""
    parameters = vars(type(exchange)).get("__dataclass_params__")  # Not of a class it inherits.
    if parameters is None or not parameters.frozen:
        raise TypeError(
            f"{name} must be of a class with @dataclasses.dataclass(frozen=True), so that hosts "
            f"can compare it; got {exchange!r}"
        )
    try:
        hash(exchange)
    except TypeError as error:
        raise TypeError(
            f"{name} must have arguments that can be compared, such as a tuple in place of a list; "
            f"got {exchange!r}"
        ) from error


def identity(value: Any) -> str:
    """Returns an argument as hosts compare it: equal text for equal values on any host."""
    if isinstance(value, Exchange):  # Names of states in checkpoints depend on this.
        return f"{type(value).__module__}.{value!r}"
    # What Python shows of a function, a partial one or an object has its address.
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


class Rehearsal:
    """Runs an exchange on hosts that are threads, and holds it to its contract.

    Args:
      exchange: the exchange.
      shapes: the shapes of the tensors of a pack; one vector unless `exchange.whole_values`.
      hosts: the number of hosts.
      dtype: the tensors' dtype, "float32" or "float64".

    Raises:
      TypeError: if `exchange` is not an exchange that hosts can compare, `shapes` not a list of
        shapes, or `hosts` not an int.
      ValueError: if `hosts` is less than 2, `dtype` another one, or `shapes` not of one vector for
        an exchange without `whole_values`.

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
        if isinstance(exchange, type) or not isinstance(exchange, Exchange):
            raise TypeError(
                "exchange must be an object such as tfcdo.exchange.Cast('bfloat16'); got "
                f"{exchange!r}"
            )
        check_comparable("exchange", exchange)
        checks.check_int("hosts", hosts, at_least=2)  # Casts of one host have no shares.
        if dtype not in dtypes.CAST:
            raise ValueError(f"dtype must be {' or '.join(map(repr, dtypes.CAST))}; got {dtype!r}")
        self.exchange, self.hosts = exchange, hosts
        try:
            self.spec = PackSpec(dtype, tuple(map(tuple, shapes)))
        except TypeError:
            raise TypeError(f"shapes must be a list of shapes; got {shapes!r}") from None
        if not exchange.whole_values and [*map(len, self.spec.shapes)] != [1]:
            raise ValueError(
                f"shapes must be of one vector, as {exchange} has no whole_values; got {shapes!r}"
            )
        self.states = [dict(state_of(exchange, self.spec, hosts)) for _ in range(hosts)]
        self.calls: list[Collective] = []

    def step(self, values: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Sums the tensors of all hosts.

        Args:
          values: `values[h]` are the tensors of host `h`.

        Returns:
          The sums, which are bitwise the same on all hosts.

        Raises:
          ValueError: if `values` is not of that many hosts, or a tensor of another shape.
          RuntimeError: if the calls differ from `cost`, a result is of another dtype or shape,
            the state is not finite, the hosts' sums differ, or a host waits for another one.
        """
        if len(values) != self.hosts:
            raise ValueError(
                f"values must hold a list for each of the {self.hosts} hosts; got {len(values)}"
            )
        for host, tensors in enumerate(values):
            shapes = tuple(map(np.shape, tensors))
            if shapes != self.spec.shapes:
                raise ValueError(
                    f"values[{host}] must hold tensors of {self.spec.shapes}; got {shapes}"
                )
        room = _Room(threading.Barrier(self.hosts))
        with concurrent.futures.ThreadPoolExecutor(self.hosts) as pool:
            runs = [pool.submit(self._run, host, values, room) for host in range(self.hosts)]
        errors = [error for run in runs if (error := run.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            if isinstance(error, threading.BrokenBarrierError):
                raise RuntimeError(f"{self.exchange}: a host waits for a call of another one")
            raise error
        results = [run.result() for run in runs]
        for host, sums in enumerate(results):
            for index, (total, first) in enumerate(zip(sums, results[0], strict=True)):
                if total.tobytes() != first.tobytes():
                    raise RuntimeError(
                        f"{self.exchange}: sum {index} differs between hosts 0 and {host}"
                    )
        return list(results[0])

    def _run(
        self, host: int, values: Sequence[Sequence[np.ndarray]], room: _Room
    ) -> list[np.ndarray]:
        import tensorflow as tf

        try:
            with room.turn, tf.device("/cpu:0"):
                given = [tf.constant(tensor, self.spec.dtype) for tensor in values[host]]
                state = {name: tf.constant(value) for name, value in self.states[host].items()}
                peers = _Threads(self.exchange, self.spec, host, room)
                sums, changed = peers.run(given, state)
                of_floats = [value for value in changed.values() if value.dtype.is_floating]
                if not all(tf.reduce_all(tf.math.is_finite(value)) for value in of_floats):
                    raise RuntimeError(
                        f"run must return a finite state, also for NaN; {self.exchange} returns "
                        f"{changed}"
                    )
        except Exception:
            room.barrier.abort()  # The other hosts wait for this one.
            raise
        self.states[host] = {name: value.numpy() for name, value in changed.items()}
        if host == 0:
            self.calls = peers.calls
        return [total.numpy() for total in sums]


@dataclasses.dataclass
class _Room:
    """What the threads of a step share."""

    barrier: threading.Barrier
    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # One runs at a time.
    # The arrays of each call, by host.
    calls: dict[int, dict[int, np.ndarray]] = dataclasses.field(default_factory=dict)


class _Threads(CheckedPeers):
    def __init__(self, exchange: Exchange, spec: PackSpec, host: int, room: _Room) -> None:
        super().__init__(exchange, spec, host, room.barrier.parties)
        self._room = room

    def emit(self, kind: Kind, tensor: Any, number: int) -> Any:
        import tensorflow as tf

        by_host = self._room.calls.setdefault(number, {})
        by_host[self.rank] = tensor.numpy()
        self._room.turn.release()
        try:
            self._room.barrier.wait(_SECONDS)
        finally:
            self._room.turn.acquire()
        arrays = [by_host[host] for host in range(self.size)]
        match kind:
            case "all_reduce":
                wide = dtypes.SUM_DTYPE.get(tensor.dtype.name, tensor.dtype)
                result = tf.add_n([tf.cast(array, wide) for array in arrays])
            case "all_to_all":
                result = np.stack([array[self.rank] for array in arrays])
            case "all_gather":
                result = np.concatenate(arrays)
            case "broadcast":
                result = arrays[0]
        return tf.constant(result)
