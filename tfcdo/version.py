"""The version of tfcdo, read by the package's metadata without importing TensorFlow."""

__version__ = "0.9.0"


def adds_metrics_twice(keras: str) -> bool:
    """Returns whether TensorFlow's strategies add up metrics twice in a version of Keras."""
    # Keras 3.7 to 3.9 has its metrics' variables added up (keras-team/keras#21467), but does not
    # say when. TensorFlow then adds the replicas' parts when they are written. Metrics write the
    # total that they have read plus the new values, so the total counts K times.
    numbers = [int(number) for number in keras.split(".")[:2] if number.isdecimal()]
    return [3, 7] <= numbers < [3, 10]
