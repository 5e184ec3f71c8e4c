"""The step between hosts, in the middle of a pack's way: up a copy tree, across, and down again.

The roots of one pack on all hosts exchange what their trees have summed, with TensorFlow's own
collective ops; nothing else crosses between hosts. Each root sends what its host sums to, so the
network carries the data of one device a host, however many devices there are. Or, where NCCL runs,
all devices of all hosts take part in one collective, and there are no trees.

With a wire dtype, floats travel in 16 bits but are added in their own: see `shares`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.cluster.session import Session
from tfcdo.execute import alike
from tfcdo.execute import handles
from tfcdo.execute import numerics
from tfcdo.execute import packs
from tfcdo.execute import shares
from tfcdo.execute import wire


@dataclasses.dataclass(frozen=True)
class Network:
    """Holds the connection of a host to the others.

    Attributes:
      session: what this process shares with the other hosts.
      hint: which implementation of collectives TensorFlow is to use: "auto", "ring" or "nccl".
    """

    session: Session
    hint: str

    @property
    def num_hosts(self) -> int:
        """Returns the number of hosts."""
        return len(self.session.cluster.tasks)

    @property
    def host_device(self) -> str:
        """Returns the name of this host's own CPU."""
        prefix = self.session.cluster.tasks[self.session.cluster.index].device_prefix
        return f"{prefix}/device:CPU:0"

    def exchange(
        self,
        description: Mapping[str, Any],
        num_collectives: int,
        wires: Sequence[tf.DType | None] = (),
    ) -> Exchange:
        """Begins what the hosts exchange for one batch.

        Args:
          description: what must be the same on all hosts: JSON values by name.
          num_collectives: how many collectives it takes.
          wires: see `Exchange`.

        Returns:
          The exchange, whose methods emit the collectives, in the same order on all hosts.
        """
        return Exchange(self, {**description, "collectives": num_collectives}, wires)

    def exchange_sums(
        self, description: Mapping[str, Any], wires: Sequence[tf.DType | None]
    ) -> Exchange:
        """Begins an exchange of sums; see `exchange`.

        Args:
          description: what must be the same on all hosts.
          wires: for each call of `all_reduce`, the dtype that values are cast to; None for none.
        """
        names = {"wire_between": [one.name if one else "as it is" for one in wires]}
        count = sum(1 if one is None else 2 for one in wires)
        return self.exchange({**description, **(names if any(wires) else {})}, count, wires)


