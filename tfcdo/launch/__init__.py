"""Starts the workers of a training job and ends them together, without TensorFlow."""
