"""Warns of values that replicas cannot make equal to one device's."""

import functools
import itertools
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import losses

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._common.errors import StrategyError
from keras_conflux._common.user_warnings import users_line
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import error_texts
from keras_conflux._compat import keras_models
from keras_conflux._compat.tensorflow_internals import is_own_variable
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._fit.numerics import late_writes
from keras_conflux._fit.numerics.writes import Writes
from keras_conflux._graphs import bodies
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._graphs import walks
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Part
from keras_conflux._replication.steps import Step
from keras_conflux._replication.steps import UserReductions
from keras_conflux._replication.strategy import is_replicated

_UNKNOWN = keras.layers.Lambda, losses.Circle, losses.Dice, losses.Tversky
_UNKNOWN_FUNCTIONS = losses.circle, losses.dice, losses.tversky


def warn_of_known_sizes(model: keras.Model, error: Exception) -> None:
    """Warns if a step is traced for the size of a shard and may need more.

    In its graph the number of samples is a constant like any other.
    """
    reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
    layers = keras_models.all_layers(model)
    given = keras.tree.flatten(getattr(model, "loss", None))
    named = {
        **{f"the layer {each.name}": each for each in layers},
        **{f"the metric {each.name}": each for each in model.metrics},
        **{
            f"the loss {getattr(each, '__name__', type(each).__name__)}": each
            for each in filter(None, map(losses.get, given))
        },
    }
    found = [name for name, part in named.items() if not _is_known(part)]
    more = f" or {len(found) - 3} more" if found[3:] else ""
    if found:
        warn(
            f"{model.name}: a step cannot be traced for any number of samples "
            f"({type(error).__name__}: {reason[:200]}). It is traced for "
            "the number of a replica, and no graph shows how "
            f"{', '.join(found[:3])}{more} computes from the samples. On "
            "several replicas a loss of one number is taken for a mean, "
            "samples are compared within a replica only, additions to a weight "
            "are summed, and values averaged. Results may differ from one "
            "device's. Write `keras.ops.shape(x)[0]` in place of `x.shape[0]`, "
            "and shapes with -1."
        )


def _is_known(part: Any) -> bool:
    is_unknown = isinstance(part, _UNKNOWN) or part in _UNKNOWN_FUNCTIONS
    return not is_unknown and keras_models.is_of_keras(part)


def warn_of_unknown_values(step: Step, key: str, what: str) -> None:
    """Warns of values that are taken for rows of samples, or for a mean.

    `what` names them, such as "the input of the layer 'dense'". Once a key.
    """
    here = tf.compat.v1.get_default_graph()
    if step.kinds.is_blind or here is not step.graph:
        return  # arguments of a graph inside of the step's are not known yet
    step.warn_once(
        key,
        f"the graph does not show how {what} is computed from the samples, as "
        "of Python code or a random order of samples. It is taken for one row "
        "for each sample, and a single number for a mean over samples. Where "
        "it depends on several samples, they are those of the replica's own "
        "part of the batch: write it with operations of Keras or TensorFlow, "
        "in an order that `keras.random` draws.",
    )


