"""Execution: turning a plan into TensorFlow ops under `tf.device`."""
