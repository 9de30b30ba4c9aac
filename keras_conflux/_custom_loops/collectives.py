"""The collectives: exchanges between replicas that the user asks for.

Each has two call forms, see `allreduce`. `verbs.py` has the work of a replica.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import TypeAlias
from typing import TypeVar
from typing import overload

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import StrategyError
from keras_conflux._common.trees import Tree
from keras_conflux._communication.transports.ops import OpName
from keras_conflux._communication.transports.ops import find_op
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._custom_loops import verbs
from keras_conflux._custom_loops.given import Given
from keras_conflux._custom_loops.spmd import withdevices
from keras_conflux._data.transfer import device_of_leaf
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._fit.numerics.layers import Layers
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import whole_batch_strategy
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.strategy import current_strategy

KerasVariables: TypeAlias = (
    keras.layers.Layer | keras.optimizers.Optimizer | keras.Variable
)
Number: TypeAlias = bool | int | float | np.number[Any]
V = TypeVar("V")


@overload
def allreduce(
    op: OpName, values: KerasVariables, *, weight: Any = None
) -> None: ...
@overload
def allreduce(
    op: OpName, values: Number, *, weight: Any = None
) -> tf.Tensor: ...
@overload
def allreduce(op: OpName, values: V, *, weight: Any = None) -> V: ...
@overload
def allreduce(
    op: OpName,
    values: Number,
    other: Number,
    /,
    *others: Number,
    weight: Any = None,
) -> Replicas[tf.Tensor]: ...
@overload
def allreduce(
    op: OpName, values: V, other: V, /, *others: V, weight: Any = None
) -> Replicas[V]: ...
@tf.autograph.experimental.do_not_convert
def allreduce(
    op: OpName, values: Any, *others: Tree, weight: Any = None
) -> Any:
    """Reduces the replicas' trees, leaf by leaf, to one that all get.

    Inside a `withdevices` function, `strategy.run` or a `train_step`, each
    replica gives its tree and gets the result. Outside, the trees of all
    replicas are given, and a `Replicas` comes back. Conflux.jl has the second
    form, Lux.jl and FluxMPI.jl have the first.

    Leaves are float16, bfloat16, float32, float64, int32 or int64; each keeps
    its shape and dtype, except that the mean of integers is of
    `keras.config.floatx()`. `None` leaves stay `None`. `tf.IndexedSlices` work
    with sum and mean and stay sparse. Where a replica has NaN, the result is
    NaN, whatever the op. The result can be differentiated.

    In a step of `fit`, `evaluate` or `predict`, a replica may have no samples,
    as in a last batch of one. Its tree is left out.

    Args:
        op: `"sum"` (`"+"`), `"mean"` (`"avg"`), `"product"` (`"*"`), `"min"`
            or `"max"`, or a `tf.distribute.ReduceOp`.
        values: Inside a replica, its tree. Outside, a `Replicas`, the first of
            the replicas' trees, or a list of them; or a tree, such as a list
            of gradients, whose leaves are `Replicas` or results of
            `strategy.run`. In both places also a model or variables: their
            floating-point copies are then reduced in place.
        *others: Outside, the other replicas' trees, if `values` is the first.
            Leaves have the shapes and dtypes of the leaves of `values`.
        weight: For `"mean"`, the weight of a replica, for example its number of
            samples: inside a scalar, `len(x)`, outside a `Replicas` or a list
            of them, `[len(part) for part in x]`. The tree of a replica of
            weight 0 is ignored, NaN included. Without it all count alike, which
            is not the mean over samples where parts are of different sizes.
            `withdevices` warns of that; `fit` weights means over samples.

    Returns:
        Inside, the reduced tree. Outside, a `Replicas` of equal trees, or for
        a tree of `Replicas` a tree. `None` if variables were reduced in place.

    Raises:
        DeviceError: Outside, if there are more trees than devices.
        ReplicaMismatchError: If the trees differ in structure, shape or dtype,
            or if replicas make different collective calls.
        StrategyError: Outside, if there is a single tree, so nothing to
            reduce it with, or if leaves, or `weight`, are on other devices. If
            variables are not replicated, or are by several strategies.
        TypeError: If a leaf is no number, or of a dtype that has no sum.
        ValueError: If the op is unknown or does not work on
            `tf.IndexedSlices`, if the tree has no leaves or a model no
            floating-point variables, if `weight` is given for another op than
            `"mean"` or is not one number per replica, or if a replica gives
            several trees.

    Example:
        ```python
        total = kc.allreduce("sum", tf.constant(1.0), tf.constant(2.0))
        print(list(total))  # 3.0 on each of two devices

        @kc.withdevices
        def mean_of_all(x):
            return kc.allreduce("mean", tf.reduce_sum(x), weight=len(x))

        mean_of_all(kc.split(x))
        ```
    """
    found = find_op(op)
    if weight is not None and not found.takes_weights:
        raise ValueError(
            f"`weight` goes with 'mean' only. Received: {found.name!r}."
        )
    call = _Call(f"allreduce({found.name!r})", verbs.allreduce, (found,))
    return _collective(call, (values, *others), weight)


@overload
def reduce(op: OpName, values: KerasVariables, *, root: int = 0) -> None: ...
@overload
def reduce(op: OpName, values: Number, *, root: int = 0) -> tf.Tensor: ...
@overload
def reduce(op: OpName, values: V, *, root: int = 0) -> V: ...
@overload
def reduce(
    op: OpName, values: Number, other: Number, /, *others: Number, root: int = 0
) -> Replicas[tf.Tensor]: ...
@overload
def reduce(
    op: OpName, values: V, other: V, /, *others: V, root: int = 0
) -> Replicas[V]: ...
@tf.autograph.experimental.do_not_convert
def reduce(op: OpName, values: Any, *others: Tree, root: int = 0) -> Any:
    """Reduces the replicas' trees to replica `root`; others keep their own.

    The call forms, the leaves and their dtypes are as in `allreduce`.

    Args:
        op: See `allreduce`.
        values: See `allreduce`. Of a model or variables, the floating-point
            copies of replica `root` are changed in place.
        *others: See `allreduce`.
        root: The index of the replica that gets the result, from 0.

    Returns:
        Inside, the reduced tree on replica `root`, and on each other replica
        its own tree, as tensors. Outside, a `Replicas` of these. `None` if
        variables were reduced in place.

    Raises:
        ConfluxError: Where `allreduce` raises one.
        TypeError: Where `allreduce` raises it.
        ValueError: Where `allreduce` raises it, and without a replica `root`.

    Example:
        ```python
        result = kc.reduce("max", tf.constant(1.0), tf.constant(2.0), root=0)
        print(list(result))  # 2.0 on the first device, its own on the second
        ```
    """
    found = find_op(op)
    call = _Call(f"reduce({found.name!r})", verbs.reduce, (found, root))
    return _collective(call, (values, *others))


@overload
def broadcast(values: KerasVariables, *, root: int = 0) -> None: ...
@overload
def broadcast(values: Number, *, root: int = 0) -> tf.Tensor: ...
@overload
def broadcast(values: V, *, root: int = 0) -> V: ...
@overload
def broadcast(
    values: Number, other: Number, /, *others: Number, root: int = 0
) -> Replicas[tf.Tensor]: ...
@overload
def broadcast(
    values: V, other: V, /, *others: V, root: int = 0
) -> Replicas[V]: ...
@tf.autograph.experimental.do_not_convert
def broadcast(values: Any, *others: Tree, root: int = 0) -> Any:
    """Gives every replica the tree of replica `root`, bit by bit.

    The call forms are as in `allreduce`. Leaves are float16, bfloat16,
    float32, float64, bool, or integers of 8 to 64 bits, signed or not; each
    keeps its shape and dtype. `None` leaves stay `None`.

    In a step of `fit`, `evaluate` or `predict`, replica `root` may have no
    samples, as in a last batch of one. Then the next replica that has some
    sends its tree; after the last replica comes the first one.

    Args:
        values: See `allreduce`. The trees of all replicas have one structure.
            Of a model or variables, the floating-point copies are overwritten
            in place.
        *others: See `allreduce`.
        root: The index of the replica whose tree is sent, from 0.

    Returns:
        Inside, the tree of replica `root`. Outside, a `Replicas` of equal
        trees. `None` if variables were overwritten in place.

    Raises:
        ConfluxError: Where `allreduce` raises one.
        TypeError: If a leaf is not numeric, or of a dtype that cannot be sent,
            or is a `tf.IndexedSlices`.
        ValueError: If the tree has no leaves or a model no floating-point
            variables, if there is no replica `root`, or if a replica gives
            several trees.

    Example:
        ```python
        @kc.withdevices
        def shared_noise():
            noise = tf.random.normal((3,))  # differs between replicas
            return kc.broadcast(noise)  # that of replica 0

        kc.assert_in_sync(shared_noise())
        ```
    """
    call = _Call("broadcast", verbs.broadcast, (root,))
    return _collective(call, (values, *others))


@overload
def allgather(values: Number, *, axis: int = 0) -> tf.Tensor: ...
@overload
def allgather(values: V, *, axis: int = 0) -> V: ...
@overload
def allgather(
    values: Number, other: Number, /, *others: Number, axis: int = 0
) -> Replicas[tf.Tensor]: ...
@overload
def allgather(
    values: V, other: V, /, *others: V, axis: int = 0
) -> Replicas[V]: ...
@tf.autograph.experimental.do_not_convert
def allgather(values: Any, *others: Tree, axis: int = 0) -> Any:
    """Joins the replicas' leaves along an axis, in replica order.

    The call forms are as in `allreduce`, and the leaves as in `broadcast`; each
    keeps its dtype. The result can be differentiated.

    In a step of `fit`, `evaluate` or `predict`, a replica may have no samples,
    as in a last batch of one. It runs on a copy of another's sample, which the
    others do not see: its rows are left out, and a scalar that it gives, such
    as a number of rows, is 0 for them. For itself they are in the result,
    behind all others; its results are ignored.

    In XLA programs, sizes along `axis` have to be equal on all replicas, and
    known: sizes of samples are in a compiled step of `fit`. Other steps of
    `fit` run as graphs then, with a warning.

    Args:
        values: See `allreduce`. The trees of all replicas have one structure
            and the same dtypes. Sizes along `axis` may differ, all others are
            equal. Scalars are joined to a vector. Of a model or of variables,
            give the values: a variable cannot change its shape.
        *others: See `allreduce`.
        axis: The axis to join along; counts from the last one if negative.

    Returns:
        Inside, the tree of joined leaves. Shapes `(2, 3)` and `(4, 3)` become
        `(6, 3)` along axis 0. Outside, a `Replicas` of equal trees.

    Raises:
        ConfluxError: Where `allreduce` raises one.
        tf.errors.UnimplementedError: In `withdevices(jit_compile=True)`, if
            sizes differ or are not known.
        TypeError: If a leaf is not numeric, or of a dtype that cannot be sent.
        ValueError: If the tree has no leaves, if a leaf has no such axis, if a
            replica gives several trees, or if variables are given.

    Example:
        ```python
        joined = kc.allgather(tf.zeros((2, 3)), tf.ones((1, 3)))
        print(joined[0].shape)  # (3, 3)
        ```
    """
    call = _Call("allgather", verbs.allgather, (axis,), sizes_differ=True)
    return _collective(call, (values, *others))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A collective with its settings, as one replica makes it."""

    name: str
    """The name of the call in errors."""
    verb: Callable[..., Tree]
    """The function of `verbs.py`. It takes the settings first."""
    settings: tuple[Any, ...]
    sizes_differ: bool = False
    """Whether the leaves of replicas may have different sizes."""

    def __call__(self, *given: Any) -> Tree:
        return self.verb(*self.settings, *given)