class UnclearLosses(Part):
    """The losses that may differ from one device's.

    A warning has told of them.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._losses: list[tf.Tensor] = []

    def add(self, loss: tf.Tensor) -> None:
        """Notes one."""
        self._losses.append(loss)

    def lead_to(self, value: tf.Tensor) -> bool:
        """Whether a value is computed of one, or one of it."""
        losses = [loss.op for loss in self._losses]
        return walks.depends_on([value.op], losses) or walks.depends_on(
            losses, [value.op]
        )


def warn_of_input(
    step: Step, metric: keras.metrics.Metric, value: tf.Tensor
) -> None:
    """Warns of an unknown input of a metric, unless a loss has told of it."""
    unclear = UnclearLosses.of(step)
    if not unclear.lead_to(value):
        what = f"an input of the metric {metric.name!r}"
        warn_of_unknown_values(step, f"metric {metric.name}", what)
        unclear.add(value)


def warn_of_plain_variables(step: Step) -> None:
    """Warns of variables of TensorFlow's own that a step writes.

    A `keras.Variable` has a copy on each replica, and a step's writes to it
    become one device's. A `tf.Variable` that is no part of one has a single
    copy in a process, which each of its replicas writes, or copies that nobody
    compares, if it was made in the strategy's scope.

    To be called where the first replica of a process has traced its step.
    """
    if replica_index() != 0 or replica_collectives().count == 1:
        return
    for handle, writes in effects.writes(step.graph):
        _check_shared(handle, writes, step)
    for variable, writes in plain_variables(step):
        is_single = step.compiled and not is_replicated(variable)
        if is_single and len(tf.distribute.get_strategy().devices) > 1:
            raise error_texts.cannot_compile(
                f"{variable.name!r} of shape {variable.shape} is on one device "
                "only, and XLA cannot read it on others. Make it a "
                "`keras.Variable(..., trainable=False)` that the model holds, "
                "as in `model.alpha`."
            )
        if writes and not _is_right(variable, writes, step):
            _warn_of(variable, writes[0], step)
    for weight, writes in _written_by_value(step):
        if not _is_right(state.backing(weight), writes, step):
            name = state.name_of(weight)
            step.warn_once(
                f"value of {name}",
                f"a step writes {name} by methods of its `value`, so each "
                "replica writes a value of its own samples. Call `assign`, "
                "`assign_add` or `assign_sub` of the variable itself.",
                writes[0],
            )


def _check_shared(handle: Any, writes: list[tf.Operation], step: Step) -> None:
    """Warns of tables and their kin, and raises where a call would hang."""
    if resources.container_of(handle) is not None or is_own_variable(handle):
        return
    are_several = len(tf.distribute.get_strategy().devices) > 1
    calls = [x for x in writes if bodies.graphs_of(x) and effects.waits(x)]
    if calls and are_several and not step.compiled:
        file, line = users_line(calls[0])
        raise StrategyError(
            f"{step.name}: a `tf.function` that is called in {file}, line "
            f"{line}, exchanges values between replicas, as for a metric or a "
            "`keras.Variable`, and uses a table or a `tf.Variable` that they "
            "share. TensorFlow runs such calls one after another, so they "
            "would wait for each other forever. Leave out `tf.function` there: "
            "the step is a graph already."
        )
    if resources.variable_behind(step.graph.capture(handle)) is not None:
        return
    found = effects.changes(step.graph, handle, writes)
    for change in [x for x in found if _repeats(x, step)][:1]:
        step.warn_once(
            f"resource {id(handle)}",
            f"each replica runs `{change.type}`, which changes a table, a "
            "queue or an iterator, and one device runs it once. Keep such "
            "state in a `keras.Variable`, draw batches outside of the step, "
            "or train with `run_eagerly=True`.",
            change,
        )


def _repeats(change: tf.Operation, step: Step) -> bool:
    """Whether each replica changes what one device changes once."""
    given = [x for x in change.inputs if x.dtype != tf.resource]
    inserts = change.type.startswith("LookupTableI")  # once more is the same
    is_same = inserts and all(tf.get_static_value(x) is not None for x in given)
    if is_same or change.type == "MutexLock":  # of this package
        return False
    # One device, which runs in turns, runs once what is equal in all of them.
    is_one = tf.distribute.get_strategy().communicator.size == 1
    return not is_one or any(step.kinds.of(x) != EQUAL for x in given)


def plain_variables(step: Step) -> list[tuple[Any, list[tf.Operation]]]:
    """Returns variables the model does not know, and what may write them."""
    kept = [*state.variables_of(step.model), *Writes.of(step).variables()]
    known = _by_handle(kept)
    found = [
        (handle, writes)
        for handle, writes in effects.writes(step.graph)
        if id(handle) not in known and not is_own_variable(handle)
    ]
    variables = resources.variables_behind([each for each, _ in found])
    return [(variables[id(x)], y) for x, y in found if id(x) in variables]


def _written_by_value(
    step: Step,
) -> list[tuple[keras.Variable, list[tf.Operation]]]:
    """Returns the variables of layers that a step writes without Keras."""
    found = state.stateful_objects(step.model)
    owners = [x for x in found if not isinstance(x, keras.optimizers.Optimizer)]
    noted = {*map(id, Writes.of(step).variables())}
    held = state.state_of(owners).values()
    others = [x for x in held if id(x) not in noted and not x.trainable]
    silent = _by_handle(others)
    return [
        (silent[id(handle)], writes)
        for handle, writes in effects.writes(step.graph)
        if writes and id(handle) in silent
    ]


def _by_handle(variables: Iterable[keras.Variable]) -> dict[int, Any]:
    """Returns variables by the ids of the handles of their copies."""
    return {id(x.handle): v for v in variables for x in state.copies(v)}


def _is_right(
    variable: tf.Variable, writes: list[tf.Operation], step: Step
) -> bool:
    """Whether each replica has a copy, and all write the same to it."""
    alone = len(tf.distribute.get_strategy().devices) == 1
    if step.model is None:
        return _is_right_in_loop(variable, writes, step, alone)
    if step.kinds.is_blind:
        return is_replicated(variable)  # an optimizer's, as far as one can see
    given = [x for write in writes for x in write.inputs]
    return (alone or is_replicated(variable)) and all(
        step.kinds.of(tensor) == EQUAL for tensor in given
    )


def _is_right_in_loop(
    variable: tf.Variable, writes: list[tf.Operation], step: Step, alone: bool
) -> bool:
    """Whether a user's step writes what may differ, or what does not."""
    callers: dict[Any, tf.Operation] = {}
    handle = step.graph.capture(state.own_copy(variable).handle)
    within = (effects.writes_within(x, handle, callers) for x in writes)
    found = [*itertools.chain.from_iterable(within)]
    if state.is_sum(variable):
        _note_sums(variable, found, callers, UserReductions.of(step))
        return all(map(late_writes.adds, found))
    given = [x for write in found[-1:] for x in write.inputs]
    values = [x for x in given if x.dtype != tf.resource]
    reductions = UserReductions.of(step)
    if not isinstance(variable, tf.distribute.DistributedValues):
        is_own = any(state.backing(each) is variable for each in reductions.own)
        made_of = walks.walked(values, walks.made_past(effects.waits, callers))
        alone &= {*map(id, reductions.own)}.isdisjoint(map(id, made_of))
        return is_own or alone or any(x.type.startswith("Rng") for x in found)
    if not state.is_mirrored(variable) or "local gradients" in step.warned:
        return True
    return not reductions.are_missing(values, callers)


