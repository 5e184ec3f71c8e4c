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

    name: str
    build: Callable[[], keras.Model]
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
    return stack(
        layers.Embedding(9, 3), layers.Flatten(), layers.Dense(2), shape=(4,), dtype="int32"
    )


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


def embedded(name: str, optimizer: Callable[[], Any], **others: Any) -> Training:
    """Trains an embedding with words that are several times in each batch."""
    return Training(
        f"an embedding of repeated words, {name}", embedding, optimizer, words, **others
    )


def random_layer(
    make: Callable[[], keras.Layer], build: Callable[..., keras.Model] = dense, **others: Any
) -> Training:
    """Trains a model with a layer that draws random numbers."""
    return Training(f"`{type(make()).__name__}`", lambda: build(make()), **others)


def uneven(what: str, examples: int, build: Callable[[], keras.Model], **others: Any) -> Training:
    """Trains on batches of which the last does not divide."""
    name = f"a last batch of {examples} example{'s' * (examples > 1)}, {what}"
    return Training(name, build, data=lambda: numbers(BATCH + examples), **others)


XLA: dict[str, Any] = {
    "compile": {"jit_compile": True},
    "reason": "TensorFlow compiles no step with XLA for several CPU devices",
}
MODELS = (
    Training("a dense model", dense),
    Training("an own loop", dense, lambda: optimizers.Adam(0.05, clipnorm=0.1), loop=True),
    Training("a convolutional model", convolutional, data=pictures),
    Training("a recurrent model", recurrent, data=sequences),
    Training("an attention model", attention, data=sequences),
)
EMBEDDINGS = (
    embedded("`SGD`", lambda: optimizers.SGD(0.1, momentum=0.5)),
    embedded("`Adam`", lambda: optimizers.Adam(0.05)),
    embedded("`RMSprop`", lambda: optimizers.RMSprop(0.05)),
    embedded("`Adagrad`", lambda: optimizers.Adagrad(0.1)),
    embedded("`clipnorm`", lambda: optimizers.SGD(0.5, clipnorm=0.05)),
    embedded("`global_clipnorm`", lambda: optimizers.SGD(0.5, global_clipnorm=0.05)),
    embedded(
        "`gradient_accumulation_steps`",
        lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2),
    ),
    embedded(
        "`Adam`, `shard_optimizer_state=True`",
        lambda: optimizers.Adam(0.05),
        options={"shard_optimizer_state": True},
    ),
)
OPTIMIZERS = (
    Training("`clipnorm`", dense, lambda: optimizers.SGD(0.5, clipnorm=0.05)),
    Training("`clipvalue`", dense, lambda: optimizers.SGD(0.5, clipvalue=0.02)),
    Training("`global_clipnorm`", dense, lambda: optimizers.SGD(0.5, global_clipnorm=0.05)),
    Training(
        "`gradient_accumulation_steps`",
        dense,
        lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1),
    ),
    Training(
        "`gradient_accumulation_steps`, `shard_optimizer_state=True`",
        dense,
        lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1),
        options={"shard_optimizer_state": True},
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
    Training("`AdamW`, weight decay", dense, lambda: optimizers.AdamW(0.05, weight_decay=0.1)),
    Training("`MultiOptimizer`", dense, two_optimizers),
    Training(
        "`LossScaleOptimizer` and `clipnorm`",
        dense,
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.2, clipnorm=0.1), 16.0, dynamic_growth_steps=2
        ),
    ),
    Training(
        "`LossScaleOptimizer` and `gradient_accumulation_steps`",
        dense,
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.2, clipnorm=0.1, gradient_accumulation_steps=2), 16.0
        ),
    ),
    Training(
        "`mixed_float16`, with the `LossScaleOptimizer` that `compile` adds",
        sixteen_bits,
        lambda: optimizers.SGD(0.2, global_clipnorm=0.5),
        tolerance=2e-3,
    ),
)
NORMALIZATION = (
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
        reason="each replica normalizes its own part, as in Keras",
    ),
    Training(
        "`BatchNormalization()`, `synchronize_batch_norm=True`",
        normalized,
        options={"synchronize_batch_norm": True},
    ),
    Training(
        "`BatchNormalization()`: `evaluate` in the strategy and with the saved model",
        normalized,
        evaluate_batch=BATCH,
        saved_only=True,
    ),
)
RANDOM_NUMBERS = (
    random_layer(lambda: layers.Dropout(0.5)),
    random_layer(lambda: layers.GaussianNoise(0.2)),
    random_layer(lambda: layers.GaussianDropout(0.3)),
    random_layer(lambda: layers.AlphaDropout(0.3)),
    random_layer(lambda: layers.SpatialDropout2D(0.5), convolutional, data=pictures),
    random_layer(lambda: layers.RandomFlip(), convolutional, data=pictures),
    random_layer(lambda: layers.RandomRotation(0.2), convolutional, data=pictures),
    random_layer(lambda: layers.RandomTranslation(0.2, 0.2), convolutional, data=pictures),
    random_layer(lambda: layers.RandomZoom(0.2), convolutional, data=pictures),
    random_layer(
        lambda: layers.RandomContrast(0.5, value_range=(-3, 3)), convolutional, data=pictures
    ),
    random_layer(
        lambda: layers.RandomBrightness(0.5, value_range=(-3, 3)), convolutional, data=pictures
    ),
    Training("dropout in attention", lambda: attention(0.3), data=sequences),
    Training(
        "dropout in a recurrent layer",
        lambda: recurrent(dropout=0.2, recurrent_dropout=0.2),
        data=sequences,
    ),
    Training("`Dropout`, `jit_compile=True`", lambda: dense(layers.Dropout(0.5)), **XLA),
)
UNEVEN_BATCHES = (
    Training("metrics over batches that do not divide", dense, evaluate_batch=14),
    Training("a first batch that does not divide", dense, data=lambda: numbers(BATCH - 7)),
    uneven("a dense model", 7, dense),
    uneven("a dense model", 1, dense),
    uneven("`Dropout`", 7, lambda: dense(layers.Dropout(0.5))),
    uneven("`Dropout`", 1, lambda: dense(layers.Dropout(0.5))),
    uneven("`BatchNormalization(synchronized=True)`", 1, lambda: normalized(synchronized=True)),
    Training("sentences with a mask", masked, data=sentences),
    Training(
        "two outputs with a mask",
        tagger,
        data=tagged_sentences,
        compile={"loss": ["mse", "binary_crossentropy"]},
        metrics=(),
    ),
)
LOSSES = (
    Training("a loss over the whole batch, `global_batch`", dense, compile={"loss": Contrastive()}),
    uneven("`global_batch`", 7, dense, compile={"loss": Contrastive()}),
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
)
EXECUTION = (
    Training("`steps_per_execution=2`", dense, compile={"steps_per_execution": 2}),
    Training("`run_eagerly=True`", dense, compile={"run_eagerly": True}),
    Training("`jit_compile=True`", dense, **XLA),
)
SUBJECTS = {
    "Models": MODELS,
    "Embeddings": EMBEDDINGS,
    "Optimizers": OPTIMIZERS,
    "Batch normalization": NORMALIZATION,
    "Random numbers": RANDOM_NUMBERS,
    "Uneven batches and masks": UNEVEN_BATCHES,
    "Losses and weights": LOSSES,
    "Execution": EXECUTION,
}
TRAININGS = tuple(training for part in SUBJECTS.values() for training in part)


def differences(training: Training, library: str, count: int) -> Differences | str:
    """Trains on several replicas and compares with one device."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, seen = train(training, _strategy(training, library, count))
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
    inputs, targets, *weights = training.data()
    history = model.fit(
        inputs,
        targets,
        BATCH,
        epochs=2,
        sample_weight=weights[0] if weights else None,
        shuffle=False,
        verbose=0,
        **training.fit,
    ).history
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


def _strategy(training: Training, library: str, count: int) -> tf.distribute.Strategy:
    devices = [f"CPU:{index}" for index in range(count)]
    if library == "tfcdo":
        ops = tfcdo.HierarchicalCopyAllReduce(wire_dtype=training.wire_dtype)
        return tfcdo.MirroredStrategy(devices, ops, **training.options)
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


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
