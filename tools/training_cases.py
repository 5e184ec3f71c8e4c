"""Lists the trainings of docs/compat.md: what Keras offers, on K replicas as on one device?

Everything is small: a few steps of a few examples are enough to tell a wrong sum from a right one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

EXAMPLES = 60
BATCH = 30  # Divides by 2, 3 and 5 replicas.
Data = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """A training and what is made of it.

    Attributes:
      name: what it is about.
      build: makes the model.
      optimizer: makes the optimizer.
      data: makes inputs, targets and, if any, the weights of the examples.
      compile: further arguments of `compile`.
      fit: further arguments of `fit`.
      metrics: the names of metrics.
      tolerance: how much weights and reported numbers may differ, relative to 1 or their size.
      weighted: whether tfcdo's `weight_by_examples` is used.
      evaluate_batch: the size of the batches of `evaluate`, if that is called too.
      saved_only: whether `evaluate` in the strategy is compared with that of the saved model,
        rather than the training with that on one device.
      reason: why it cannot be as on one device.
      counts: the numbers of replicas to compare with one device.
      wire_dtype: the dtype of gradients on their way, for tfcdo alone.
    """

    name: str
    build: Callable[[], keras.Model]
    optimizer: Callable[[], Any] = lambda: optimizers.SGD(0.1, momentum=0.5)
    data: Callable[[], Data] = lambda: numbers()
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: tuple[str, ...] = ("mae",)
    tolerance: float = 2e-5
    weighted: bool = False
    evaluate_batch: int | None = None
    saved_only: bool = False
    reason: str = ""
    counts: tuple[int, ...] = (2, 3, 5)
    wire_dtype: str | None = None


def numbers(examples: int = EXAMPLES) -> Data:
    inputs = np.random.default_rng(0).normal(0.5, 1, [examples, 6]).astype(np.float32)
    return inputs, np.sin(inputs[:, :2]) + inputs[:, 2:4]


def far_from_zero() -> Data:
    inputs, targets = numbers()
    return 10 + 0.1 * inputs, targets


def pictures() -> Data:
    inputs = np.random.default_rng(0).normal(size=[EXAMPLES, 6, 6, 2]).astype(np.float32)
    return inputs, inputs.mean((1, 2))


def sequences() -> Data:
    inputs = np.random.default_rng(0).normal(size=[EXAMPLES, 4, 3]).astype(np.float32)
    return inputs, inputs.mean(1)[:, :2]


def words() -> Data:
    inputs = np.random.default_rng(0).integers(0, 9, [EXAMPLES, 4])
    return inputs, inputs[:, :2] / np.float32(4)


def different_words() -> Data:
    inputs = np.random.default_rng(0).permutation(4 * EXAMPLES).reshape([EXAMPLES, 4])
    return inputs, inputs[:, :2] / np.float32(2 * EXAMPLES)


def weighted_numbers() -> Data:
    return *numbers(), np.linspace(0.2, 2, EXAMPLES, dtype=np.float32)


def labels() -> Data:
    inputs, targets = numbers()
    return inputs, (targets[:, :1] > targets[:, 1:]).astype(np.float32)


def sentences() -> Data:
    words, lengths = np.random.default_rng(0).integers(1, 9, [EXAMPLES, 6]), np.arange(EXAMPLES) % 7
    words[np.arange(6) >= np.sort(lengths)[:, None]] = 0
    return words, words[:, :, None] / np.float32(4)


def stack(*parts: Any, shape: tuple[int, ...] = (6,), dtype: str = "float32") -> keras.Model:
    return keras.Sequential([layers.Input(shape, dtype=dtype), *parts])


def dense(*between: Any, **options: Any) -> keras.Model:
    return stack(layers.Dense(4, activation="tanh", **options), *between, layers.Dense(2))


def convolutional() -> keras.Model:
    return stack(
        layers.Conv2D(3, 3, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(2),
        shape=(6, 6, 2),
    )


def recurrent() -> keras.Model:
    return stack(layers.LSTM(3), layers.Dense(2), shape=(4, 3))


def attention() -> keras.Model:
    inputs = keras.Input((4, 3))
    attended = layers.MultiHeadAttention(2, 2)(inputs, inputs)
    summed = layers.LayerNormalization()(inputs + attended)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(summed)))


def embedding(words: int = 9) -> keras.Model:
    return stack(
        layers.Embedding(words, 3), layers.Flatten(), layers.Dense(2), shape=(4,), dtype="int32"
    )


def masked() -> keras.Model:
    embedding = layers.Embedding(9, 3, mask_zero=True)
    return stack(embedding, layers.Dense(1), shape=(6,), dtype="int32")


def normalized(**options: Any) -> keras.Model:
    return dense(layers.BatchNormalization(momentum=0.5, **options))


class Penalty(layers.Layer):
    """Adds a mean over examples to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(inputs**2))
        return inputs


def sixteen_bits() -> keras.Model:
    model = dense()
    for layer in model.layers:
        layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    return model