def _note_sums(
    variable: tf.Variable,
    writes: list[tf.Operation],
    callers: Mapping[Any, tf.Operation],
    reductions: UserReductions,
) -> None:
    """Notes whether a metric counts the own part of a replica as one."""
    metric = variable.name.rpartition("/")[0]
    if any(map(late_writes.adds_one, writes)):
        reductions.counted.add(metric)
    given = [x for write in writes for x in write.inputs]
    values = [x for x in given if x.dtype != tf.resource]
    if reductions.are_missing(values, callers):
        reductions.of_parts.add(metric)


def _warn_of(variable: tf.Variable, write: tf.Operation, step: Step) -> None:
    described = (
        f"{variable.name!r} of shape {variable.shape} and dtype "
        f"{variable.dtype.name}"
    )
    has_copies = isinstance(variable, tf.distribute.DistributedValues)
    is_one = state.is_sum(variable) or not has_copies
    key = f"variable {id(variable)}" if is_one else "copies"
    tell = functools.partial(step.warn_once, key, operation=write)
    if write.type.startswith("Rng"):
        tell(
            "a step draws from a `tf.random.Generator`, whose state is the "
            f"`tf.Variable` {described}. The replicas of a process take turns "
            "with it, so they draw other numbers than one device and leave it "
            "with another state. Draw by `keras.random` with a "
            "`keras.random.SeedGenerator`."
        )
    elif step.model is not None:
        tell(
            f"a step writes the `tf.Variable` {described}. "
            "Each replica writes it, so one device may leave it with another "
            "value. Make it a `keras.Variable(..., trainable=False)`, or use "
            "`self.add_weight` of a layer: both are kept as on one device."
        )
    elif not is_one:
        tell(
            f"each replica writes to {variable.name!r} what it has computed of "
            "its own part of the batch, so the copies come apart until a step "
            "reduces them, and a file keeps the first one. Reduce it, as by "
            '`keras_conflux.allreduce("mean", layer.non_trainable_weights, '
            "weight=len(x))` after the call of a `BatchNormalization`."
        )
    elif has_copies:
        tell(
            f"each replica sets its copy of {variable.name!r}, and reading it "
            "adds up the copies of all, so a largest value or a moving average "
            "counts once for each. Only add to it in a step, or keep what a "
            "collective returns in a `keras.Variable` that `add_weight` has "
            "not made: `self.largest = keras.Variable(0.0)`."
        )
    else:
        tell(
            f"each replica writes {described}, of which a process has one. "
            "Make it in the strategy's scope, as by "
            "`keras_conflux.replicate(lambda: tf.Variable(...))`. Of a metric "
            "or a seed generator, write `keras_conflux.replicate(metric)`."
        )
