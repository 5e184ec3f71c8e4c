"""The NCCL executor: one `tf.raw_ops.NcclAllReduce` per device and pack."""

from __future__ import annotations

import functools
import itertools
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcdo import tf_internals
from tfcdo.execute import arithmetic
from tfcdo.execute import copy_trees
from tfcdo.execute import packs as packs_lib
from tfcdo.plan import packing

# The kernels of one pack find each other by this name: never used twice in a process, and not in
# another one either, as graphs may be saved and loaded there. `next` on it is atomic.
_numbers = itertools.count()
_PROCESS = uuid.uuid4().hex[:12]
_HOST = "/cpu:0"
_turn_lock = threading.Lock()  # All who trace must get the same tensor.


def all_reduce(
    plan: packing.BatchPlan,
    values: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    finish: arithmetic.Finish,
) -> list[list[tf.Tensor]]:
    """All-reduces a batch of values with NCCL.

    Args:
      plan: the packs; NCCL runs a schedule of its own, so their copy trees are not used.
      values: `values[d][v]` is value `v` as device `d` holds it.
      devices: the device names.
      finish: applied to each sum, on every device.

    Returns:
      The results, indexed like `values`.
    """
    if tf.executing_eagerly():
        # The kernels wait for each other, so they must run at the same time, not one by one. A
        # concrete function is a function even where tf.config.run_functions_eagerly(True) rules.
        held = [list(own) for own in values]
        results = _function(plan, tuple(devices), finish).get_concrete_function(held)(held)
        # What a function returns is where its last op ran, but TensorFlow may name another device.
        return [copy_trees.copy(own, device) for own, device in zip(results, devices, strict=True)]
    return packs_lib.all_reduce(
        plan, values, devices, lambda _, held: reduce_pack(held, devices, finish)
    )


# Tracing costs much more than running; the bound keeps a process that draws ever new shapes small.
@functools.lru_cache(maxsize=64)
def _function(plan: packing.BatchPlan, devices: Sequence[str], finish: arithmetic.Finish) -> Any:
    return tf.function(lambda values: all_reduce(plan, values, devices, finish), autograph=False)


def reduce_pack(
    held: Sequence[Sequence[tf.Tensor]], devices: Sequence[str], finish: arithmetic.Finish
) -> list[list[tf.Tensor]]:
    """All-reduces the tensors of one pack.

    Args:
      held: `held[d]` are the tensors, one a bundle, that device `d` puts in.
      devices: the device names.
      finish: applied to each sum.

    Returns:
      The results, indexed like `held`.
    """
    bundles = []
    for tensors in zip(*held, strict=True):
        wide = []
        for tensor, device in zip(tensors, devices, strict=True):
            with tf.device(device):
                wide.append(arithmetic.widened(tensor))
        totals = differentiable_sum(devices)(*wide)
        results = []
        for total, tensor, device in zip(totals, tensors, devices, strict=True):
            with tf.device(device):
                results.append(finish(total, tensor.dtype))
        bundles.append(results)
    return [list(own) for own in zip(*bundles, strict=True)]


def differentiable_sum(devices: Sequence[str]) -> Any:
    """The function that sums one tensor per device with NCCL, and can be differentiated.

    Each result is the sum of all inputs, so the gradient of each input is the sum of the gradients
    of all results: an all-reduce again, of any order.

    Args:
      devices: the device names.

    Returns:
      A function from one tensor per device to their sum on each device.
    """

    def nccl_sum(*tensors: tf.Tensor) -> list[tf.Tensor]:
        sums = _emit(tensors, devices)
        results = []
        for total, tensor, device in zip(sums, differentiated(*tensors), devices, strict=True):
            with tf.device(device):
                results.append(_with_gradient_of(total, tensor))
        return results

    # A gradient of all tensors together needs an op that all pass through, and TensorFlow's is on
    # one device. So the inputs go there, not the sums: whoever differentiates sees that op, but it
    # is pruned before the step runs, as nothing uses the values that it gives.
    @tf.custom_gradient
    def differentiated(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            # tf.gradients puts all ops of a gradient where the op is that they are of.
            graph = tf.compat.v1.get_default_graph()
            with graph.colocate_with(None, ignore_existing=True):
                return nccl_sum(*upstream)

        return list(tensors), gradient

    return nccl_sum


@tf.custom_gradient
def _with_gradient_of(total: tf.Tensor, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """The value of `total`, which hands the gradient that comes to it on to `tensor`."""
    del tensor
    return tf.identity(total), lambda upstream: (None, upstream)


def _emit(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    shared_name = f"tfcdo_{_PROCESS}_{next(_numbers)}"
    sums = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            sums.append(
                tf.raw_ops.NcclAllReduce(
                    input=tf.stop_gradient(tensor),  # See `differentiable_sum`.
                    reduction="sum",
                    num_devices=len(devices),
                    shared_name=shared_name,
                )
            )
    # Each kernel waits for all others, but TensorFlow does not know: it prunes those whose results
    # nobody asks for, and the rest would wait for ever. So each result depends on all of them.
    results = []
    with tf.control_dependencies([*sums, *_take_turn(sums)]):
        for total, device in zip(sums, devices, strict=True):
            with tf.device(device):
                results.append(tf.identity(total))
    return results


def _take_turn(sums: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Makes repeated calls of the `tf.function` that is being traced wait for each other.

    A function that is called twice in one step is there twice with the same shared names, and
    kernels of the one call would meet kernels of the other. TensorFlow runs the calls in turn if
    they write to the same resource; nothing else tells it that they must.

    Args:
      sums: what the kernels of a pack give.

    Returns:
      The ops that write; none in a graph of TensorFlow 1, which does not order calls: there, call
      such a function once in a step.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return []
    with _turn_lock:
        turn = _make_turn()
    with tf.control_dependencies(sums), tf.device(_HOST):
        write = tf.raw_ops.AssignAddVariableOp(resource=tf_internals.captured(turn), value=1)
    tf_internals.run_before_function_returns(write)
    return [write]


@functools.lru_cache(maxsize=1)
def _make_turn() -> tf.Tensor:
    """A counter that nobody reads; a bare handle, because a strategy would mirror a variable."""
    with tf.init_scope(), tf.device(_HOST):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=f"tfcdo_{_PROCESS}")
        tf.raw_ops.AssignVariableOp(resource=handle, value=0)
        return handle
