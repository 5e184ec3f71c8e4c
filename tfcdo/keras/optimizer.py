"""`DistributedOptimizer`: any Keras optimizer, with the sum over replicas before all else."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcdo import empty_batches
from tfcdo.keras import sharding, updates

# Keras's base class has these in every optimizer; here they are the ones of the optimizer inside.
_FORWARDED = (
    *("clipnorm", "clipvalue", "global_clipnorm"),
    *("ema_momentum", "ema_overwrite_frequency", "use_ema"),
    *("gradient_accumulation_steps", "loss_scale_factor", "weight_decay"),
    *("iterations", "learning_rate", "optimizers"),
    *("exclude_from_weight_decay", "finalize_variable_values", "scale_loss"),
    *("save_own_variables", "set_weights"),
)


@keras.saving.register_keras_serializable(package="tfcdo")
class DistributedOptimizer(keras.optimizers.Optimizer):
    """Sums gradients over replicas first; then an optimizer clips, accumulates and updates.

    Keras alone clips (`clipnorm`, `clipvalue`, `global_clipnorm`) on each replica before the sum,
    unlike on one device. It cannot accumulate (`gradient_accumulation_steps`) or overwrite weights
    with their average (`ema_overwrite_frequency`) on several replicas. In this wrapper the same
    optimizer works as on one device. The strategy's cross-device ops form the sum once an update:
    while gradients accumulate, each replica adds to its own and nothing is sent.

    A gradient that all replicas share, one tensor, counts once for each replica. None on some
    replicas counts as zeros. Variables that Keras overwrites with their gradients, the scales of
    float8, get the largest of all replicas.

    Without a strategy it acts as the wrapped optimizer. It must be the outermost one: pass a
    `LossScaleOptimizer` to it, not it to a `LossScaleOptimizer`, which would look for overflows on
    the first replica only. With a policy such as `mixed_float16`, which makes `Model.compile` put a
    `LossScaleOptimizer` around every other optimizer, write
    `compile(DistributedOptimizer(LossScaleOptimizer(optimizer)), auto_scale_loss=False)`.

    Args:
      optimizer: the Keras optimizer to wrap, created in the strategy's scope.
      gradient_accumulation_steps: over how many steps gradients are accumulated before each
        update; None: `optimizer`'s own setting.
      name: the optimizer's name; None for one made from its class.
      shard_optimizer_state: whether the state of each variable, such as Adam's two moments, is only
        on one device of a host. This device, its owner, gets the sum of the gradients, updates the
        variable and sends it to the other devices: as many bytes as an all-reduce. Whole variables
        are dealt to devices by their bytes. See the page on optimizer state.

    Raises:
      TypeError: if `optimizer` is not a Keras optimizer, a number not an int or
        `shard_optimizer_state` not a bool; with it, if the strategy does not sum with one of
        tfcdo's all-reduce classes.
      ValueError: if `gradient_accumulation_steps` is less than 2 or differs from `optimizer`'s;
        with `shard_optimizer_state`, if `optimizer` is built or was made outside of the scope.

    References:
      Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018,
      whose class this one is named after.

    Example:
      >>> import keras
      >>> import tensorflow as tf
      >>> with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
      ...     model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
      ...     optimizer = DistributedOptimizer(keras.optimizers.Adam(global_clipnorm=1.0))
      ...     model.compile(optimizer, "mse")
      >>> optimizer.global_clipnorm
      1.0
    """

    built: bool
    meets_outside_xla = True  # For `keras_steps`.

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        shard_optimizer_state: bool = False,
    ) -> None:
        _check_optimizer(optimizer)
        _check_sharding(optimizer, shard_optimizer_state)
        _set_accumulation_steps(optimizer, gradient_accumulation_steps)
        super().__init__(learning_rate=lambda: optimizer.learning_rate, name=name)
        self.inner_optimizer = optimizer
        self._iterations = optimizer._iterations
        self.shard_optimizer_state = shard_optimizer_state
        self._shards: sharding.Shards | None = None
        # While one thread applies gradients, methods of the optimizer inside are replaced.
        self._applying = threading.RLock()

    def __setattr__(self, name: str, value: Any) -> None:
        # A wrapper takes the loss scale away from its optimizer, which shows that it is wrapped.
        if name == "loss_scale_factor" and not _constructing(self):
            raise ValueError(
                "DistributedOptimizer must be the outermost optimizer; got one that is put in "
                "another, or whose loss_scale_factor is set: put the LossScaleOptimizer or "
                "MultiOptimizer in it, and compile with auto_scale_loss=False, or set the factor "
                "of its inner_optimizer"
            )
        super().__setattr__(name, value)

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the variables of the optimizer inside, for the trainable variables."""
        if self.built:
            return
        if not self.inner_optimizer.built:
            strategy = self._distribution_strategy
            # TensorFlow's default strategy, with one replica, has no list of devices.
            several = strategy.num_replicas_in_sync > 1
            if self.shard_optimizer_state and several and len(strategy.extended.worker_devices) > 1:
                self._shards = sharding.deal(strategy, variables)
            with updates.accumulated_on_each_replica(self.inner_optimizer, self._shards):
                self.inner_optimizer.build(variables)
        self.built = True

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Sums gradients over replicas and updates the variables; call it on each replica."""
        strategy = tf.distribute.get_strategy()
        if not tf.distribute.has_strategy():
            self.inner_optimizer.apply(grads, trainable_variables)
            self.built = True
            return
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "DistributedOptimizer.apply must be called on each replica, in strategy.run; "
                "got a call from where the replicas meet"
            )
        if self._distribution_strategy is not strategy:
            raise ValueError(
                "DistributedOptimizer must be made in the scope of the strategy that runs it, "
                f"{strategy}; it was made in the scope of {self._distribution_strategy}"
            )
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        tf.distribute.get_replica_context().merge_call(
            self._apply_across_replicas,
            args=(empty_batches.without_nan(list(grads)), trainable_variables),
        )

    def _apply_across_replicas(
        self, strategy: tf.distribute.Strategy, grads: list[Any], variables: list[Any] | None
    ) -> None:
        with self._applying:
            if not self.built and variables is not None:
                self.build(variables)
            known = self.inner_optimizer._trainable_variables if variables is None else variables
            grads = updates.of_one_kind(strategy, grads, known)
            with updates.summed_first(self.inner_optimizer, self._shards):
                strategy.run(self.inner_optimizer.apply, args=(grads, variables))

    @property
    def variables(self) -> list[keras.Variable]:
        """Returns the variables of the optimizer inside: there are no others."""
        return list(self.inner_optimizer.variables)

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of the optimizer's variables on each device of this host."""
        held: dict[str, int] = {}
        for variable in self.variables if self.built else ():
            for component in getattr(variable.value, "values", (variable.value,)):
                num_bytes = component.shape.num_elements() * component.dtype.size
                held[component.device] = held.get(component.device, 0) + num_bytes
        return dict(sorted(held.items()))

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables of the optimizer inside; a ValueError if they are of another one."""
        saved, here = len(store.keys()), len(self.inner_optimizer.variables)
        if saved and self.inner_optimizer.built and saved != here:
            raise ValueError(
                f"the state that is loaded must be one of {type(self.inner_optimizer).__name__}, "
                f"with {here} variables; got {saved} variables, as of another optimizer: compile "
                "with the optimizer that was saved, or load the weights before you compile"
            )
        self.inner_optimizer.load_own_variables(store)

    def __dir__(self) -> list[str]:
        # Keras saves all optimizers that it finds here, and would save the one inside twice.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def get_config(self) -> dict[str, Any]:
        """Returns the config from which `from_config` makes the same optimizer."""
        return {
            "name": self.name,
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "shard_optimizer_state": self.shard_optimizer_state,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> DistributedOptimizer:
        """Makes an optimizer, without variables, from a config of `get_config`."""
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects)
        sharded = config.get("shard_optimizer_state", False)
        return cls(optimizer, name=config.get("name"), shard_optimizer_state=sharded)


def _forwarded(name: str) -> property:
    """Makes a property that is an attribute or a method of the optimizer inside."""

    def get(self: DistributedOptimizer) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_(self: DistributedOptimizer, value: Any) -> None:
        if not _constructing(self):
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"The `{name}` of the optimizer inside.")


for _name in _FORWARDED:
    setattr(DistributedOptimizer, _name, _forwarded(_name))


def _constructing(optimizer: DistributedOptimizer) -> bool:
    """Tells whether the base class's constructor still runs, which sets attributes to defaults."""
    return "inner_optimizer" not in vars(optimizer)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, DistributedOptimizer) or not isinstance(
        optimizer, keras.optimizers.Optimizer
    ):
        raise TypeError(
            "optimizer must be a Keras 3 optimizer that is not a DistributedOptimizer itself; "
            f"got {optimizer!r}"
        )