@functools.cache
def _on_every_device(
    call: _Call, devices: tuple[Device, ...], ranks: tuple[int | None, ...]
) -> Callable[..., Replicas[Any]]:
    # One function for trees of several ranks would be traced for tensors of
    # unknown rank, which cannot be joined.
    del ranks

    @tf.autograph.experimental.do_not_convert
    def each(*given: Any) -> Tree:
        return call(*given)

    each.__qualname__ = call.name
    return withdevices(each, devices=devices)


def _collective(call: _Call, values: tuple[Any, ...], *weight: Any) -> Any:
    """Makes a call in the form that the place of the caller asks for."""
    if not any(_leaves(tree) for tree in values):
        raise ValueError(f"{call.name}: the tree {values[0]!r} has no leaves.")
    first, *others = values
    if not others and _are_variables(first):
        return _in_place(call, first, *weight)
    if in_replica() or whole_batch_strategy() is not None:
        if others or isinstance(first, Replicas):
            raise ValueError(
                f"{call.name}: inside a replica, give this replica's tree "
                "alone; the other replicas give theirs."
            )
        result = call(first, *weight)
        step, of_fit = steps.current(), steps.current_fit_step()
        if step is not None:
            steps.UserReductions.of(step).add(result)
        if of_fit is not None:
            made = steps.symbolic(trees.flatten(result))
            given = steps.symbolic(trees.flatten([first, *weight]))
            Layers.of(of_fit).own_gradients.trust(made, given)
        return result
    replicas, by_leaf = _as_replicas(call, values)
    standard = [trees.map_leaves(_standard, tree) for tree in replicas]
    if not call.sizes_differ:
        trees.assert_alike(dict(enumerate(standard)), call.name)
    ranks = tuple(tf.TensorShape(x.shape).rank for x in trees.present(standard))
    run = _on_every_device(call, replicas.devices, ranks)
    given = Replicas(standard, replicas.devices)
    given.is_uneven = replicas.is_uneven
    weights = [_of_each(each, replicas.devices) for each in weight]
    result = run(given, *weights)
    if call.verb is verbs.reduce:
        result.kind = call.settings[1]
    return _by_leaf(result) if by_leaf else result


