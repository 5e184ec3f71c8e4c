"""The version of tfcdo, read by the package's metadata without importing TensorFlow."""

__version__ = "1.0.0"
