"""Whether all processes hold the same variables and settings of a model.

They begin `fit` with the first replica's and update them alike. A change by one
process alone, as in a callback, is found here.
"""

import functools
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._cluster.agreement import Comparable
from keras_conflux._cluster.agreement import gather_if_different
from keras_conflux._cluster.failures import of_all_processes
from keras_conflux._cluster.processes import process_count
from keras_conflux._common.errors import ConfluxError
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._compat import keras_models
from keras_conflux._compat import replicated_extended
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.tensorflow_tracing import Grappler
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import outside_of_strategies
from keras_conflux._replication.strategy import is_replicated

_TOLERANCE = 1e-4
"""The part of its norm by which a variable of floats may differ. XLA sums in
other orders on each GPU, and hosts may round otherwise."""
_SCALARS = bool | int | float | None
_compared_too: Any = weakref.WeakKeyDictionary()
"""Of models: the variables given to `compare_too`, by the names of steps."""


def compare_too(
    model: keras.Model, step: str, variables: Sequence[tuple[Any, bool]]
) -> None:
    """Notes variables that a step of a model reads and the model does not know.

    The variables that its former trace had are forgotten. Of each, it is told
    whether the step writes it: then each process may have written its own.
    """
    _compared_too.setdefault(model, {})[step] = variables


def agree_on_settings(model: keras.Model, what: str) -> None:
    """Compares settings, but learning rates, which are sent to all.

    An error that all processes raise names the one that differs.
    """
    owners = list(state.stateful_objects(model))
    _agree(what, _settings(model, owners, with_rates=False), [])


def agree_on_state(
    model: keras.Model, what: str, has_variables: bool = True
) -> None:
    """Compares settings and, unless each process computes its own, variables.

    See `agree_on_settings`.
    """
    owners = list(state.stateful_objects(model))
    found: list[Any] = []
    if has_variables:
        found = _mirrored(state.variables_of(model, owners)) + _others(model)
    _agree(what, _settings(model, owners), _comparable(found))


def _agree(what: str, settings: list[Any], variables: list[Any]) -> None:
    own = Comparable([settings, _sums(variables)])
    told = gather_if_different(what, own)
    if told is not None:
        _refuse_settings(what, [each[0] for each in told])
        _refuse_variables(what, variables, [each[1] for each in told])


def _settings(
    model: keras.Model, owners: list[Any], with_rates: bool = True
) -> list[Any]:
    found: list[Any] = [
        [f"`trainable` of {layer.name}", layer.trainable]
        for layer in keras_models.all_layers(model)
    ]
    for owner in owners:
        if isinstance(owner, keras.optimizers.Optimizer):
            found += _settings_of(owner, with_rates)
    return found


def _others(model: keras.Model) -> list[Any]:
    """Returns the variables that steps read and do not write."""
    by_step = _compared_too.get(model, {})
    noted = [x for each in by_step.values() for x in each]
    written = {id(variable) for variable, is_written in noted if is_written}
    found = {id(variable): variable for variable, _ in noted}
    return [found[key] for key in found if key not in written]


def agree_on_assigned(
    what: str, variables: Callable[[], list[Any]], of: Any = None
) -> None:
    """Raises in all processes unless all have assigned alike outside of steps.

    If all have done so since they came here last, this is one message. If not,
    these variables are compared, of which one that differs is named.
    """
    if process_count() == 1:
        return
    action = what if of is None else f"{what}, of {of}"
    told = gather_if_different(action, Comparable(sums_of_assigned()))
    compare_assigned(what, told is None, variables)


def sums_of_assigned() -> list[list[float]]:
    """Returns sums of what was assigned since it was compared."""
    if process_count() == 1:
        return []
    return _sums(_comparable(_mirrored(replicated_extended.assigned())))


def compare_assigned(
    what: str, are_alike: bool, variables: Callable[[], list[Any]]
) -> None:
    """Raises if variables differ where the sums are not alike."""
    if are_alike:
        replicated_extended.note_compared()
        return
    compared = _comparable(_mirrored(variables()))
    what = f"{what}, after assignments"
    told = gather_if_different(what, Comparable(_sums(compared)))
    if told is not None:
        _refuse_variables(what, compared, told)
    replicated_extended.note_compared(map(state.backing, compared))


def _mirrored(variables: list[Any]) -> list[Any]:
    return [
        variable
        for variable in variables
        if is_replicated(state.backing(variable))
        and state.is_mirrored(variable)
    ]


