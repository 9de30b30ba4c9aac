"""`memory`: the bytes of a model on each device, also with `shard=`."""

import dataclasses

import keras
import tensorflow as tf

from keras_conflux._common import arguments
from keras_conflux._common import trees
from keras_conflux._compat import keras_models
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import versions
from keras_conflux._extensions.memory import step as step_of
from keras_conflux._extensions.memory import variable_bytes
from keras_conflux._replication import state
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import Shard
from keras_conflux._replication.strategy import current_strategy

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
SHARDS: tuple[Shard | None, ...] = (None, "optimizer", "weights")


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a model on each device, in bytes, as `memory` finds it.

    As text it is a table with a row for each choice of `shard`.

    Example:
        ```python
        model = build_model()
        model.compile("adam", "mse")
        found = kc.memory(model, devices=2)
        print(found.weights, found.optimizer)
        print(found.with_shard("weights").variables)
        print(found)
        ```
    """

    weights: int
    """The bytes of the layers, with their statistics and seeds."""
    optimizer: int | None
    """The bytes of the optimizers, once they are built. `None` where
    nobody can tell before: of several, or of a class that cannot be copied."""
    step: int | None
    """The other bytes of a step of `fit`: activations, gradients, its part of
    the batch. `None` without a batch, and where it is not known."""
    peak: int | None = dataclasses.field(compare=False)
    """The most that this process has needed so far on the fullest of the
    model's GPUs, all else that is there included. `None` on CPU devices."""
    devices: int
    """On how many devices the model is, or would be."""
    shard: Shard | None
    """The state that lies in parts: none, `"optimizer"` or `"weights"`."""
    microbatches: int | None = dataclasses.field(default=None, compare=False)
    """The number for `replicate(microbatches=)`: the least power of two with
    which all fits into a GPU. `None` without `step`, and if none is enough."""
    unknown: str | None = dataclasses.field(default=None, compare=False)
    """With a batch, why `step` is not known of whole variables, if so."""
    others: "tuple[Memory, ...]" = dataclasses.field(
        default=(), repr=False, compare=False
    )
    """The memory for the other choices of `shard`."""

    @property
    def variables(self) -> int:
        """Weights and optimizer, as far as they are known."""
        return self.weights + (self.optimizer or 0)

    def with_shard(self, shard: Shard | None) -> "Memory":
        """Returns the same for another choice of `shard`.

        Args:
            shard: `None`, `"optimizer"` or `"weights"`.

        Returns:
            A `Memory`.

        Raises:
            ValueError: If it is none of these.
        """
        known = (self, *self.others)
        for each in known:
            if each.shard == shard:
                others = tuple(other for other in known if other is not each)
                return dataclasses.replace(each, others=others)
        raise ValueError(
            f'`shard` is None, "optimizer" or "weights". Received: {shard!r}'
        )

    def __str__(self) -> str:
        rows = [self.with_shard(each) for each in SHARDS]
        unit = _unit_of(max(max(row.variables, row.step or 0) for row in rows))
        count = self.devices
        where = f"each of {count} devices" if count > 1 else "one device"
        heads = f"{unit} on {where}", "weights", "optimizer", "step"
        table: list[tuple[str, ...]] = [heads]
        for row in rows:
            name = f'shard="{row.shard}"' if row.shard else "shard=None"
            sizes = row.weights, row.optimizer, row.step
            table.append((name, *(_in_unit(size, unit) for size in sizes)))
        width = max(len(name) for name, *_ in table)
        said = "\n".join(
            f"{name:<{width}}  {weights:>7}  {optimizer:>9}  {step:>4}"
            for name, weights, optimizer, step in table
        )
        whole = self.with_shard(None)
        if whole.unknown is not None:
            said += f"\n?: {whole.unknown}"
        turns = whole.microbatches
        if turns is None:
            return said
        return f"{said}\nIt fits with `replicate(..., microbatches={turns})`."