def _check_sharding(optimizer: keras.optimizers.Optimizer, shard: Any) -> None:
    """Raises unless the state of an optimizer can be sharded, if that is asked for."""
    if not isinstance(shard, bool):
        raise TypeError(f"shard_optimizer_state must be True or False; got {shard!r}")
    if not shard:
        return
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        sharding.check_strategy(strategy)
    for leaf in updates.leaves(optimizer):
        if leaf.built:
            raise ValueError(
                "shard_optimizer_state=True needs an optimizer that is not built yet; got "
                f"{leaf.name}, which has its variables: make a new one"
            )
        if leaf._distribution_strategy is not strategy:
            raise ValueError(
                "shard_optimizer_state=True needs an optimizer that is made in the scope of the "
                f"strategy, as DistributedOptimizer itself is; got {leaf.name}, made elsewhere: "
                "make both in strategy.scope()"
            )


def _set_accumulation_steps(optimizer: keras.optimizers.Optimizer, steps: int | None) -> None:
    """Has each leaf of an optimizer accumulate; what it says itself must not differ."""
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"gradient_accumulation_steps must be an int or None; got {steps!r}")
    if steps < 2:
        raise ValueError(f"gradient_accumulation_steps must be at least 2, or None; got {steps}")
    for leaf in updates.leaves(optimizer):
        if leaf.built or leaf.gradient_accumulation_steps not in (None, steps):
            raise ValueError(
                "gradient_accumulation_steps must be given before the optimizer is built and be "
                f"what it says itself, if anything; got {steps} for {leaf.name}, which is "
                f"{'built' if leaf.built else 'not built'} and has "
                f"gradient_accumulation_steps={leaf.gradient_accumulation_steps}"
            )
    for leaf in updates.leaves(optimizer):
        leaf.gradient_accumulation_steps = steps