def _refuse_settings(what: str, told: list[Any]) -> None:
    _refuse_lengths(what, "layers and settings", told)
    for each in zip(*told, strict=True):
        values = [value for _, value in each]
        if len(set(map(repr, values))) > 1:
            raise _differs(what, each[0][0], values)


def _refuse_variables(what: str, variables: list[Any], told: list[Any]) -> None:
    """Raises if a variable differs by more than roundings."""
    _refuse_lengths(what, "variables", told)
    for variable, each in zip(variables, zip(*told, strict=True), strict=True):
        if not _are_alike(each):
            norms = [norm or total for total, norm in each]
            shown = [f"of {'norm ' * bool(n)}{n:.6g}" for n in norms]
            raise _differs(what, state.name_of(variable), shown)


def _comparable(variables: list[Any]) -> list[Any]:
    """Returns the variables that hold numbers."""
    return [
        variable
        for variable in variables
        if (dtype := state.backing(variable).dtype).is_numpy_compatible
        and dtype != tf.string
    ]


def _settings_of(optimizer: Any, with_rates: bool) -> list[list[Any]]:
    """Returns the settings of an optimizer, which are plain attributes."""
    found = [
        (key, value)
        for key, value in vars(optimizer).items()
        if isinstance(value, _SCALARS) and not key.startswith("_")
    ]
    if with_rates:
        rate: Any = keras.ops.convert_to_numpy(optimizer.learning_rate)
        found.append(("learning_rate", float(rate)))
    return [
        [f"`{key}` of {optimizer.name}", value]
        for key, value in found
        if key not in ("name", "built")
    ]


def _differs(what: str, name: str, values: Sequence[Any]) -> ConfluxError:
    listed = ", ".join(f"{v} in process {i}" for i, v in enumerate(values))
    error = ReplicaMismatchError(
        f"The processes do not hold the same at {what}: {name} is {listed}. "
        "All processes have to set the same learning rate, settings and "
        "weights, as by a callback that runs in each of them. What only one "
        "process shall do, such as writing a file, must not change the model."
    )
    return of_all_processes(error)


def _are_alike(each: Sequence[tuple[float, float]]) -> bool:
    """Whether sums and norms of a variable agree up to roundings."""
    sums, norms = np.asarray(each, "float64").T
    if np.isnan(sums).any() or np.isinf(sums).any():
        return bool(np.array_equal(sums, np.roll(sums, 1), equal_nan=True))
    gap = max(np.ptp(sums), np.ptp(norms))
    return bool(gap <= _TOLERANCE * norms.max())


def _refuse_lengths(what: str, of: str, told: list[Any]) -> None:
    counts = [len(each) for each in told]
    if len(set(counts)) > 1:
        raise _differs(what, f"the number of {of}", counts)


def _sums(variables: list[Any]) -> list[list[float]]:
    """Returns the sum and the norm of the first copy of each variable."""
    if not variables:
        return []
    copies = [state.copies(variable)[0] for variable in variables]
    program = _summing(
        tuple((copy.device, copy.shape, copy.dtype) for copy in copies)
    )
    found: Any = program([copy.handle for copy in copies])
    sums, halves = found.numpy().T
    return np.stack([sums, np.sqrt(2 * halves)], 1).tolist()


@functools.lru_cache(maxsize=16)
def _summing(
    specs: tuple[tuple[str, tf.TensorShape, tf.DType], ...],
) -> Callable[[list[tf.Tensor]], tf.Tensor]:
    """Returns a program that is given handles of variables, and holds none."""

    def sums(handles: list[tf.Tensor]) -> tf.Tensor:
        pairs = []
        for handle, (device, shape, dtype) in zip(handles, specs, strict=True):
            with tf.device(device):
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
                value.set_shape(shape)
                pairs.append(_sum_and_squares(value))
        with tf.device(specs[0][0]):
            return tf.stack(pairs)

    handles = [tf.TensorSpec([], tf.resource)] * len(specs)
    return outside_of_strategies(
        lambda: tensorflow_tracing.concrete_function(
            sums, [handles], Grappler.ALL
        )
    )


def _sum_and_squares(value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of a tensor, and half of the sum of its squares."""
    if not value.dtype.is_floating:
        total = tf.reduce_sum(tf.cast(value, tf.float64))
        return tf.stack([total, tf.zeros_like(total)])
    if value.dtype.size < 4:
        value = tf.cast(value, tf.float32)
    pair = tf.stack([tf.reduce_sum(value), tf.nn.l2_loss(value)])
    return tf.cast(pair, tf.float64)
