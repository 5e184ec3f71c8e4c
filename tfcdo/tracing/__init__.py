"""Finds all-reduces in the profiles of TensorFlow."""
