"""The strategy: one replica per device, each running the whole program."""

import functools
import threading
from collections.abc import Callable
from collections.abc import Hashable
from typing import Any
from typing import Literal
from typing import NamedTuple
from typing import Self
from typing import TypeAlias

import tensorflow as tf

from keras_conflux._cluster.processes import initialize_from_environment
from keras_conflux._cluster.processes import process_count
from keras_conflux._common import arguments
from keras_conflux._communication.communicator import Communicator
from keras_conflux._communication.transports.ops import Op
from keras_conflux._communication.transports.ops import find_op
from keras_conflux._compat import keras_variables
from keras_conflux._compat import patching
from keras_conflux._compat.replicated_extended import ReplicatedExtended
from keras_conflux._compat.tensorflow_internals import note_own
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._replication import combinations
from keras_conflux._replication import steps
from keras_conflux._replication import sums
from keras_conflux._replication.across_processes import AcrossProcesses
from keras_conflux._replication.replica_context import replica_collectives

Shard: TypeAlias = Literal["optimizer", "weights"]
"""The state of a model that lies in parts, one on each device."""


class ReplicatedStrategy(tf.distribute.MirroredStrategy):
    """A `tf.distribute.MirroredStrategy` whose replicas run independently.

    Every replica holds a full copy of every variable and runs the program of
    a single device. Replicas exchange values in collectives only; otherwise
    their copies stay equal because equal programs on equal values give equal
    results.

    `keras_conflux.replicate()` returns one. `with strategy.scope():` and
    `with strategy:` are the same: models and variables that are made there
    have one copy per device. `strategy.run` and the other methods of
    `tf.distribute.Strategy` work as TensorFlow documents them.

    Args:
        devices: See `keras_conflux.devices`. All GPUs if `None`, or all CPU
            devices where there is no GPU.
        shard: See `keras_conflux.replicate`.
        microbatches: For models that are made in the scope. See
            `keras_conflux.replicate`.
        cross_device_ops: See `keras_conflux.replicate`.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        NotImplementedError: If `shard` and `microbatches` are both given.
        TypeError: If `microbatches` is no whole number.
        ValueError: If `shard` is another word, or `microbatches` is below 1.

    Example:
        ```python
        with kc.ReplicatedStrategy(devices=2) as strategy:
            model = build_model()
            model.compile("sgd", "mse")
        print(strategy.devices, strategy.num_replicas_in_sync)
        model.fit(dataset, verbose=0)
        ```
    """

    devices: tuple[Device, ...]
    """One device per replica, in replica order."""
    shard: Shard | None
    """The state that lies in parts, one on each device, or `None`."""
    microbatches: int
    """The number of parts in which replicas of models made here run."""
    communicator: Communicator
    """Internal: the channel through which replicas exchange tensors."""
    _conflux_names: Callable[[Any], bool] | None = None
    """Tells which weights lie in parts, if not all."""

    def __init__(
        self,
        devices: DevicesLike = None,
        *,
        shard: Shard | None = None,
        microbatches: int = 1,
        cross_device_ops: Any = None,
    ) -> None:
        patching.begin()
        initialize_from_environment()
        check_options(shard, microbatches)
        self.shard = shard
        self.microbatches = check_microbatches(microbatches)
        self.devices = find_devices(devices)
        self.communicator = Communicator(self.devices)
        self._conflux_scopes = threading.local()
        self._conflux_across = AcrossProcesses(self)
        extended = ReplicatedExtended(self, self.devices, cross_device_ops)
        # Not MirroredStrategy.__init__, which would make its own inside.
        tf.distribute.Strategy.__init__(self, extended)
        options = shard, self.microbatches, cross_device_ops
        key = (self.devices, *options, self._conflux_names)
        _strategies.setdefault(key, self)

    def cuts(self, weight: Any) -> bool:
        """Internal: tells whether a weight, if it is large, lies in parts.

        Args:
            weight: The Keras variable.

        Returns:
            Whether each device holds a part of it.
        """
        names = self._conflux_names
        return self.shard == "weights" and (names is None or names(weight))

    @functools.cached_property
    def ranks(self) -> Any:
        """Internal: a variable that holds the rank of each replica."""
        with tf.init_scope(), self.scope():
            # Of a dtype that GPUs keep in their own memory.
            found: Any = tf.Variable(
                tf.zeros([], tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            for index, copy in enumerate(found.values):
                note_own(copy.handle, copy)
                copy.assign(self.communicator.rank(index))
        return found

    def __enter__(self) -> Self:
        scope = self.scope()
        scope.__enter__()
        vars(self._conflux_scopes).setdefault("opened", []).append(scope)
        return self

    def __exit__(self, *error: Any) -> None:
        self._conflux_scopes.opened.pop().__exit__(*error)

    def __repr__(self) -> str:
        said = [f"[{', '.join(self.devices)}]"]
        if self.shard:
            said.append(f"shard={self.shard!r}")
        if self.microbatches != 1:
            said.append(f"microbatches={self.microbatches!r}")
        return f"ReplicatedStrategy({', '.join(said)})"

    def _conflux_all_reduce(self, op: str, tree: Any) -> Any:
        return _reductions[-1](find_op(op), tree)

    def _conflux_of_first_replica(self, tree: Any) -> Any:
        """Returns the values of the first replica of all.

        In a step of `fit`, or of an optimizer, all replicas have the same.
        """
        step = steps.current()
        if step and (step.is_updating or step.batch_fraction is not None):
            return tree
        return replica_collectives().broadcast(tree, 0)

    def _conflux_around_replica(self, program: Callable[..., Any]) -> Any:
        if process_count() > 1:
            program = sums.added_up(program)
        return keras_variables.with_this_threads_state(program)


class LaidOutStrategy(ReplicatedStrategy):
    """A strategy that keeps those weights in parts that something names."""

    def __init__(
        self, devices: DevicesLike, names: Callable[[Any], bool]
    ) -> None:
        self._conflux_names = names
        super().__init__(devices, shard="weights")


class Distributed(NamedTuple):
    """The settings of Keras' distribution for models made under it."""

    devices: DevicesLike
    names: Callable[[Any], bool] | None = None
    """Tells of a weight whether it lies in parts. `None` if none does."""


_reductions: list[Callable[[Op, Any], Any]] = []
reduce_by = _reductions.append
"""Has a function reduce what replicas give to TensorFlow's `all_reduce`."""
_distributions: list[Callable[[], Distributed | None]] = []
ask_for_distribution = _distributions.append
"""Has a function tell which devices Keras' distribution is over."""
_strategies: dict[Hashable, ReplicatedStrategy] = {}


def strategy_for(
    which: DevicesLike,
    shard: Shard | None = None,
    microbatches: int = 1,
    cross_device_ops: Any = None,
) -> ReplicatedStrategy:
    """Returns the strategy over these devices, always the same object."""
    chosen = find_devices(which)
    key = (chosen, shard, microbatches, cross_device_ops, None)
    return _strategies.get(key) or ReplicatedStrategy(
        chosen,
        shard=shard,
        microbatches=microbatches,
        cross_device_ops=cross_device_ops,
    )


def strategy_over(which: DevicesLike) -> ReplicatedStrategy:
    """Returns the current strategy if it is over these devices, or another."""
    chosen = find_devices(which)
    current = current_strategy()
    return current if current.devices == chosen else strategy_for(chosen)


def check_options(shard: Any, microbatches: int = 1) -> None:
    """Raises unless options of `replicate` are known and work together."""
    if shard not in (None, "optimizer", "weights"):
        raise ValueError(
            '`shard` is "optimizer", if each device is to keep a part of the '
            'optimizer\'s state, or "weights", if also a part of the weights. '
            f"Received: shard={shard!r}."
        )
    refused = combinations.refusal(shard, microbatches)
    if refused:
        raise NotImplementedError(refused)


def check_microbatches(microbatches: Any) -> int:
    """Returns a number of microbatches as one of Python's, if it is one."""
    arguments.assert_count(
        "microbatches",
        microbatches,
        "in how many parts, one after another, each replica runs its part of "
        "a batch",
    )
    return int(microbatches)


def has_strategies() -> bool:
    """Whether anything can be replicated: a strategy has been made."""
    return bool(_strategies)


def distribution_strategy() -> ReplicatedStrategy | None:
    """Returns the strategy over the devices of Keras' distribution, if set."""
    distributed = _distributions[-1]() if _distributions else None
    if distributed is None:
        return None
    chosen = find_devices(distributed.devices)
    names = distributed.names
    if names is None:
        return strategy_for(chosen)
    key = (chosen, "weights", 1, None, names)
    return _strategies.get(key) or LaidOutStrategy(chosen, names)


def current_strategy() -> ReplicatedStrategy:
    """Returns the strategy of the open scope, of Keras or of all devices."""
    active = tf.distribute.get_strategy()
    if isinstance(active, ReplicatedStrategy):
        return active
    return distribution_strategy() or strategy_for(None)


def default_strategy() -> Any:
    """Returns TensorFlow's strategy of a single device."""
    # `tf.distribute.get_strategy` returns it where no scope is open.
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


def is_replicated(value: Any) -> bool:
    """Whether `value` is a variable with one copy per replica of ours."""
    return isinstance(value, tf.distribute.DistributedValues) and isinstance(
        getattr(value, "distribute_strategy", None), ReplicatedStrategy
    )
