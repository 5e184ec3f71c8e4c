"""Counts the ops that an all-reduce runs, and the bytes that each type of op produces."""

from __future__ import annotations

import collections
import dataclasses

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.bench import implementations
from tfcdo.bench import steps
from tfcdo.bench import workloads

# The ops that read and use the values, and that only hold the graph together.
_NOT_OF_THE_ALL_REDUCE = ("VarHandleOp", "ReadVariableOp", "Assert", "Const", "NoOp", "unknown")
_WARMUP = 2


@dataclasses.dataclass(frozen=True)
class OpProfile:
    """All ops of one type in one step.

    Attributes:
      op: the type, such as `AddN`.
      count: how many ran.
      size: bytes of their outputs, shared ones counted again.
      seconds: the sum of their times.
    """

    op: str
    count: int
    size: int
    seconds: float


def profile(
    workload: workloads.Workload,
    num_devices: int,
    implementation: implementations.Implementation,
) -> list[OpProfile]:
    """Runs one step on virtual CPU devices and lists what ran after the graph was optimized.

    Args:
      workload: what is all-reduced.
      num_devices: over how many virtual devices.
      implementation: how.

    Returns:
      One entry for each type of op, the one that produces most bytes first. Values that pass from
      one device to another show as `_Recv`.
    """
    names = [tf_internals.canonical_device(f"CPU:{number}") for number in range(num_devices)]
    # A session is the only public way to see what TensorFlow makes of a graph.
    config = tf.compat.v1.ConfigProto(device_count={"CPU": num_devices})
    # Only in sessions, an optimizer of memory makes each large AddN a row of AssignAdd. Off (1), it
    # leaves the graph like that of the tf.function that is timed.
    config.graph_options.rewrite_options.memory_optimization = 1
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        values_by_device, always_true = _variables(workload, names)
        results = steps.all_reduce(implementation.reducer(names), values_by_device)
        used = []
        for device, condition, device_results in zip(names, always_true, results, strict=True):
            with tf.device(device):
                used.append(
                    tf.raw_ops.Assert(condition=condition, data=device_results, summarize=1)
                )
        session.run(tf.compat.v1.global_variables_initializer())
        step = tf.group(*used)
        for _ in range(_WARMUP):
            session.run(step)
        metadata = tf.compat.v1.RunMetadata()
        options = tf.compat.v1.RunOptions(
            trace_level=tf.compat.v1.RunOptions.FULL_TRACE, output_partition_graphs=True
        )
        session.run(step, options=options, run_metadata=metadata)
    return _by_op(metadata)


def _variables(
    workload: workloads.Workload, names: list[str]
) -> tuple[steps.ValuesByDevice, list[tf.Tensor]]:
    values_by_device, always_true = [], []
    for rank, device in enumerate(names):
        with tf.device(device):
            device_values = [
                tf.compat.v1.get_variable(
                    f"value_{rank}_{index}",
                    shape,
                    workload.dtype,
                    tf.compat.v1.zeros_initializer(),
                    use_resource=True,
                ).read_value()
                for index, shape in enumerate(workload.shapes)
            ]
            condition = tf.compat.v1.get_variable(
                f"true_{rank}", initializer=True, use_resource=True
            )
        values_by_device.append(device_values)
        always_true.append(condition.read_value())
    return values_by_device, always_true


def _by_op(metadata: tf.compat.v1.RunMetadata) -> list[OpProfile]:
    op_of_node = {node.name: node.op for graph in metadata.partition_graphs for node in graph.node}
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    micros: collections.Counter[str] = collections.Counter()
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            op = op_of_node.get(node.node_name, "unknown")
            counts[op] += 1
            micros[op] += node.op_end_rel_micros - node.op_start_rel_micros
            sizes[op] += sum(
                output.tensor_description.allocation_description.requested_bytes
                for output in node.output
            )
    found = [OpProfile(op, counts[op], sizes[op], micros[op] / 1e6) for op in counts]
    return sorted(
        (entry for entry in found if entry.op not in _NOT_OF_THE_ALL_REDUCE),
        key=lambda entry: (-entry.size, -entry.count),
    )
