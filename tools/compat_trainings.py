"""Runs the trainings of docs/compat.md: features of Keras, on K replicas and on one device.

Everything is small: a few steps of a few examples are enough to tell a wrong sum from a right one.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers
from pages import Row, first_words

import tfcdo.keras

EXAMPLES = 60
BATCH = 30  # Divides by 2, 3 and 5 replicas.
Data = tuple[Any, ...]
# Weights and reported numbers of a training; or how much two trainings differ in each.
Seen = tuple[list[np.ndarray], list[float]]
Differences = tuple[float, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """A training that is compared with the same one on one device."""

    build: Callable[[], keras.Model] = lambda: dense()
    optimizer: Callable[[], Any] = lambda: optimizers.SGD(0.1, momentum=0.5)
    # Inputs, targets and, if any, the weights of the examples.
    data: Callable[[], Data] = lambda: numbers()
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)  # More arguments.
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: tuple[str, ...] = ("mae",)
    # Largest difference of weights and reported numbers, relative to 1 or their size.
    tolerance: float = 2e-5
    evaluate_batch: int | None = None  # The size of the batches of `evaluate`, if it is called.
    # Whether `evaluate` in the strategy is compared with that of the saved model instead.
    saved_only: bool = False
    reason: str = ""  # Why it cannot be as on one device.
    loop: bool = False  # An own loop instead of `fit`.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # Of tfcdo's strategy.
    counts: tuple[int, ...] = (2, 3, 5)  # Of replicas.
    wire_dtype: str | None = None  # Of gradients that are sent, for tfcdo alone.
    name: str = ""


def numbers(examples: int = EXAMPLES) -> Data:
    inputs = np.random.default_rng(0).normal(0.5, 1, [examples, 6]).astype(np.float32)
    return inputs, np.sin(inputs[:, :2]) + inputs[:, 2:4]


def far_from_zero() -> Data:
    inputs, targets = numbers()
    return 10 + 0.1 * inputs, targets


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=[EXAMPLES, *shape]).astype(np.float32)


def pictures() -> Data:
    return drawn(6, 6, 2), drawn(6, 6, 2).mean((1, 2))


def sequences() -> Data:
    return drawn(4, 3), drawn(4, 3).mean(1)[:, :2]


def words() -> Data:
    inputs = np.random.default_rng(0).integers(0, 9, [EXAMPLES, 4])
    return inputs, inputs[:, :2] / np.float32(4)


def weighted_numbers() -> Data:
    return *numbers(), np.linspace(0.2, 2, EXAMPLES, dtype=np.float32)


def labels() -> Data:
    inputs, targets = numbers()
    return inputs, (targets[:, :1] > targets[:, 1:]).astype(np.float32)


def sentences() -> Data:
    words, lengths = np.random.default_rng(0).integers(1, 9, [EXAMPLES, 6]), np.arange(EXAMPLES) % 7
    words[np.arange(6) >= np.sort(lengths)[:, None]] = 0
    return words, words[:, :, None] / np.float32(4)


def tagged_sentences() -> Data:
    words, targets = sentences()
    return words, (targets, words[:, :, None] % 2)


def stack(*parts: Any, shape: tuple[int, ...] = (6,), dtype: str = "float32") -> keras.Model:
    return keras.Sequential([layers.Input(shape, dtype=dtype), *parts])


def dense(*between: Any, **options: Any) -> keras.Model:
    return stack(layers.Dense(4, activation="tanh", **options), *between, layers.Dense(2))


def convolutional(*before: Any) -> keras.Model:
    return stack(
        *before,
        layers.Conv2D(3, 3, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(2),
        shape=(6, 6, 2),
    )


def recurrent(**options: Any) -> keras.Model:
    return stack(layers.LSTM(3, **options), layers.Dense(2), shape=(4, 3))


def attention(dropout: float = 0.0) -> keras.Model:
    inputs = keras.Input((4, 3))
    attended = layers.MultiHeadAttention(2, 2, dropout=dropout)(inputs, inputs)
    summed = layers.LayerNormalization()(inputs + attended)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(summed)))


def embedding() -> keras.Model:
    parts = layers.Embedding(9, 3), layers.Flatten(), layers.Dense(2)
    return stack(*parts, shape=(4,), dtype="int32")


def masked() -> keras.Model:
    embedding = layers.Embedding(9, 3, mask_zero=True)
    return stack(embedding, layers.Dense(1), shape=(6,), dtype="int32")


def tagger() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    tags = layers.Dense(1, activation="sigmoid")(embedded)
    return keras.Model(inputs, [layers.Dense(1)(embedded), tags])


def normalized(**options: Any) -> keras.Model:
    return dense(layers.BatchNormalization(momentum=0.5, **options))


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


def sixteen_bits() -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    keras.config.set_dtype_policy(before)
    return model


def two_optimizers() -> Any:
    chosen = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*bias": optimizers.Adam(0.05)})
    return optimizers.MultiOptimizer(chosen)


def augmented(make: Callable[[], keras.Layer]) -> Training:
    return Training(lambda: convolutional(make()), data=pictures)


SGD, Adam = (functools.partial(functools.partial, one) for one in (optimizers.SGD, optimizers.Adam))
ACCUMULATING = Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1)
SHARDED = {"shard_optimizer_state": True}
AFTER_7, AFTER_1 = (functools.partial(numbers, BATCH + extra) for extra in (7, 1))
XLA: dict[str, Any] = {
    "compile": {"jit_compile": True},
    "reason": "TensorFlow compiles no step with XLA for several CPU devices",
}
REPEATED = "an embedding of repeated words"
_TRAININGS: dict[str, dict[str, Training]] = {
    "Models": {
        "a dense model": Training(),
        "an own loop": Training(optimizer=Adam(0.05, clipnorm=0.1), loop=True),
        "a convolutional model": Training(convolutional, data=pictures),
        "a recurrent model": Training(recurrent, data=sequences),
        "an attention model": Training(attention, data=sequences),
    },
    "Embeddings": {
        f"{REPEATED}, {name}": Training(embedding, optimizer, words, options=options)
        for name, optimizer, options in (
            ("`SGD`", SGD(0.1, momentum=0.5), {}),
            ("`Adam`", Adam(0.05), {}),
            ("`RMSprop`", lambda: optimizers.RMSprop(0.05), {}),
            ("`Adagrad`", lambda: optimizers.Adagrad(0.1), {}),
            ("`clipnorm`", SGD(0.5, clipnorm=0.05), {}),
            ("`global_clipnorm`", SGD(0.5, global_clipnorm=0.05), {}),
            ("`gradient_accumulation_steps`", Adam(0.05, gradient_accumulation_steps=2), {}),
            ("`Adam`, `shard_optimizer_state=True`", Adam(0.05), SHARDED),
        )
    },
    "Optimizers": {
        "`clipnorm`": Training(optimizer=SGD(0.5, clipnorm=0.05)),
        "`clipvalue`": Training(optimizer=SGD(0.5, clipvalue=0.02)),
        "`global_clipnorm`": Training(optimizer=SGD(0.5, global_clipnorm=0.05)),
        "`gradient_accumulation_steps`": Training(optimizer=ACCUMULATING),
        "`gradient_accumulation_steps`, `shard_optimizer_state=True`": Training(
            optimizer=ACCUMULATING, options=SHARDED
        ),
        "`use_ema`": Training(optimizer=SGD(0.2, use_ema=True, ema_momentum=0.6)),
        "`ema_overwrite_frequency`": Training(
            optimizer=SGD(0.2, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2)
        ),
        "1 replica: `gradient_accumulation_steps` and `ema_overwrite_frequency`": Training(
            optimizer=lambda: ACCUMULATING(use_ema=True, ema_overwrite_frequency=2), counts=(1,)
        ),
        "`AdamW`, weight decay": Training(
            optimizer=lambda: optimizers.AdamW(0.05, weight_decay=0.1)
        ),
        "`MultiOptimizer`": Training(optimizer=two_optimizers),
        "`LossScaleOptimizer` and `clipnorm`": Training(
            optimizer=lambda: optimizers.LossScaleOptimizer(
                optimizers.SGD(0.2, clipnorm=0.1), 16.0, dynamic_growth_steps=2
            )
        ),
        "`LossScaleOptimizer` and `gradient_accumulation_steps`": Training(
            optimizer=lambda: optimizers.LossScaleOptimizer(
                optimizers.SGD(0.2, clipnorm=0.1, gradient_accumulation_steps=2), 16.0
            )
        ),
        "`mixed_float16`, with the `LossScaleOptimizer` that `compile` adds": Training(
            sixteen_bits, SGD(0.2, global_clipnorm=0.5), tolerance=2e-3
        ),
    },
    "Batch normalization": {
        "`BatchNormalization(synchronized=True)`": Training(lambda: normalized(synchronized=True)),
        # In 16 bits, the variance of these inputs is lost in the rounding of their mean.
        "`BatchNormalization(synchronized=True)`, gradients copied in bfloat16 by tfcdo": Training(
            lambda: stack(
                layers.BatchNormalization(momentum=0.5, synchronized=True), layers.Dense(2)
            ),
            data=far_from_zero,
            tolerance=2e-2,
            wire_dtype="bfloat16",
        ),
        "`BatchNormalization()`": Training(
            normalized, reason="each replica normalizes its own part, as in Keras"
        ),
        "`BatchNormalization()`, `synchronize_batch_norm=True`": Training(
            normalized, options={"synchronize_batch_norm": True}
        ),
        "`BatchNormalization()`: `evaluate` in the strategy and with the saved model": Training(
            normalized, evaluate_batch=BATCH, saved_only=True
        ),
    },
    "Random numbers": {
        "`Dropout`": Training(lambda: dense(layers.Dropout(0.5))),
        "`GaussianNoise`": Training(lambda: dense(layers.GaussianNoise(0.2))),
        "`GaussianDropout`": Training(lambda: dense(layers.GaussianDropout(0.3))),
        "`AlphaDropout`": Training(lambda: dense(layers.AlphaDropout(0.3))),
        "`SpatialDropout2D`": augmented(lambda: layers.SpatialDropout2D(0.5)),
        "`RandomFlip`": augmented(lambda: layers.RandomFlip()),
        "`RandomRotation`": augmented(lambda: layers.RandomRotation(0.2)),
        "`RandomTranslation`": augmented(lambda: layers.RandomTranslation(0.2, 0.2)),
        "`RandomZoom`": augmented(lambda: layers.RandomZoom(0.2)),
        "`RandomContrast`": augmented(lambda: layers.RandomContrast(0.5, value_range=(-3, 3))),
        "`RandomBrightness`": augmented(lambda: layers.RandomBrightness(0.5, value_range=(-3, 3))),
        "dropout in attention": Training(lambda: attention(0.3), data=sequences),
        "dropout in a recurrent layer": Training(
            lambda: recurrent(dropout=0.2, recurrent_dropout=0.2), data=sequences
        ),
        "`Dropout`, `jit_compile=True`": Training(lambda: dense(layers.Dropout(0.5)), **XLA),
    },
    "Uneven batches and masks": {
        "metrics over batches that do not divide": Training(evaluate_batch=14),
        "a first batch that does not divide": Training(data=lambda: numbers(BATCH - 7)),
        "a last batch of 7 examples, a dense model": Training(data=AFTER_7),
        "a last batch of 1 example, a dense model": Training(data=AFTER_1),
        "a last batch of 7 examples, `Dropout`": Training(
            lambda: dense(layers.Dropout(0.5)), data=AFTER_7
        ),
        "a last batch of 1 example, `Dropout`": Training(
            lambda: dense(layers.Dropout(0.5)), data=AFTER_1
        ),
        "a last batch of 1 example, `BatchNormalization(synchronized=True)`": Training(
            lambda: normalized(synchronized=True), data=AFTER_1
        ),
        "sentences with a mask": Training(masked, data=sentences),
        "two outputs with a mask": Training(
            tagger,
            data=tagged_sentences,
            compile={"loss": ["mse", "binary_crossentropy"]},
            metrics=(),
        ),
    },
    "Losses and weights": {
        "a loss over the whole batch, `global_batch`": Training(compile={"loss": Contrastive()}),
        "a last batch of 7 examples, `global_batch`": Training(
            data=AFTER_7, compile={"loss": Contrastive()}
        ),
        "sample weights": Training(data=weighted_numbers),
        "class weights": Training(
            lambda: stack(layers.Dense(1, activation="sigmoid")),
            data=labels,
            compile={"loss": "binary_crossentropy"},
            fit={"class_weight": {0: 0.3, 1: 2.0}},
            metrics=("accuracy", "auc"),
        ),
        "regularization losses": Training(lambda: dense(kernel_regularizer="l2")),
        "`add_loss`": Training(lambda: dense(Penalty())),
    },
    "Execution": {
        "`steps_per_execution=2`": Training(compile={"steps_per_execution": 2}),
        "`run_eagerly=True`": Training(compile={"run_eagerly": True}),
        "`jit_compile=True`": Training(**XLA),
    },
}
SUBJECTS = {
    subject: [dataclasses.replace(one, name=name) for name, one in trainings.items()]
    for subject, trainings in _TRAININGS.items()
}
TRAININGS = tuple(training for part in SUBJECTS.values() for training in part)


def differences(training: Training, library: str, count: int) -> Differences | str:
    """Trains on several replicas and compares with one device."""
    strategy: Any = tf.distribute.MirroredStrategy
    ops: Any = tf.distribute.ReductionToOneDevice()
    if library == "tfcdo":
        ops = tfcdo.HierarchicalCopyAllReduce(wire_dtype=training.wire_dtype)
        strategy = functools.partial(tfcdo.MirroredStrategy, **training.options)
    try:
        with tempfile.TemporaryDirectory() as folder:
            devices = [f"CPU:{index}" for index in range(count)]
            model, seen = train(training, strategy(devices, ops))
            if training.saved_only:
                path = pathlib.Path(folder) / "model.keras"
                model.save(path)
                loaded = keras.models.load_model(path)
                inside, outside = (_evaluate(training, one) for one in (model, loaded))
                return _largest((seen[0], inside), (loaded.get_weights(), outside))
            return _largest(seen, _on_one_device(training))
    except Exception as error:
        return f"{type(error).__name__}: {first_words(str(error))}"


@functools.lru_cache(maxsize=1)
def _on_one_device(training: Training) -> Seen:
    return train(training, tf.distribute.get_strategy())[1]


def train(training: Training, strategy: tf.distribute.Strategy) -> tuple[keras.Model, Seen]:
    """Trains, and returns the model with its weights and the numbers that it reported."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = training.build()
        arguments = {"loss": "mse", "metrics": list(training.metrics), **training.compile}
        model.compile(training.optimizer(), **arguments)
    reported = _loop(training, model) if training.loop else _fit(training, model)
    if training.evaluate_batch:
        reported += _evaluate(training, model)
    return model, (model.get_weights(), reported)


