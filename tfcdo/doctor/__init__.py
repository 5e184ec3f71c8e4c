"""Examines a machine for `tfcdo doctor`; all that needs TensorFlow runs in another process."""
