"""The version of tfcdo, read by the package's metadata without importing TensorFlow."""

__version__ = "0.1.0"
