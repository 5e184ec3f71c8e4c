"""Runs the trainings of docs/compat.md: features of Keras, on K replicas and on one device.

Everything is small: a few steps of a few examples are enough to tell a wrong sum from a right one.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD, Adagrad, Adam, AdamW, LossScaleOptimizer, RMSprop
from pages import Row, error_text, largest_difference

import tfcdo.keras

EXAMPLES = 60
BATCH = 30  # Divides by 2, 3 and 5 replicas.
# Largest differences of weights and of reported numbers.
Differences = tuple[float, float]


def drawn(*shape: int, mean: float = 0.0) -> np.ndarray:
    return np.random.default_rng(0).normal(mean, 1, [EXAMPLES, *shape]).astype(np.float32)


# Inputs and targets.
INPUTS = drawn(6, mean=0.5)
NUMBERS = INPUTS, np.sin(INPUTS[:, :2]) + INPUTS[:, 2:4]
AFTER_1, AFTER_7, ONLY_23 = ([part[: BATCH + more] for part in NUMBERS] for more in (1, 7, -7))
FAR_FROM_ZERO = 10 + 0.1 * INPUTS, NUMBERS[1]
LABELED = INPUTS, (NUMBERS[1][:, :1] > NUMBERS[1][:, 1:]).astype(np.float32)
PICTURES = drawn(6, 6, 2), drawn(6, 6, 2).mean((1, 2))
SEQUENCES = drawn(4, 3), drawn(4, 3).mean(1)[:, :2]
_WORDS = np.random.default_rng(0).integers(0, 9, [EXAMPLES, 4])
WORDS = _WORDS, _WORDS[:, :2] / np.float32(4)
# Zeros after 0 to 6 words are masked.
_TEXT = np.random.default_rng(0).integers(1, 9, [EXAMPLES, 6])
_TEXT[np.arange(6) >= np.sort(np.arange(EXAMPLES) % 7)[:, None]] = 0
SENTENCES = _TEXT, _TEXT[:, :, None] / np.float32(4)
TAGGED = _TEXT, (SENTENCES[1], _TEXT[:, :, None] % 2)


def stack(*makers: Any, shape: tuple[int, ...] = (6,), dtype: str = "float32") -> keras.Model:
    return keras.Sequential([layers.Input(shape, dtype=dtype), *(make() for make in makers)])


def dense(*makers: Any, **options: Any) -> keras.Model:
    between = [make() for make in makers]
    first = layers.Dense(4, activation="tanh", **options)
    return keras.Sequential([layers.Input((6,)), first, *between, layers.Dense(2)])


def convolutional(*makers: Any) -> keras.Model:
    convolution = partial(layers.Conv2D, 3, 3, activation="tanh")
    return stack(*makers, convolution, layers.GlobalAveragePooling2D, OUTPUT, shape=(6, 6, 2))


def recurrent(**options: Any) -> keras.Model:
    return stack(partial(layers.LSTM, 3, **options), OUTPUT, shape=(4, 3))


def attention(dropout: float = 0.0) -> keras.Model:
    inputs = keras.Input((4, 3))
    attended = layers.MultiHeadAttention(2, 2, dropout=dropout)(inputs, inputs)
    summed = layers.LayerNormalization()(inputs + attended)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(summed)))


def tagger() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    tags = layers.Dense(1, activation="sigmoid")(embedded)
    return keras.Model(inputs, [layers.Dense(1)(embedded), tags])


def sixteen_bits() -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    keras.config.set_dtype_policy(before)
    return model


class Penalty(layers.Layer):
    """Adds a mean over examples to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(inputs**2))
        return inputs


