"""Starts the workers of a training job and ends them together: what `tfcdo launch` does.

Nothing here imports TensorFlow: the workers do.
"""
