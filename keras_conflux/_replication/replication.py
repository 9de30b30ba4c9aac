"""`replicate` and `unreplicate`: models in place, values as `Replicas`."""

from collections.abc import Callable
from typing import Any
from typing import TypeVar
from typing import overload

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common import arguments
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._common.waiting import step_timeout
from keras_conflux._compat import keras_models
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import short_name
from keras_conflux._replication import model_options
from keras_conflux._replication import promotion
from keras_conflux._replication import state
from keras_conflux._replication.model_options import DataContract
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.state import Replicable
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import Shard
from keras_conflux._replication.strategy import check_options
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_for
from keras_conflux._replication.strategy import strategy_over

_EXPECTED = "a model, layer, optimizer, metric or seed generator"
KerasObject = TypeVar("KerasObject", bound=Replicable)
Result = TypeVar("Result")
Values = TypeVar("Values")


@overload
def replicate(
    target: None = None,
    devices: DevicesLike = None,
    *,
    shard: Shard | None = None,
    microbatches: int | None = None,
    cross_device_ops: Any = None,
) -> ReplicatedStrategy: ...
@overload
def replicate(
    target: KerasObject,
    devices: DevicesLike = None,
    *,
    shard: Shard | None = None,
    microbatches: int | None = None,
    data: DataContract | None = None,
    reshuffle: bool | None = None,
) -> KerasObject: ...
@overload
def replicate(
    target: list[KerasObject],
    devices: DevicesLike = None,
    *,
    microbatches: int | None = None,
    data: DataContract | None = None,
    reshuffle: bool | None = None,
) -> list[KerasObject]: ...
@overload
def replicate(
    target: Callable[[], Result], devices: DevicesLike = None
) -> Result: ...
@overload
def replicate(
    target: Values, devices: DevicesLike = None
) -> Replicas[Values]: ...
def replicate(
    target: Any = None,
    devices: DevicesLike = None,
    *,
    shard: Shard | None = None,
    microbatches: int | None = None,
    data: DataContract | None = None,
    reshuffle: bool | None = None,
    cross_device_ops: Any = None,
) -> Any:
    """Puts a model, an optimizer or values on every device.

    `fit`, `evaluate` and `predict` of a replicated model use all devices and
    compute what one device computes. The effect depends on the target:

    * nothing: returns the `ReplicatedStrategy` over the devices, for
      `with kc.replicate() as strategy:` or `strategy.scope()`;
    * a Keras model, layer, optimizer, metric or seed generator: gives every
      variable one copy per device, in place and with all state kept, and
      returns it. A model may be built or not, compiled or not, trained or not:
      `fit`, `evaluate`, `predict` and `export` work on. A metric's copies count
      their replicas' samples, and reading it adds them up;
    * a tree of these: each of them;
    * an array, tensor, variable, or a tree of them: returns a `Replicas` with
      one copy on each device. A variable becomes one variable per device;
    * any other callable: calls it in the strategy's scope, for its result.

    Args:
        target: A model, an optimizer or values; see above.
        devices: See `keras_conflux.devices`. Default: all for a strategy; for
            all else the devices of the open scope, else of
            `keras.distribution`, else all.
        shard: The state that is too large for a copy on each device, which
            keeps a part of it instead: `"optimizer"`, the optimizer's state, or
            `"weights"`, also the weights. By default nothing. For a model, a
            part of one, or a strategy in whose scope they are made.
        microbatches: For a model, a tree of models, or a strategy in whose
            scope they are made, the number of parts in which each replica runs
            its part of a batch in `fit` and `evaluate`, one after another. A
            step then needs the memory for the activations of one part, and has
            the result of the whole batch. `keras_conflux.memory(model, batch)`
            says how many a GPU needs. Default: unchanged, initially 1.
        data: For a model, or a tree of models, the data that each of several
            processes reads. `"global"`: all read the same batches, and each
            computes its rows of them. `"local"`: each brings its own part of
            every batch, which may be smaller than other parts or end earlier.
            Default: unchanged, initially `"global"`, or `"local"` under a
            `DataParallel(auto_shard_dataset=False)`. In one process both are
            the same.
        reshuffle: For a model, or a tree of models, whether
            `fit(x, y, shuffle=True)` draws another order of the samples in
            each epoch. After `keras.utils.set_random_seed`, Keras on
            TensorFlow draws the same one in each epoch, and so does a
            replicated model unless this is `True`. The orders follow from the
            seed, and are the same on any number of devices and processes.
            Default: unchanged, initially `False`.
        cross_device_ops: For a strategy, the reduction of its replicas' values
            outside of them, as `strategy.extended.reduce_to` does. By default
            `tf.distribute.NcclAllReduce` on GPUs, and
            `tf.distribute.ReductionToOneDevice` on CPU devices. Over several
            processes, and inside of replicas, the package's own collectives
            reduce in any case.

    Returns:
        The strategy, the target, a `Replicas` or a result, as listed above.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        NotImplementedError: If `shard` and `microbatches` are both given.
        StrategyError: If the model belongs to another strategy.
        TypeError: If the target is a string or a number, has a dataset or a
            loss in it, or has both models and arrays; if `data` is given for
            something else than models, or `reshuffle` is; if `shard` is given
            for values; if `microbatches` is no whole number.
        ValueError: If `data` is neither `"global"` nor `"local"`, `reshuffle`
            neither `True` nor `False`, `microbatches` below 1, or `shard`
            neither `"optimizer"` nor `"weights"`.

    Example:
        ```python
        model = kc.replicate(build_model())  # on all devices
        model.compile("adam", "mse")
        model.fit(dataset, verbose=0)

        table = kc.replicate(np.eye(3), devices=2)  # a Replicas

        kc.replicate(model, data="local")
        model.fit(kc.shard(x), kc.shard(y), verbose=0)  # its part
        ```
    """
    model_options.check(target, data, reshuffle, microbatches)
    check_options(shard, microbatches or 1)
    step_timeout()  # an error now, and not after hours
    if target is None:
        return strategy_for(devices, shard, microbatches or 1, cross_device_ops)
    if cross_device_ops is not None:
        raise TypeError(
            "`cross_device_ops` belongs to a strategy: write `with "
            "keras_conflux.replicate(cross_device_ops=...):` around the rest."
        )
    if devices is None:
        strategy = current_strategy()
        if shard is not None:
            strategy = strategy_for(strategy.devices, shard)
    elif shard is None and not _is_in_place(target):
        strategy = strategy_over(devices)  # of which values hold the devices
    else:
        strategy = strategy_for(devices, shard)
    _check_target(target)
    if _is_in_place(target) and not isinstance(target, Replicable):
        options: Any = {"microbatches": microbatches, "reshuffle": reshuffle}
        options |= {"shard": shard, "data": data}
        return trees.map_leaves(
            lambda leaf: replicate(leaf, devices, **options), target
        )
    if isinstance(target, Replicable):
        model_options.choose(target, data, reshuffle, microbatches)
        is_chosen = devices is not None or shard is not None
        promotion.promote(target, strategy if is_chosen else None)
        return target
    is_variable = isinstance(target, keras.Variable | tf.Variable)
    if callable(target) and not is_variable:
        with strategy.scope():
            return target()
    if shard is not None:
        raise TypeError(
            "`shard` divides the variables of a model, and has no meaning "
            f"for: {type(target).__name__}. Leave it out."
        )
    return _replicate_tree(target, strategy)