def _of_each(weight: Any, devices: tuple[Device, ...]) -> Any:
    """Returns the weights of replicas, which come from outside of them."""
    if isinstance(weight, list | tuple):
        return Replicas(weight, devices)
    of_each = tf.distribute.DistributedValues | keras.Variable
    if weight is None or isinstance(weight, of_each) or len(devices) == 1:
        return weight
    raise ValueError(
        "allreduce('mean'): outside of replicas, `weight` is one number per "
        f"replica, here {len(devices)}. For a mean over the samples of a "
        "`Replicas` x, write `weight=[len(part) for part in x]`. Received: "
        f"{weight!r}."
    )


def _by_leaf(result: Replicas[Any]) -> Any:
    """Returns a tree of `Replicas` for a `Replicas` of trees."""

    def leaf(*each: Any) -> Any:
        if each[0] is None:
            return None
        found = Replicas(each, result.devices)
        found.kind = result.kind
        return found

    return keras.tree.map_structure(leaf, *result)


def _in_place(call: _Call, target: Any, *weight: Any) -> None:
    """Applies a collective to the copies of variables."""
    found = [
        each
        for each in state.variables_of(target)
        if state.is_mirrored(each) and tf.as_dtype(each.dtype).is_floating
    ]
    for variable in found:
        if state.is_in_parts(variable):
            raise ValueError(
                f"{call.name}: {state.name_of(variable)} is sharded, so there "
                "are no copies to reduce. Reduce values that the replicas "
                "have computed, or replicate without `shard`."
            )
    if not found:
        raise ValueError(
            f"{call.name}: there is no floating-point variable in {target!r}. "
            "Build a model before it is reduced."
        )
    if whole_batch_strategy() is not None:
        return  # a replica alone has the values of all
    strategy = state.strategy_of(found)
    if strategy is None:
        raise StrategyError(
            f"{call.name}: {state.name_of(found[0])} has a single copy. Give "
            "its model to `keras_conflux.replicate` first."
        )

    copies = list(zip(*map(state.copies, found), strict=True))
    if in_replica():
        mine = copies[replica_index()]
        results = [(mine, call([v.read_value() for v in mine], *weight))]
    else:
        values = [[v.read_value() for v in each] for each in copies]
        replicas = Replicas(values, strategy.devices)
        reduced = _collective(call, (replicas,), *weight)
        results = zip(copies, reduced, strict=True)
    for mine, values in results:
        for copy, value in zip(mine, values, strict=True):
            copy.assign(value)