class Contrastive(keras.losses.Loss):
    """Compares each prediction with the targets of the whole batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        y_true, y_pred = tfcdo.keras.global_batch((y_true, y_pred))
        similarities = tf.matmul(y_pred, tf.cast(y_true, y_pred.dtype), transpose_b=True)
        own = tf.range(tf.shape(similarities)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(own, similarities)


def two_optimizers() -> Any:
    chosen = keras.optimizers.OptimizerMap(SGD(0.1), {".*bias": Adam(0.05)})
    return keras.optimizers.MultiOptimizer(chosen)


# Layers and models.
OUTPUT = partial(layers.Dense, 2)
VECTORS = partial(layers.Embedding, 9, 3)
NORMALIZATION = partial(layers.BatchNormalization, momentum=0.5)
SYNCHRONIZED = partial(NORMALIZATION, synchronized=True)
EMBEDDING = partial(stack, VECTORS, layers.Flatten, OUTPUT, shape=(4,), dtype="int32")
BAG_OF_WORDS = partial(stack, partial(layers.Lambda, tf.sparse.from_dense), OUTPUT, shape=(4,))
MASKED = partial(stack, partial(VECTORS, mask_zero=True), partial(layers.Dense, 1), dtype="int32")
DROPPING = partial(dense, partial(layers.Dropout, 0.5))
NORMALIZED = partial(dense, NORMALIZATION)
# Optimizers.
ADAM = partial(Adam, 0.05)
CLIPNORM = partial(SGD, 0.5, clipnorm=0.05)
GLOBAL_CLIPNORM = partial(SGD, 0.5, global_clipnorm=0.05)
MOMENTUM = partial(SGD, 0.1, momentum=0.5)
ACCUMULATING = partial(ADAM, gradient_accumulation_steps=2, global_clipnorm=0.1)
EMA = partial(SGD, 0.2, use_ema=True, ema_momentum=0.6)
SCALED = partial(LossScaleOptimizer, initial_scale=16.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """A training that is compared with the same one on one device."""

    build: Callable[[], keras.Model] = dense
    optimizer: Callable[[], Any] = MOMENTUM
    data: Any = NUMBERS
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)  # More arguments.
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Largest difference of weights and reported numbers, relative to 1 or their size.
    tolerance: float = 2e-5
    evaluate_batch: int | None = None  # The size of the batches of `evaluate`, if it is called.
    saved_only: bool = False  # Only `evaluate` is compared, with the saved model's.
    reason: str = ""  # Why it cannot be as on one device.
    loop: bool = False  # An own loop instead of `fit`.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # tfcdo's strategy gets them.
    counts: tuple[int, ...] = (2, 3, 5)  # Numbers of replicas.

    def row(self, library: str) -> Row:
        """Runs the training with one library on all numbers of replicas."""
        ops = tf.distribute.ReductionToOneDevice()
        strategy: Any = partial(tf.distribute.MirroredStrategy, cross_device_ops=ops)
        if library == "tfcdo":
            strategy = partial(tfcdo.MirroredStrategy, **self.options)
        found: dict[int, Differences | str] = {}
        for count in self.counts:
            devices = [f"CPU:{index}" for index in range(count)]
            try:
                found[count] = differences(self, strategy(devices))
            except Exception as error:
                found[count] = error_text(error)
        return self.judge(found)

    def judge(self, found: Mapping[int, Differences | str]) -> Row:
        """Makes a row of the differences, or errors, by the number of replicas."""
        errors = {count: text for count, text in found.items() if isinstance(text, str)}
        if errors:
            text, good = next(iter(errors.values())), False
            if len(errors) < len(found):
                text += f" ({' and '.join(map(str, errors))} replicas)"
        else:
            largest = np.max([*found.values()], axis=0)
            text = ", ".join(f"{number:.0e}" if number else "0" for number in largest)
            good = bool(np.all(largest <= self.tolerance))
        if self.reason and not good:
            return Row("~", f"{text}: {self.reason}")
        return Row("✓" if good else "✗", text)


SHARDED: dict[str, Any] = {"options": {"shard_optimizer_state": True}}
XLA: dict[str, Any] = {
    "compile": {"jit_compile": True},
    "reason": "TensorFlow compiles no step with XLA for several CPU devices",
}
SUBJECTS: dict[str, dict[str, Training]] = {
    "Models": {
        "a dense model": Training(),
        "an own loop": Training(optimizer=partial(ADAM, clipnorm=0.1), loop=True),
        "a convolutional model": Training(convolutional, data=PICTURES),
        "a recurrent model": Training(recurrent, data=SEQUENCES),
        "an attention model": Training(attention, data=SEQUENCES),
    },
    "Embeddings": {
        f"an embedding of repeated words, {name}": Training(EMBEDDING, optimizer, WORDS, **options)
        for name, optimizer, options in (
            ("`SGD`", MOMENTUM, {}),
            ("`Adam`", ADAM, {}),
            ("`RMSprop`", partial(RMSprop, 0.05), {}),
            ("`Adagrad`", partial(Adagrad, 0.1), {}),
            ("`clipnorm`", CLIPNORM, {}),
            ("`global_clipnorm`", GLOBAL_CLIPNORM, {}),
            ("`gradient_accumulation_steps`", partial(ADAM, gradient_accumulation_steps=2), {}),
            ("`Adam`, `shard_optimizer_state=True`", ADAM, SHARDED),
        )
    }
    | {"sparse inputs of a dense layer, `Adam`": Training(BAG_OF_WORDS, ADAM, WORDS)},
    "Optimizers": {
        "`clipnorm`": Training(optimizer=CLIPNORM),
        "`clipvalue`": Training(optimizer=partial(SGD, 0.5, clipvalue=0.02)),
        "`global_clipnorm`": Training(optimizer=GLOBAL_CLIPNORM),
        "`gradient_accumulation_steps`": Training(optimizer=ACCUMULATING),
        "`gradient_accumulation_steps`, `shard_optimizer_state=True`": Training(
            optimizer=ACCUMULATING, **SHARDED
        ),
        "`use_ema`": Training(optimizer=EMA),
        "`ema_overwrite_frequency`": Training(optimizer=partial(EMA, ema_overwrite_frequency=2)),
        "1 replica: `gradient_accumulation_steps` and `ema_overwrite_frequency`": Training(
            optimizer=partial(ACCUMULATING, use_ema=True, ema_overwrite_frequency=2), counts=(1,)
        ),
        "`AdamW`, weight decay": Training(optimizer=partial(AdamW, 0.05, weight_decay=0.1)),
        "`MultiOptimizer`": Training(optimizer=two_optimizers),
        "`LossScaleOptimizer` and `clipnorm`": Training(
            optimizer=lambda: SCALED(SGD(0.2, clipnorm=0.1), dynamic_growth_steps=2)
        ),
        "`LossScaleOptimizer` and `gradient_accumulation_steps`": Training(
            optimizer=lambda: SCALED(SGD(0.2, clipnorm=0.1, gradient_accumulation_steps=2))
        ),
        "`mixed_float16`, with the `LossScaleOptimizer` that `compile` adds": Training(
            sixteen_bits, partial(SGD, 0.2, global_clipnorm=0.5), tolerance=2e-3
        ),
    },
    "Batch normalization": {
        "`BatchNormalization(synchronized=True)`": Training(partial(dense, SYNCHRONIZED)),
        # In 16 bits, the variance of these inputs is lost in the rounding of their mean.
        "`BatchNormalization(synchronized=True)`, gradients copied in bfloat16 by tfcdo": Training(
            partial(stack, SYNCHRONIZED, OUTPUT),
            data=FAR_FROM_ZERO,
            tolerance=2e-2,
            options={"cross_device_ops": tfcdo.HierarchicalCopyAllReduce(wire_dtype="bfloat16")},
        ),
        "`BatchNormalization()`": Training(
            NORMALIZED, reason="each replica normalizes its own part, as in Keras"
        ),
        "`BatchNormalization()`, `synchronize_batch_norm=True`": Training(
            NORMALIZED, options={"synchronize_batch_norm": True}
        ),
        "`BatchNormalization()`: `evaluate` in the strategy and with the saved model": Training(
            NORMALIZED, saved_only=True
        ),
    },
    "Random numbers": {
        "`Dropout`": Training(DROPPING),
        "`GaussianNoise`": Training(partial(dense, partial(layers.GaussianNoise, 0.2))),
        "`GaussianDropout`": Training(partial(dense, partial(layers.GaussianDropout, 0.3))),
        "`AlphaDropout`": Training(partial(dense, partial(layers.AlphaDropout, 0.3))),
        **{
            f"`{layer.__name__}`": Training(
                partial(convolutional, partial(layer, **options)), data=PICTURES
            )
            for layer, options in (
                (layers.SpatialDropout2D, {"rate": 0.5}),
                (layers.RandomFlip, {}),
                (layers.RandomRotation, {"factor": 0.2}),
                (layers.RandomTranslation, {"height_factor": 0.2, "width_factor": 0.2}),
                (layers.RandomZoom, {"height_factor": 0.2}),
                (layers.RandomContrast, {"factor": 0.5, "value_range": (-3, 3)}),
                (layers.RandomBrightness, {"factor": 0.5, "value_range": (-3, 3)}),
            )
        },
        "dropout in attention": Training(partial(attention, 0.3), data=SEQUENCES),
        "dropout in a recurrent layer": Training(
            partial(recurrent, dropout=0.2, recurrent_dropout=0.2), data=SEQUENCES
        ),
        "`Dropout`, `jit_compile=True`": Training(DROPPING, **XLA),
    },
    "Uneven batches and masks": {
        "metrics over batches that do not divide": Training(evaluate_batch=14),
        "a first batch that does not divide": Training(data=ONLY_23),
        "a last batch of 7 examples, a dense model": Training(data=AFTER_7),
        "a last batch of 1 example, a dense model": Training(data=AFTER_1),
        "a last batch of 7 examples, `Dropout`": Training(DROPPING, data=AFTER_7),
        "a last batch of 1 example, `Dropout`": Training(DROPPING, data=AFTER_1),
        "a last batch of 1 example, `BatchNormalization(synchronized=True)`": Training(
            partial(dense, SYNCHRONIZED), data=AFTER_1
        ),
        "sentences with a mask": Training(MASKED, data=SENTENCES),
        "two outputs with a mask": Training(
            tagger, data=TAGGED, compile={"loss": ["mse", "binary_crossentropy"], "metrics": []}
        ),
    },
    "Losses and weights": {
        "a loss over the whole batch, `global_batch`": Training(compile={"loss": Contrastive()}),
        "a last batch of 7 examples, `global_batch`": Training(
            data=AFTER_7, compile={"loss": Contrastive()}
        ),
        "sample weights": Training(
            fit={"sample_weight": np.linspace(0.2, 2, EXAMPLES, dtype=np.float32)}
        ),
        "class weights": Training(
            partial(stack, partial(layers.Dense, 1, activation="sigmoid")),
            data=LABELED,
            compile={"loss": "binary_crossentropy", "metrics": ["accuracy", "auc"]},
            fit={"class_weight": {0: 0.3, 1: 2.0}},
        ),
        "regularization losses": Training(partial(dense, kernel_regularizer="l2")),
        "`add_loss`": Training(partial(dense, Penalty)),
    },
    "Execution": {
        "`steps_per_execution=2`": Training(compile={"steps_per_execution": 2}),
        "`run_eagerly=True`": Training(compile={"run_eagerly": True}),
        "`jit_compile=True`": Training(**XLA),
    },
}
TRAININGS = {name: one for part in SUBJECTS.values() for name, one in part.items()}


def differences(training: Training, strategy: tf.distribute.Strategy) -> Differences:
    """Trains under a strategy and compares with one device."""
    model, numbers = _train(training, strategy)
    if training.saved_only:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.keras")
            model.save(path)
            other = keras.models.load_model(path)
        numbers, others = (one.evaluate(*training.data, BATCH, verbose=0) for one in (model, other))
    else:
        other, others = _on_one_device(training)
    sizes = np.maximum(1, np.abs(others))
    return (
        largest_difference(model.get_weights(), other.get_weights()),
        largest_difference(numbers / sizes, others / sizes),
    )


@functools.lru_cache(maxsize=1)
def _on_one_device(training: Training) -> tuple[keras.Model, list[float]]:
    return _train(training, tf.distribute.get_strategy())


def _train(training: Training, strategy: tf.distribute.Strategy) -> tuple[keras.Model, list[float]]:
    """Returns the trained model and the numbers that it reported."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = training.build()
        arguments = {"loss": "mse", "metrics": ["mae"], **training.compile}
        model.compile(training.optimizer(), **arguments)
    if training.loop:
        return model, _loop(training, model)
    history = model.fit(
        *training.data, BATCH, epochs=2, shuffle=False, verbose=0, **training.fit
    ).history
    reported = [number for name in sorted(history) for number in history[name]]
    if training.evaluate_batch:
        reported += model.evaluate(*training.data, training.evaluate_batch, verbose=0)
    return model, reported


def _loop(training: Training, model: keras.Model) -> list[float]:
    strategy = model.distribute_strategy
    data = tf.data.Dataset.from_tensor_slices(training.data).batch(BATCH).repeat(2)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(inputs, training=True) - targets) ** 2) / BATCH
        gradients = tape.gradient(loss, [one.value for one in model.trainable_variables])
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def train_step(batch: Any) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    return [float(train_step(batch)) for batch in strategy.experimental_distribute_dataset(data)]