def _fit(training: Training, model: keras.Model) -> list[float]:
    *data, weights = (*training.data(), None)[:3]
    options = {"sample_weight": weights, "shuffle": False, "verbose": 0, **training.fit}
    history = model.fit(*data, BATCH, epochs=2, **options).history
    return [number for name in sorted(history) for number in history[name]]


def _loop(training: Training, model: keras.Model) -> list[float]:
    strategy = model.distribute_strategy
    data = tf.data.Dataset.from_tensor_slices(training.data()).batch(BATCH)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(inputs, training=True) - targets) ** 2) / BATCH
        gradients = tape.gradient(loss, [one.value for one in model.trainable_variables])
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def train_step(batch: Any) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    return [
        float(train_step(batch))
        for _ in range(2)
        for batch in strategy.experimental_distribute_dataset(data)
    ]


def _evaluate(training: Training, model: keras.Model) -> list[float]:
    inputs, targets, *_ = training.data()
    return model.evaluate(inputs, targets, training.evaluate_batch, verbose=0)


def _largest(one: Seen, other: Seen) -> Differences:
    weights = max(float(np.abs(a - b).max()) for a, b in zip(one[0], other[0], strict=True))
    reported = max(abs(a - b) / max(1, abs(b)) for a, b in zip(one[1], other[1], strict=True))
    return weights, reported


def row(training: Training, library: str) -> Row:
    """Runs a training with one library on all numbers of replicas."""
    return judge(
        training, {count: differences(training, library, count) for count in training.counts}
    )


def judge(training: Training, differences: Mapping[int, Differences | str]) -> Row:
    """Makes a row of the differences, or errors, by the number of replicas."""
    errors = {count: text for count, text in differences.items() if isinstance(text, str)}
    if errors:
        counts = " and ".join(map(str, errors))
        where = "" if len(errors) == len(differences) else f" ({counts} replicas)"
        text, mark = f"{next(iter(errors.values()))}{where}", "✗"
    else:
        pairs = [pair for pair in differences.values() if not isinstance(pair, str)]
        weights, reported = map(max, zip(*pairs, strict=True))
        equal = weights <= training.tolerance and reported <= training.tolerance
        text, mark = f"{_short(weights)}, {_short(reported)}", "✓" if equal else "✗"
    if mark == "✗" and training.reason:
        text, mark = f"{text}: {training.reason}", "~"
    return Row(training.name, mark, text)


def _short(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"