class Exchange:
    """Emits the collectives of all hosts for one batch of values, in a fixed order.

    Args:
      network: what joins the hosts.
      description: what must be the same on all hosts; "collectives" is how many there are.
      wires: for each call of `all_reduce`, the dtype that values are cast to; None for none.
    """

    def __init__(
        self,
        network: Network,
        description: Mapping[str, Any],
        wires: Sequence[tf.DType | None] = (),
    ) -> None:
        self._network = network
        self._wires = iter(wires)
        self._count: int = description["collectives"]
        self._counter = handles.counter(network.session, network.host_device, description)
        with tf.device(network.host_device):
            keys = tf_internals.value_at_call_time(
                lambda: self._next_keys(description), tf.TensorSpec([self._count], tf.int32)
            )
            self._keys = iter(tf.unstack(keys, self._count))

    def all_reduce(self, tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        """Adds up what one device of each host holds, with one collective, or two where it is cast.

        Args:
          tensors: tensors of one dtype on `device`; of the same shapes on all hosts.
          device: the device; the one with the same number takes part on each other host.

        Returns:
          The sums over all hosts, on the same device: the same bits on all hosts. Floats of 16 bits
          come back in 32.
        """
        wire_dtype = next(self._wires, None)
        with tf.device(device):
            if wire_dtype is not None:
                return self._sum_of_shares(tensors, device, wire_dtype)
            if len(tensors) == 1:
                return self._differentiable_sum(tensors, [device])
            flat = tf.concat([packs.flatten(tensor) for tensor in tensors], 0)
            [total] = self._differentiable_sum([flat], [device])
            return packs.cut_like(total, tensors)

    def all_reduce_flat(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[tf.Tensor]:
        """Adds up what all devices of all hosts hold, with one collective over all of them.

        Over GPUs this is what NCCL does best. It has never been seen to run there: the tests join
        virtual CPU devices, by rings.

        Args:
          tensors: one tensor a device, of one dtype and shape on all of them.
          devices: the device names, all different, as many on every host.

        Returns:
          The sums, indexed like `tensors`. Floats of 16 bits come back in 32.
        """
        return self._differentiable_sum(tensors, devices)

    def all_gather(self, tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
        """Concatenates the rows of all hosts, of several tensors together.

        What is of one dtype on the wire travels together: it takes one collective for the numbers
        of rows, and one for each such dtype.

        Args:
          tensors: tensors of at least one axis; of another number of rows on other hosts, but else
            of the same shape and dtype.
          device: the device that they are on.

        Returns:
          Tensors of all rows, in the order of the hosts.
        """
        with tf.device(device):
            sent = [wire.as_copied(tensor) for tensor in tensors]
            rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in sent])
            counts = self._gather(rows[tf.newaxis], device)
            groups = alike.group(tensor.dtype for tensor in sent)
            gathered = [
                self._gather_flat(
                    alike.members(sent, indices),
                    tf.gather(counts, packs.int64(indices), axis=1),
                    device,
                )
                for indices in groups
            ]
            results = alike.in_order(groups, gathered)
            return [
                wire.from_wire(result, tensor)
                for result, tensor in zip(results, tensors, strict=True)
            ]

    def _gather_flat(
        self, tensors: Sequence[tf.Tensor], counts: tf.Tensor, device: str
    ) -> list[tf.Tensor]:
        """Gathers tensors of one dtype, laid end to end.

        Args:
          tensors: the tensors, in a dtype of the wire.
          counts: `[host, tensor]`: how many rows each host has.
          device: the device that they are on.

        Returns:
          One tensor each, of all hosts' rows.
        """
        num_hosts = self._network.num_hosts
        shapes = [packs.shape(tensor)[1:] for tensor in tensors]
        sizes = counts * tf.stack([tf.reduce_prod(shape) for shape in shapes])
        totals = tf.reduce_sum(sizes, 1)
        # The collective takes as much from each host, and at least one element.
        most = tf.maximum(tf.reduce_max(totals), 1)
        flat = tf.concat([packs.flatten(tensor) for tensor in tensors], 0)
        padding = tf.zeros([most - tf.size(flat, tf.int64)], flat.dtype)
        gathered = self._gather(tf.concat([flat, padding], 0), device)
        cuts = tf.reshape(tf.concat([sizes, (most - totals)[:, tf.newaxis]], 1), [-1])
        parts = tf.split(gathered, cuts, num=num_hosts * (len(tensors) + 1))
        results = []
        for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            joined = tf.concat(parts[index :: len(tensors) + 1], 0)
            rows = tf.reduce_sum(counts[:, index])[tf.newaxis]
            result = tf.reshape(joined, tf.concat([rows, shape], 0))
            result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
            results.append(result)
        return results

    def concat(self, tensors: Sequence[tf.Tensor], axis: Any, device: str) -> list[tf.Tensor]:
        """Concatenates tensors of all hosts along an axis, in as many collectives as `all_gather`.

        Args:
          tensors: the tensors; another host's may have another size along the axis.
          axis: the axis, an int or a 0-D tensor of ints; from the end if it is negative.
          device: the device that they are on.

        Returns:
          The concatenations, in the order of the hosts.
        """
        if tf.get_static_value(axis) == 0:
            return self.all_gather(tensors, device)
        with tf.device(device):
            turns = [packs.axis_first(tf.rank(tensor), axis) for tensor in tensors]
            first = [tf.transpose(t, turn) for t, (turn, _) in zip(tensors, turns, strict=True)]
        gathered = self.all_gather(first, device)
        with tf.device(device):
            results = []
            for rows, tensor, (_, back) in zip(gathered, tensors, turns, strict=True):
                result = tf.transpose(rows, back)
                result.set_shape([None] * tensor.shape.rank if tensor.shape.rank else None)
                results.append(result)
            return results

    def broadcast(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """Returns the chief's tensor on every host, bit for bit; takes one collective.

        Args:
          tensor: this host's tensor, of the chief's dtype and shape.
          device: the device that it is on.
        """
        with tf.device(device):
            sent = wire.as_copied(tensor)
            common = {
                "group_size": self._network.num_hosts,
                "group_key": handles.group_key(device),
                "instance_key": next(self._keys),
                "communication_hint": self._network.hint,
                "timeout_seconds": 0.0,
            }
            entered = self._mark(sent)
            if self._network.session.cluster.is_chief:
                received = tf.raw_ops.CollectiveBcastSendV2(input=sent, **common)
            else:
                received = tf.raw_ops.CollectiveBcastRecvV2(
                    T=sent.dtype, shape=tf.shape(sent), **common
                )
            self._mark(received, after=entered)
            return wire.from_wire(received, tensor)

    def _differentiable_sum(
        self, tensors: Sequence[tf.Tensor], devices: Sequence[str]
    ) -> list[tf.Tensor]:
        """Sums over the hosts; the gradient of a sum of all is the sum of all gradients."""

        @tf.custom_gradient
        def summed(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                totals = self._of_gradient(upstream, devices)._differentiable_sum(upstream, devices)
                return [
                    tf.cast(total, one.dtype) for total, one in zip(totals, upstream, strict=True)
                ]

            return self._sum(values, devices), gradient

        return list(summed(*tensors))

    def _sum_of_shares(
        self, tensors: Sequence[tf.Tensor], device: str, wire_dtype: tf.DType
    ) -> list[tf.Tensor]:
        """Sums over the hosts in 16 bits; the gradient is that of a sum, and not cast."""

        @tf.custom_gradient
        def summed(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                return self._of_gradient(upstream, [device]).all_reduce(upstream, device)

            totals = shares.all_reduce(
                values,
                wire_dtype,
                self._network.num_hosts,
                # In two lines: while the sums of one pack come, the shares of the next one leave.
                lambda rows: self._copy(tf.raw_ops.CollectiveAllToAllV2, rows, device, "shares"),
                lambda rows: self._copy(tf.raw_ops.CollectiveGatherV2, rows, device, "sums"),
            )
            return totals, gradient

        return list(summed(*tensors))

    def _of_gradient(self, upstream: Sequence[tf.Tensor], devices: Sequence[str]) -> Exchange:
        """Begins the exchange of the gradient of a sum, which takes one collective."""
        description = {
            "what": "gradient of an all-reduce",
            "values": [describe(one) for one in upstream],
            "device": ", ".join(handles.device_number(device) for device in devices),
        }
        return self._network.exchange(description, 1)

    def _sum(self, tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
        parts = []
        for tensor, device in zip(tensors, devices, strict=True):
            with tf.device(device):
                parts.append(wire.as_summed(tensor))
        entered, key = self._mark(*parts), next(self._keys)
        totals = []
        for part, device in zip(parts, devices, strict=True):
            with tf.device(device):
                total = tf.raw_ops.CollectiveReduceV2(
                    input=part,
                    group_size=self._network.num_hosts * len(devices),
                    group_key=handles.group_key(*devices),
                    instance_key=key,
                    ordering_token=[handles.ordering_token(device)],
                    merge_op="Add",
                    final_op="Id",
                    communication_hint=self._network.hint,
                )
                totals.append(total)
        self._mark(*totals, after=entered)
        results = []
        for total, tensor, device in zip(totals, tensors, devices, strict=True):
            with tf.device(device):
                results.append(numerics.widened(wire.from_wire(total, tensor, summed=True)))
        return results

    def _gather(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        return self._copy(tf.raw_ops.CollectiveGatherV2, tensor, device)

    def _copy(
        self, collective: Callable[..., tf.Tensor], tensor: tf.Tensor, device: str, line: str = ""
    ) -> tf.Tensor:
        entered = self._mark(tensor)
        copied = collective(
            input=tensor,
            group_size=self._network.num_hosts,
            group_key=handles.group_key(device),
            instance_key=next(self._keys),
            ordering_token=[handles.ordering_token(device, line)],
            communication_hint=self._network.hint,
        )
        self._mark(copied, after=entered)
        return copied

    def _mark(self, *tensors: tf.Tensor, after: tf.Operation | None = None) -> tf.Operation:
        """Counts one more event, entering or leaving a collective, for whoever watches."""
        before = [*tensors, after] if after is not None else tensors
        with tf.control_dependencies(before), tf.device(self._network.host_device):
            mark = tf.raw_ops.AssignAddVariableOp(
                resource=tf_internals.captured(self._counter), value=tf.constant(1, tf.int64)
            )
        if mark is not None:
            tf_internals.run_before_function_returns(mark)
        return mark

    def _next_keys(self, description: Mapping[str, Any]) -> tf.Tensor:
        keys = self._network.session.next_keys(description, self._count)
        with tf.device(self._network.host_device):
            return tf.constant(keys, tf.int32)


def describe(tensor: Any) -> str:
    """Names a tensor's dtype and static shape, such as `float32[2,3]`; `?` is not known."""
    if tensor.shape.rank is None:
        return f"{tensor.dtype.name}[...]"
    sizes = ",".join("?" if size is None else str(size) for size in tensor.shape.as_list())
    return f"{tensor.dtype.name}[{sizes}]"
