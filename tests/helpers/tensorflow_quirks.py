"""Keeps tests clear of two defects of TensorFlow that have nothing to do with what is tested."""

import tensorflow as tf


def end_iterators_at_once() -> None:
    """Turns tf.data's tuning off, whose thread may keep an iterator from ending for a minute."""
    # The end wakes the thread up before it says that it is the end, so it may sleep again.
    options = tf.data.Options()
    options.autotune.enabled = False
    # Called for each dataset that is iterated over, on one device or on several.
    tf.data.Dataset._apply_debug_options = lambda dataset: dataset.with_options(options)


def keep_collectives_apart() -> None:
    """Gives a test's strategies keys of their own, which fail if another test's shapes differ."""
    tf.distribute.MirroredStrategy._collective_key_base += 1000
