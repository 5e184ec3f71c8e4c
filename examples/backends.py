"""One script for two backends of Keras: TensorFlow and JAX, on 4 virtual CPU devices.

    KERAS_BACKEND=tensorflow python examples/backends.py
    KERAS_BACKEND=jax python examples/backends.py          # pip install jax

Both print the same losses, as on one device. `keras.distribution.set_distribution` would do that
on JAX only: on TensorFlow it is ignored. The weights are drawn by NumPy, because the backends draw
other random numbers.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # JAX's devices.

import keras
import numpy as np

import tfcdo

DEVICES = 4

if keras.backend.backend() == "tensorflow":
    tfcdo.configure_virtual_cpus(DEVICES)
tfcdo.keras.set_distribution(keras.distribution.DataParallel())

rng = np.random.default_rng(0)
inputs = rng.normal(size=[480, 8]).astype("float32")
targets = np.sin(inputs[:, :2])

model = keras.Sequential(
    [keras.layers.Input([8]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)]
)
model.set_weights([rng.normal(0, 0.3, weight.shape) for weight in model.weights])
model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
losses = model.fit(inputs, targets, batch_size=32, epochs=3, shuffle=False, verbose=0).history
print(f"{keras.backend.backend()} on {DEVICES} devices: {np.round(losses['loss'], 6).tolist()}")
