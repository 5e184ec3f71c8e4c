"""The dtypes that TensorFlow's collective ops take, and how others become them, exactly."""

from __future__ import annotations

import tensorflow as tf

# For `CollectiveReduceV2`: sums of integers are correct modulo their size in wider ones too, and a
# complex number is two real ones.
_SUMMED_AS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}
_SUMMED_BITS = {tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}
# For ops that only copy.
_COPIED_AS = {tf.bool: tf.int32, tf.int8: tf.int32, tf.uint8: tf.int32}
_COPIED_BITS = {
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.float64,
}


def as_summed(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that `CollectiveReduceV2` adds, exactly."""
    if tensor.dtype in _SUMMED_BITS:
        return tf.bitcast(tensor, _SUMMED_BITS[tensor.dtype])
    return tf.cast(tensor, _SUMMED_AS.get(tensor.dtype, tensor.dtype))


def dtype_copied(name: str) -> tf.DType:
    """Returns the dtype that `as_copied` turns tensors of a dtype into."""
    dtype = tf.as_dtype(name)
    return _COPIED_BITS.get(dtype, _COPIED_AS.get(dtype, dtype))


def as_copied(tensor: tf.Tensor) -> tf.Tensor:
    """Turns a tensor into a dtype that TensorFlow's other collective ops copy, exactly."""
    if tensor.dtype in _COPIED_BITS:
        return tf.bitcast(tensor, _COPIED_BITS[tensor.dtype])
    return tf.cast(tensor, _COPIED_AS.get(tensor.dtype, tensor.dtype))


def restored(received: tf.Tensor, like: tf.Tensor, summed: bool = False) -> tf.Tensor:
    """Turns a result back into the dtype of `like`; sums of 16-bit floats stay in 32 bits."""
    if like.dtype in (_SUMMED_BITS if summed else _COPIED_BITS):
        return tf.bitcast(received, like.dtype)
    if summed and like.dtype in (tf.float16, tf.bfloat16):
        return received
    return tf.cast(received, like.dtype)
