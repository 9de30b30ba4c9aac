"""Whether all processes hold the same variables and settings of a model.

They begin `fit` with the first replica's and update them alike. A change by one
process alone, as in a callback, is found here.
"""

import math
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
from keras_conflux._replication import state
from keras_conflux._replication.strategy import is_replicated

_TOLERANCE = 1e-4
"""The part of its norm by which a variable of floats may differ. XLA sums in
other orders on each GPU, and hosts may round otherwise."""
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


def agree_on_state(
    model: keras.Model, what: str, has_variables: bool = True
) -> None:
    """Compares settings and, unless each process computes its own, variables.

    An error that all processes raise names what differs.
    """
    owners = list(state.stateful_objects(model))
    found = _mirrored(state.variables_of(model, owners))
    if has_variables:
        found += _others(model)
    else:
        found = [*filter(state.is_in_parts, found)]
    _agree(what, found, _settings(model, owners))


def _agree(what: str, variables: list[Any], settings: Any = ()) -> None:
    names = [name for name, _ in settings] + [*map(state.name_of, variables)]
    own = [value for _, value in settings] + _sums(variables)
    told = gather_if_different(what, Comparable(own))
    if told is None:
        return
    counts = [len(each) for each in told]
    if len(set(counts)) > 1:
        raise _differs(what, "the number of settings and variables", counts)
    for name, each in zip(names, zip(*told, strict=True), strict=True):
        if not _are_alike(each):
            raise _differs(what, name, each)


def _settings(model: keras.Model, owners: list[Any]) -> list[tuple[str, Any]]:
    """Returns the settings of layers, and the scalars of optimizers."""
    found: list[tuple[str, Any]] = [
        (f"`trainable` of {layer.name}", layer.trainable)
        for layer in keras_models.all_layers(model)
    ]
    for owner in owners:
        if isinstance(owner, keras.optimizers.Optimizer):
            found += [
                (f"`{key}` of {owner.name}", value)
                for key, value in vars(owner).items()
                if isinstance(value, int | float | None)
                and not key.startswith("_")
                and key != "built"
            ]
    return found


def _others(model: keras.Model) -> list[Any]:
    """Returns the variables that steps read and do not write."""
    by_step = _compared_too.get(model, {})
    noted = [x for each in by_step.values() for x in each]
    written = {id(variable) for variable, is_written in noted if is_written}
    return [v for v, _ in noted if id(v) not in written and _holds_numbers(v)]


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
    return _sums(_mirrored(replicated_extended.assigned()))


def compare_assigned(
    what: str, are_alike: bool, variables: Callable[[], list[Any]]
) -> None:
    """Raises if variables differ where the sums are not alike."""
    if are_alike:
        replicated_extended.note_compared()
        return
    compared = _mirrored(variables())
    _agree(f"{what}, after assignments", compared)
    replicated_extended.note_compared(map(state.backing, compared))


def _mirrored(variables: list[Any]) -> list[Any]:
    """Returns the variables with equal copies, which hold numbers."""
    return [
        variable
        for variable in variables
        if is_replicated(state.backing(variable))
        and state.is_mirrored(variable)
        and _holds_numbers(variable)
    ]


def _holds_numbers(variable: Any) -> bool:
    dtype = state.backing(variable).dtype
    return dtype.is_numpy_compatible and dtype != tf.string


def _differs(what: str, name: str, values: Sequence[Any]) -> ConfluxError:
    listed = ", ".join(
        f"{_shown(each)} in process {i}" for i, each in enumerate(values)
    )
    error = ReplicaMismatchError(
        f"The processes do not hold the same at {what}: {name} is {listed}. "
        "All processes have to set the same learning rate, settings and "
        "weights, as by a callback that runs in each of them. What only one "
        "process shall do, such as writing a file, must not change the model."
    )
    return of_all_processes(error)


def _shown(value: Any) -> str:
    """Returns a setting, or the norm or else the sum of a variable."""
    if not isinstance(value, list):
        return str(value)
    total, norm = value
    return f"of norm {norm:.6g}" if norm else f"of {total:.6g}"


def _are_alike(each: Sequence[Any]) -> bool:
    """Whether settings are equal, or sums and norms up to roundings."""
    if not all(isinstance(value, list) for value in each):
        return len(set(map(repr, each))) == 1
    sums, norms = np.asarray(each, "float64").T
    if np.isnan(sums).any() or np.isinf(sums).any():
        return bool(np.array_equal(sums, np.roll(sums, 1), equal_nan=True))
    gap = max(np.ptp(sums), np.ptp(norms))
    return bool(gap <= _TOLERANCE * norms.max())


def _sums(variables: list[Any]) -> list[Any]:
    """Returns the sum and the norm of each variable's first copy.

    A variable in parts has the sums of the value that it was assigned last.
    """
    found = [getattr(state.backing(x), "assigned", None) for x in variables]
    where = [i for i, each in enumerate(found) if each is None]
    copies = [state.copies(variables[i])[0] for i in where]
    if copies:
        with tf.device(copies[0].device):
            values = [copy.read_value() for copy in copies]
            for i, sums in zip(where, sums_of(values), strict=True):
                found[i] = sums
    return found


def sums_of(values: Sequence[tf.Tensor]) -> list[list[float]]:
    """Returns the sum and the norm of each tensor."""
    found: Any = _sums_and_squares(values)
    return [[total, math.sqrt(2 * half)] for total, half in found.numpy()]


@tensorflow_tracing.without_retracing_warning
@tf.function(autograph=False)
def _sums_and_squares(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of each tensor, and half of the sum of its squares."""
    pairs = []
    for value in values:
        if value.dtype.is_floating:
            wide = tf.cast(value, tf.float32) if value.dtype.size < 4 else value
            pairs += [tf.reduce_sum(wide), tf.nn.l2_loss(wide)]
        else:
            pairs += [tf.reduce_sum(tf.cast(value, tf.float64)), 0.0]
    return tf.reshape([tf.cast(each, tf.float64) for each in pairs], [-1, 2])