def _is_in_place(target: Any) -> bool:
    """Whether a target is an object with variables, or a tree of such."""
    return all(isinstance(x, Replicable) for x in trees.flatten(target))


def _check_target(target: Any) -> None:
    if isinstance(target, str | int) and not isinstance(target, bool):
        raise TypeError(
            "`replicate` takes a model, an optimizer or values for every "
            f"device. Received: {target!r}. To choose devices, write "
            f"`replicate(devices={target!r})`."
        )
    for path, leaf in trees.with_paths(target):
        if isinstance(leaf, tf.data.Dataset | keras.losses.Loss):
            raise TypeError(
                f"`replicate` has no use for {path}, a {type(leaf).__name__}: "
                "a loss has no variables, and a dataset is given to `fit` as "
                "it is, or to `keras_conflux.distribute`."
            )
    leaves = trees.flatten(target)
    models = [leaf for leaf in leaves if isinstance(leaf, Replicable)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Replicable)]
    if models and others:
        raise TypeError(
            "`replicate` puts models in place and copies arrays, but not both "
            f"at once. Received: a {type(models[0]).__name__} beside a "
            f"{type(others[0]).__name__}."
        )


def unreplicate(target: KerasObject) -> KerasObject:
    """Puts a replicated model or optimizer back on one device, in place.

    All state is kept: weights, optimizer, metrics, seeds. Of a metric, the
    copies are added up. An object that is not replicated is left as it is.

    Args:
        target: A Keras model, layer, optimizer, metric or seed generator.

    Returns:
        The target itself, whose variables are on its first device now.

    Raises:
        StrategyError: If its variables belong to several strategies, or to a
            strategy that is not a `ReplicatedStrategy`.

    Example:
        ```python
        model = kc.replicate(build_model())
        model.compile("sgd", "mse")
        model.fit(dataset, verbose=0)
        kc.unreplicate(model).predict(x, verbose=0)  # on one device
        ```
    """
    arguments.assert_is(target, Replicable, _EXPECTED)
    promotion.demote(target)
    model_options.forget(target)
    return target


def devices_of(target: Replicable) -> tuple[Device, ...]:
    """Returns the devices on which a model runs, or another Keras object.

    Args:
        target: A Keras model, layer, optimizer, metric or seed generator.

    Returns:
        For a replicated object, the devices of this process, in replica order.
        For others, the devices of its variables, if it has any yet.

    Raises:
        TypeError: If it is no object of Keras.

    Example:
        ```python
        model = kc.replicate(build_model(), devices=2)
        print(kc.devices_of(model))
        assert len(kc.devices_of(kc.unreplicate(model))) == 1
        ```
    """
    arguments.assert_is(target, Replicable, _EXPECTED)
    variables = state.variables_of(target)
    strategy = state.replicated_by(variables)
    if strategy is None and isinstance(target, keras.Model):
        strategy = keras_models.strategy_of(target)
    if isinstance(strategy, ReplicatedStrategy):
        return strategy.devices
    copies = [copy for variable in variables for copy in state.copies(variable)]
    return tuple(dict.fromkeys(short_name(copy.device) for copy in copies))


def _replicate_tree(tree: Tree, strategy: ReplicatedStrategy) -> Replicas[Any]:
    copied = []
    for device in strategy.devices:
        with tf.device(device):
            copied.append(trees.map_leaves(_copy, tree))
    return Replicas(copied, strategy.devices)


def _copy(leaf: Any) -> Any:
    leaf = state.backing(leaf)
    if isinstance(leaf, tf.Variable):
        return tf.Variable(leaf.read_value(), trainable=leaf.trainable)
    if isinstance(leaf, tf.Tensor):
        return tf.identity(leaf)
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float):
        return tf.convert_to_tensor(leaf)  # pyright: ignore[reportArgumentType]
    return leaf
