"""Keras's optimizers, and settings of them that Keras alone gets wrong on several replicas."""

from __future__ import annotations

from keras import optimizers as ko
from keras_training import Make

# What Keras does wrongly on several replicas, or not at all.
MENDED: dict[str, Make] = {
    "clipnorm": lambda: ko.SGD(0.3, clipnorm=0.05),
    "clipvalue": lambda: ko.SGD(0.3, clipvalue=0.02, loss_scale_factor=8.0),
    "global_clipnorm": lambda: ko.SGD(0.3, momentum=0.5, global_clipnorm=0.05),
    "accumulation": lambda: ko.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.05),
    "schedule": lambda: ko.SGD(
        ko.schedules.ExponentialDecay(0.5, 1, 0.7), gradient_accumulation_steps=3
    ),
    "ema_accumulation": lambda: ko.SGD(
        0.2,
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
    ),
    "loss_scale": lambda: ko.LossScaleOptimizer(
        ko.SGD(0.2, clipnorm=0.05, gradient_accumulation_steps=2), 16.0, dynamic_growth_steps=2
    ),
    "several": lambda: ko.MultiOptimizer(
        ko.OptimizerMap(
            ko.SGD(0.2, clipnorm=0.05), {".*bias": ko.Adam(0.1, gradient_accumulation_steps=2)}
        )
    ),
}
OPTIMIZERS = [
    name
    for name, item in vars(ko).items()
    if isinstance(item, type)
    and issubclass(item, ko.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
]
