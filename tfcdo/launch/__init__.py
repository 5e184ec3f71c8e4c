"""Starts the workers of a training job and ends them together: the inside of `tfcdo launch`.

Nothing here imports TensorFlow: the workers do.
"""