def _are_variables(target: Any) -> bool:
    if isinstance(target, keras.layers.Layer | keras.optimizers.Optimizer):
        return True
    return all(isinstance(leaf, keras.Variable) for leaf in _leaves(target))


def _leaves(tree: Any) -> list[Any]:
    return trees.flatten([*tree] if isinstance(tree, Replicas) else tree)


def _as_replicas(
    call: _Call, values: tuple[Any, ...]
) -> tuple[Replicas[Any], bool]:
    """Returns the tree of each device, and whether it was given by leaves."""
    value, *others = values
    if others:
        return Replicas(values, _devices_of(values)), False
    if isinstance(value, Replicas):
        return value, False
    devices = current_strategy().devices
    given = Given(value)
    # On one device `strategy.run` returns the function's own result.
    if given.split or len(devices) == 1:
        on = {each.devices for each in given.split} or {devices}
        if len(on) > 1:
            raise StrategyError(
                f"{call.name}: the leaves of a tree are on the same devices. "
                f"Received some on {' and on '.join(map(', '.join, on))}."
            )
        devices = on.pop()
        found = Replicas(given.parts(len(devices)), devices)
        found.is_uneven = given.is_uneven
        return found, True
    copies = tf.distribute.DistributedValues
    if (
        isinstance(value, list | tuple)
        and len(value) == len(devices)
        and not any(isinstance(leaf, copies) for leaf in trees.flatten(value))
    ):
        return Replicas(value, _devices_of(tuple(value))), False
    raise StrategyError(
        f"{call.name}: outside of replicas there is one tree per device, but a "
        f"single {type(value).__name__} came. Call it inside a `withdevices` "
        "function, or pass a `Replicas`, the result of `strategy.run`, or the "
        f"{len(devices)} trees one after another, as in "
        "`allreduce(op, tree0, tree1)`, or in a list."
    )


def _devices_of(values: tuple[Tree, ...]) -> tuple[Device, ...]:
    """Returns the devices of the trees, or the first ones if some share."""
    found = []
    for tree in values:
        on = {*map(device_of_leaf, trees.flatten(tree))} - {None}
        found.append(on.pop() if len(on) == 1 else None)
    if None not in found and len(set(found)) == len(values):
        return tuple(found)
    return find_devices(len(values))


def _standard(leaf: Any) -> Any:
    """Returns the tensor, or the rows of a tensor, that a leaf stands for."""
    if isinstance(leaf, tf.IndexedSlices):
        values, indices = map(tf.convert_to_tensor, [leaf.values, leaf.indices])
        return tf.IndexedSlices(values, indices, leaf.dense_shape)
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError):
        return leaf