TRAININGS = (
    Training("a dense model", dense),
    Training("a convolutional model", convolutional, data=pictures),
    Training("a recurrent model", recurrent, data=sequences),
    Training("an attention model", attention, data=sequences),
    Training("an embedding", embedding, data=words),
    Training("`clipnorm`", dense, lambda: optimizers.SGD(0.5, clipnorm=0.05)),
    Training("`clipvalue`", dense, lambda: optimizers.SGD(0.5, clipvalue=0.02)),
    Training("`global_clipnorm`", dense, lambda: optimizers.SGD(0.5, global_clipnorm=0.05)),
    Training(
        # Keras on one device takes two norms of a word that is twice in a batch.
        "`global_clipnorm`, an embedding of different words",
        lambda: embedding(4 * EXAMPLES),
        lambda: optimizers.SGD(0.5, global_clipnorm=0.05),
        different_words,
    ),
    Training(
        "`gradient_accumulation_steps`",
        dense,
        lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1),
    ),
    Training("`use_ema`", dense, lambda: optimizers.SGD(0.2, use_ema=True, ema_momentum=0.6)),
    Training(
        "`ema_overwrite_frequency`",
        dense,
        lambda: optimizers.SGD(0.2, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2),
    ),
    Training(
        "1 replica: `gradient_accumulation_steps` and `ema_overwrite_frequency`",
        dense,
        lambda: optimizers.Adam(
            0.05,
            gradient_accumulation_steps=2,
            global_clipnorm=0.1,
            use_ema=True,
            ema_overwrite_frequency=2,
        ),
        counts=(1,),
    ),
    Training(
        "1 replica: `LossScaleOptimizer` and `gradient_accumulation_steps`",
        dense,
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.2, clipnorm=0.1, gradient_accumulation_steps=2), 16.0
        ),
        counts=(1,),
    ),
    Training("`AdamW`, weight decay", dense, lambda: optimizers.AdamW(0.05, weight_decay=0.1)),
    Training(
        "`LossScaleOptimizer` and `clipnorm`",
        dense,
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.2, clipnorm=0.1), 16.0, dynamic_growth_steps=2
        ),
    ),
    Training(
        "`LossScaleOptimizer`, float16",
        sixteen_bits,
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.2), 2.0**10),
        tolerance=2e-3,
    ),
    Training("`BatchNormalization(synchronized=True)`", lambda: normalized(synchronized=True)),
    Training(
        # In 16 bits, the variance of these inputs is lost in the rounding of their mean.
        "`BatchNormalization(synchronized=True)`, gradients copied in bfloat16 by tfcdo",
        lambda: stack(layers.BatchNormalization(momentum=0.5, synchronized=True), layers.Dense(2)),
        data=far_from_zero,
        tolerance=2e-2,
        wire_dtype="bfloat16",
    ),
    Training(
        "`BatchNormalization()`",
        normalized,
        reason="each replica normalizes its own part of a batch, as Keras means it; "
        "`synchronized=True` is the other way",
    ),
    Training(
        "`BatchNormalization()`: `evaluate` in the strategy and with the saved model",
        normalized,
        evaluate_batch=BATCH,
        saved_only=True,
    ),
    Training(
        "`Dropout`",
        lambda: dense(layers.Dropout(0.5, seed=1)),
        reason="all replicas draw the same mask, each for its own part of a batch",
    ),
    Training("metrics over batches that do not divide", dense, evaluate_batch=14),
    Training(
        "a first batch that does not divide, `weight_by_examples`",
        dense,
        data=lambda: numbers(BATCH - 7),
        weighted=True,
    ),
    Training(
        "a last batch that does not divide",
        dense,
        data=lambda: numbers(BATCH + 7),
        reason="the mean of unequal means; `tfcdo.keras.weight_by_examples(model)` corrects it",
    ),
    Training(
        "a last batch that does not divide, `weight_by_examples`",
        dense,
        data=lambda: numbers(BATCH + 7),
        weighted=True,
    ),
    Training(
        "a last batch of 1 example, `weight_by_examples`",
        dense,
        data=lambda: numbers(BATCH + 1),
        weighted=True,
    ),
    Training(
        "sentences with a mask",
        masked,
        data=sentences,
        reason="the mean of means over unequal numbers of words; "
        "`tfcdo.keras.weight_by_examples(model)` corrects it",
    ),
    Training("sentences with a mask, `weight_by_examples`", masked, data=sentences, weighted=True),
    Training(
        "a last batch of 1 example, `BatchNormalization()`",
        normalized,
        data=lambda: numbers(BATCH + 1),
        reason="the statistics of no examples are NaN: `drop_remainder=True`",
    ),
    Training("sample weights", dense, data=weighted_numbers),
    Training(
        "class weights",
        lambda: stack(layers.Dense(1, activation="sigmoid")),
        data=labels,
        compile={"loss": "binary_crossentropy"},
        fit={"class_weight": {0: 0.3, 1: 2.0}},
        metrics=("accuracy", "auc"),
    ),
    Training("regularization losses", lambda: dense(kernel_regularizer="l2")),
    Training("`add_loss`", lambda: dense(Penalty())),
    Training("`steps_per_execution=2`", dense, compile={"steps_per_execution": 2}),
    Training("`run_eagerly=True`", dense, compile={"run_eagerly": True}),
    Training(
        "`jit_compile=True`",
        dense,
        compile={"jit_compile": True},
        reason="TensorFlow compiles no step with XLA for several CPU devices",
    ),
)