def memory(
    model: keras.Model, batch: trees.Tree = None, *, devices: int | None = None
) -> Memory:
    """Returns the memory of a model on each device, also with `shard=`.

    Weights and optimizer are exact, also before the optimizer is built and
    before the model is replicated. Nothing is allocated for it.

    With a batch, XLA compiles the forward and the backward pass of one
    device's part of it, without running them, and says how much memory they
    need. That takes as long as the first step of `fit`. A step without `shard`
    needs that much, but for three things: the update and the exchange of
    gradients may need more; attention that `fit` fuses on GPUs needs less; and
    of a CPU it is XLA's number, though on several CPU devices steps run without
    XLA. The memory of a step with `shard` is not told, as XLA decides how much
    it gathers ahead, nor that of a `train_step` of your own, which may be any
    program.

    Args:
        model: A Keras model that is built, replicated or not.
        batch: A global batch as a dataset yields it, such as `(x, y)`, of
            arrays, tensors or `tf.TensorSpec`s. Only shapes and dtypes
            matter. By default nothing is compiled.
        devices: The number of devices. By default the model's
            devices, or the ones that `replicate` would use.

    Returns:
        A `Memory`, in bytes per device.

    Raises:
        TypeError: If it is no Keras model, or `devices` no number.
        ValueError: If the model is not built, or with a batch not compiled.

    Example:
        ```python
        model = build_model()
        model.compile("adam", "mse")
        print(kc.memory(model, (x, y), devices=2))

        kc.replicate(model, devices=2, shard="optimizer")
        assert kc.memory(model).shard == "optimizer"
        ```
    """
    versions.assert_in_place("memory", "kc.memory")
    arguments.assert_is(model, keras.Model, "a Keras model")
    if devices is not None:
        arguments.assert_count("devices", devices, "a number of devices")
    _assert_built(model)
    strategy = strategy_of(model)
    shard = None if strategy is None else strategy.shard
    used = strategy or current_strategy()
    count = used.communicator.size if devices is None else int(devices)
    step = unknown = None
    if batch is not None:
        step, unknown = _step(model, batch, count, used.devices[0])
    whole, *others = _of_each_shard(model, count, step, _peak(used))
    turns = None
    if whole.step is not None:
        sums = sum(map(trees.bytes_of, model.trainable_variables))
        needed = whole.step, sums, whole.variables
        turns = step_of.turns_that_fit(*needed, limit_of(used))
    return dataclasses.replace(
        whole, microbatches=turns, unknown=unknown, others=tuple(others)
    ).with_shard(shard)


def limit_of(strategy: ReplicatedStrategy | None) -> int:
    """Returns the bytes that TensorFlow may take of each GPU, 0 if on none."""
    if strategy is None or not strategy.communicator.on_gpu:
        return 0
    return min(map(tensorflow_internals.memory_of, strategy.devices))


def strategy_of(model: keras.Model) -> ReplicatedStrategy | None:
    """Returns the strategy that replicates a model, if any."""
    found = keras_models.strategy_of(model)
    if isinstance(found, ReplicatedStrategy):
        return found
    return state.replicated_by(state.variables_of(model))


def _of_each_shard(
    model: keras.Model, devices: int, step: int | None, peak: int | None
) -> list[Memory]:
    weights = [*map(variable_bytes.Held, model.variables)]
    optimizers = variable_bytes.optimizers_of(model)
    found = []
    for shard in SHARDS:
        held = sum(each.size(shard, devices) for each in weights)
        beside = None
        if optimizers is not None:
            beside = sum(each.size(shard, devices) for each in optimizers)
        of_step = step if shard is None or devices == 1 else None
        found.append(Memory(held, beside, of_step, peak, devices, shard))
    return found


def _step(
    model: keras.Model, batch: trees.Tree, devices: int, device: str
) -> tuple[int | None, str | None]:
    """Returns the bytes of a step, or why they are not known."""
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"{model.name}: a step's memory depends on the loss. Received: a "
            "batch, and a model that is not compiled. Call `model.compile` "
            "first, or leave the batch out."
        )
    for path, leaf in trees.with_paths(batch):
        if leaf is not None and len(getattr(leaf, "shape", ())) == 0:
            raise TypeError(
                "`batch` is a batch as a dataset yields it, of arrays, "
                f"tensors or `tf.TensorSpec`s. Received: {path} is a "
                f"{type(leaf).__name__}."
            )
    if keras_models.has_own_step(model, "train_step"):
        why = "has its own `train_step`; only Keras' is measured."
        return None, f"{type(model).__name__} {why}"
    if model.loss and keras.utils.unpack_x_y_sample_weight(batch)[1] is None:
        raise ValueError(
            f"{model.name}: losses need targets, as in `(x, y)`; got none."
        )
    found = step_of.bytes_of_step(model, batch, devices, device)
    return found, None if found else "XLA cannot compile the step."


def _peak(strategy: ReplicatedStrategy) -> int | None:
    """Returns the most that one of the GPUs of a strategy has needed."""
    if not strategy.communicator.on_gpu:
        return None
    info = tf.config.experimental.get_memory_info
    return max(info(device)["peak"] for device in strategy.devices)


def _assert_built(model: keras.Model) -> None:
    found = [x for x in keras_models.all_layers(model) if not x.built]
    unbuilt = [layer for layer in found if not isinstance(layer, keras.Model)]
    if unbuilt or not (model.built or model.variables):
        name = unbuilt[0].name if unbuilt else model.name
        raise ValueError(
            f"`memory` counts the variables of a model that is built. "
            f"Received: {model.name!r}, of which {name!r} has none yet. Call "
            "`model.build(shape)`, or the model on a batch, first."
        )


def readable(value: int) -> str:
    """Returns a number of bytes with the largest unit that fits."""
    unit = _unit_of(value)
    return f"{_in_unit(value, unit)} {unit}"


def _unit_of(value: int) -> str:
    """Returns the largest unit in which a number of bytes is at least 1."""
    return next((unit for unit, size in _UNITS if value >= size), "bytes")


def _in_unit(value: int | None, unit: str) -> str:
    """Returns a number of bytes without its unit, `"?"` for `None`."""
    return "?" if value is None else f"{value / dict(_UNITS)[unit]:.3g}"
