"""Random programs (model, optimizer, options, replicas, batches) train as on one device.

A difference of float32 alone is rounding that an optimizer has made large: such a program is
repeated in float64. `make test` has 25 programs, always the same, in which each option meets most
of the others. `make test-nightly` draws 300: TFCDO_PROGRAMS=300 python tests/keras/programs_test.py
"""

import functools
import itertools
import os
import types
from typing import Any

import hypothesis
import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from hypothesis import strategies as st
from keras_training import is_own_of_each

import tfcdo

EXAMPLES = int(os.environ.get("TFCDO_PROGRAMS", "25"))
DRAWN_ANEW = "TFCDO_PROGRAMS" in os.environ
_PARTS = 5  # Each worker of pytest may take some.
TOLERANCES = {"float32": 2e-5, "float64": 1e-6}  # Parts of the largest value.

# The values of arguments from which one is drawn.
_ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "SGD": {"momentum": [0.0, 0.9], "nesterov": [False, True], "learning_rate": [0.05]},
    "Adam": {"amsgrad": [False, True]},
    "RMSprop": {"momentum": [0.0, 0.5], "centered": [False, True]},
    "Adagrad": {"learning_rate": [0.05]},
    "Adadelta": {"learning_rate": [0.5]},
    "Ftrl": {"l1_regularization_strength": [0.0, 0.01], "learning_rate": [0.05]},
    "Lion": {"learning_rate": [0.003]},
}
_OPTIMIZERS = [
    name
    for name, item in vars(keras.optimizers).items()
    if isinstance(item, type)
    and issubclass(item, keras.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
]
# The shape of an example of each model. Words repeat in a batch.
_SHAPES = {"dense": [6], "convolutional": [6, 6, 2], "recurrent": [5, 3], "attention": [4, 6]}
_SHAPES |= {"words": [5], "words_recurrent": [5], "sparse": [6]}
Case = types.SimpleNamespace  # A drawn program.


def draw_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    model = one_of("dense", *_SHAPES)
    optimizer = one_of(*_OPTIMIZERS)
    arguments = {"learning_rate": [0.01], **_ARGUMENTS.get(optimizer, {})}
    settings = {name: one_of(*values) for name, values in arguments.items()}
    settings["nesterov"] = settings.get("nesterov") and settings["momentum"] > 0
    if not settings["nesterov"]:
        del settings["nesterov"]
    if chance(0.4):
        settings |= one_of({"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02})
    if chance(0.25):
        settings["weight_decay"] = 0.05
    if chance(0.3):
        overwritten = one_of(None, 2, 3)
        settings |= {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": overwritten}
    if chance(0.3):
        settings["gradient_accumulation_steps"] = one_of(2, 3)
    replicas = one_of(1, 2, 3, 5)
    batch = int(rng.integers(2, 13))
    steps = int(rng.integers(2, 6))
    examples = batch * steps - (int(rng.integers(batch)) if chance(0.7) else 0)
    sparse = model == "sparse"  # Equal to one device in graphs, which XLA cannot compile.
    eager = not sparse and chance(0.15)
    jit = not (eager or sparse) and chance(0.06)
    if jit and not DRAWN_ANEW:  # XLA compiles for each replica: most of the time of all programs.
        replicas = min(replicas, 2)
    last = examples % batch or batch
    recurrent = model in ("recurrent", "words_recurrent")
    return Case(
        seed=seed,
        model=model,
        optimizer=optimizer,
        settings=settings,
        replicas=replicas,
        examples=examples,
        batch=batch,
        last="some replicas empty" if last < replicas else "uneven" if last % replicas else "even",
        loss=one_of("mse", "mse", "huber", "entropy", "dice"),
        reduction=one_of(
            "sum_over_batch_size", "sum_over_batch_size", "sum", "mean_with_sample_weight"
        ),
        outputs=one_of(1, 1, 2),
        masked=recurrent and chance(0.5),
        epochs=one_of(1, 1, 2),
        # A step in which replicas meet is not compiled, and XLA draws other numbers.
        dropout=one_of(0.0, 0.0, 0.3) * (not jit),
        normalization=one_of("", "", "synchronized", "by_strategy", "layer") * (not recurrent),
        regularized=chance(0.3),
        scaled=chance(0.2),
        sharded=chance(0.3),
        eager=eager,
        jit=jit,
        steps_per_execution=1 if eager else one_of(1, 1, 1, 2),
        sample_weights=chance(0.3),
        kind=one_of("gru", "lstm"),
        # Each function takes seconds to trace.
        evaluates=DRAWN_ANEW or chance(0.25),
        predicts=chance(0.3),
    )


@functools.cache
def chosen_cases() -> list[Case]:
    """Chooses cheap programs, of many drawn ones, in which many pairs of values meet."""
    pairs, costs = {}, {}
    # One is left out, whose rounding is so large that it would be repeated in float64.
    for case in map(draw_case, (seed for seed in range(600) if seed != 560)):
        values = {**vars(case), **case.settings}
        for name in ("seed", "settings", "examples", "batch", "learning_rate"):
            del values[name]
        pairs[case.seed] = set(itertools.combinations(sorted(values.items(), key=str), 2))
        # What is traced for each replica. One replica alone runs few lines that are tfcdo's.
        more = "gradient_accumulation_steps" in case.settings, "recurrent" in case.model
        step = (1 + sum(more) / 2 + case.scaled / 3) * case.steps_per_execution
        traces = step + case.evaluates + case.predicts / 3 + case.jit
        # With two outputs, one device's step is traced as well.
        cost = case.replicas * traces + case.outputs + 4 * (case.replicas == 1)
        costs[case.seed] = cost**1.3  # Rather two cheap programs than a dear one.
    seeds: list[int] = []
    while len(seeds) < EXAMPLES:
        seeds.append(max(pairs, key=lambda seed: len(pairs[seed]) / costs[seed]))
        seen = pairs.pop(seeds[-1])
        for others in pairs.values():
            others -= seen
    return list(map(draw_case, seeds))


def _layers(case: Case) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Makes a model's inputs and its last layer's outputs but for the heads."""
    layers = keras.layers
    regularizer = keras.regularizers.L2(0.01) if case.regularized else None
    use_bias = case.normalization not in ("synchronized", "by_strategy")

    def normalized(x: keras.KerasTensor) -> keras.KerasTensor:
        if case.normalization == "layer":
            return layers.LayerNormalization()(x)
        if case.normalization:
            synchronized = case.normalization == "synchronized"
            return layers.BatchNormalization(momentum=0.7, synchronized=synchronized)(x)
        return x

    def dropped(x: keras.KerasTensor) -> keras.KerasTensor:
        return layers.Dropout(case.dropout)(x) if case.dropout else x

    are_words = case.model.startswith("words")
    inputs = x = keras.Input(_SHAPES[case.model], dtype="int32" if are_words else None)
    if case.model == "convolutional":
        options = {"use_bias": use_bias, "kernel_regularizer": regularizer}
        x = normalized(layers.Conv2D(4, 3, activation="tanh", **options)(x))
        return inputs, layers.Flatten()(dropped(layers.AveragePooling2D(2)(x)))
    if case.model == "attention":
        x = layers.MultiHeadAttention(2, 3, dropout=case.dropout, use_bias=False)(x, x)
        return inputs, layers.GlobalAveragePooling1D()(normalized(x))
    if case.model.endswith("recurrent"):
        if are_words:
            x = layers.Embedding(9, 3, mask_zero=case.masked)(x)
        elif case.masked:
            x = layers.Masking()(x)
        cell = layers.GRU if case.kind == "gru" else layers.LSTM
        # An output for each step has a mask, if there is one.
        options = {"kernel_regularizer": regularizer, "return_sequences": True}
        return inputs, cell(4, dropout=case.dropout, **options)(x)
    if case.model == "sparse":
        x = layers.Lambda(tf.sparse.from_dense)(x)
    if are_words:
        x = layers.Flatten()(layers.Embedding(9, 3, embeddings_regularizer=regularizer)(x))
    x = layers.Dense(5, use_bias=use_bias, kernel_regularizer=regularizer)(x)
    return inputs, dropped(layers.Activation("tanh")(normalized(x)))


def _model(case: Case, run_eagerly: bool) -> keras.Model:
    """Makes and compiles a model; called in a strategy's scope."""
    keras.utils.set_random_seed(case.seed)
    inputs, x = _layers(case)
    activation = {"entropy": "softmax", "dice": "sigmoid"}.get(case.loss)
    heads = [
        keras.layers.Dense(3, activation=activation, name=f"head_{i}")(x)
        for i in range(case.outputs)
    ]
    model = keras.Model(inputs, heads if case.outputs > 1 else heads[0])
    loss = {"mse": keras.losses.MeanSquaredError, "huber": keras.losses.Huber}.get(
        case.loss, keras.losses.CategoricalCrossentropy
    )
    losses = [loss(reduction=case.reduction) for _ in range(case.outputs)]
    optimizer = getattr(keras.optimizers, case.optimizer)(**case.settings)
    if case.scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 64.0, dynamic_growth_steps=2)
    model.compile(
        optimizer,
        losses if case.outputs > 1 else losses[0],
        metrics=["mae"] if case.outputs == 1 else None,
        run_eagerly=run_eagerly,
        jit_compile=case.jit and not run_eagerly,
        steps_per_execution=case.steps_per_execution,
    )
    if case.optimizer == "ScheduleFreeAdamW":
        # Built in a graph, Keras's on one device would get its first values again in each step.
        model.optimizer.build(model.trainable_variables)
    return model


def _data(case: Case) -> tuple[np.ndarray, Any, Any]:
    rng = np.random.default_rng(case.seed + 1_000_000)
    shape, floatx = [case.examples, *_SHAPES[case.model]], keras.config.floatx()
    if case.model.startswith("words"):
        inputs = rng.integers(1, 9, shape)
    else:
        inputs = rng.normal(size=shape).astype(floatx)
    if case.model == "sparse":
        inputs = np.maximum(inputs, 0)
    if case.masked:  # Sentences of 1 to 5 words.
        inputs[np.arange(5) >= rng.integers(1, 6, case.examples)[:, None]] = 0
    steps = [5] if case.model.endswith("recurrent") else []
    drawn = rng.normal(size=[case.outputs, case.examples, *steps, 3])
    if case.loss in ("entropy", "dice"):
        drawn = np.exp(drawn) / np.exp(drawn).sum(-1, keepdims=True)
    targets: Any = [one.astype(floatx) for one in drawn]
    weights: Any = [rng.uniform(0.2, 2, [case.examples, *steps]).astype(floatx) for _ in targets]
    if case.outputs == 1:
        [targets], [weights] = targets, weights
    return inputs, targets, weights if case.sample_weights else None


def trained(case: Case, replicas: int) -> dict[str, list[np.ndarray]]:
    """Returns what a case's training on some replicas gives; 0 is one device without a strategy."""
    keras.backend.clear_session()  # So that names are the same again.
    strategy = tf.distribute.get_strategy()
    if replicas:
        strategy = tfcdo.MirroredStrategy(
            tu.device_names(replicas),
            shard_optimizer_state=case.sharded,
            synchronize_batch_norm=case.normalization == "by_strategy",
        )
    # One device is quicker eagerly, but Keras reports losses of several outputs otherwise then.
    with strategy.scope():
        model = _model(case, case.eager or (not replicas and case.outputs == 1))
    inputs, targets, weights = _data(case)
    options: dict[str, Any] = {"batch_size": case.batch, "sample_weight": weights, "verbose": 0}
    history = model.fit(
        inputs,
        targets,
        epochs=case.epochs,
        validation_data=(inputs, targets, weights) if case.evaluates else None,
        validation_batch_size=case.batch,
        shuffle=False,
        **options,
    ).history
    results = {name: [np.array(values)] for name, values in history.items()}
    if case.evaluates:
        results["evaluate"] = [np.array(model.evaluate(inputs, targets, **options))]
    predicted = model.predict(inputs, case.batch, verbose=0) if case.predicts else []
    results |= {f"predict {i}": [one] for i, one in enumerate(tf.nest.flatten(predicted))}
    # Some slots, such as Adafactor's, have one name.
    for number, variable in enumerate([*model.weights, *model.optimizer.variables]):
        if "seed_generator" in variable.path:
            continue
        value = variable if is_own_of_each(variable) else variable.value
        components = getattr(value, "values", (value,))
        results[f"{number} {variable.path}"] = [np.asarray(component) for component in components]
    return results


def compare(case: Case) -> tuple[float, list[str]]:
    """Returns the largest difference from one device, relative, and what differs by too much."""
    expected, actual = trained(case, 0), trained(case, case.replicas)
    found, differences = [], []
    # Slots of the optimizer may have other names.
    for (name, [one]), components in zip(expected.items(), actual.values(), strict=True):
        if any(own.tobytes() != components[0].tobytes() for own in components):
            found.append(f"{name}: replicas differ")
        largest = max(np.abs(one).max(initial=0), 1e-3)
        difference = np.abs(components[0].astype(np.float64) - one).max(initial=0) / largest
        differences.append(float(difference))
        if not difference <= TOLERANCES[keras.config.floatx()]:
            found.append(f"{name}: {difference:.2g}")
    return max(differences), found


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*range(_PARTS))
    def test_as_on_one_device(self, part):
        differences = []

        @hypothesis.settings(
            max_examples=-(-EXAMPLES // _PARTS),
            deadline=None,
            database=None,
            # A smaller seed is no simpler program.
            phases=[hypothesis.Phase.generate if DRAWN_ANEW else hypothesis.Phase.explicit],
        )
        @hypothesis.given(st.integers(part * 2**29, (part + 1) * 2**29 - 1))
        def train(seed: int) -> None:
            case, floatx = draw_case(seed), keras.config.floatx()
            largest, found = compare(case)
            if found and not any("replicas differ" in one for one in found):
                keras.config.set_floatx("float64")
                try:
                    largest, found = compare(case)
                finally:
                    keras.config.set_floatx(floatx)
            self.assertEmpty(found, str(case))
            differences.append(largest)

        for case in () if DRAWN_ANEW else chosen_cases()[part::_PARTS]:
            train = hypothesis.example(case.seed)(train)
        train()
        print(
            f"The largest of {len(differences)} programs' differences from one device: "
            f"{max(differences):.1e}"
        )


if __name__ == "__main__":
    tf.test.main()
