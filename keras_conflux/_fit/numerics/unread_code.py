"""Warns of what a model computes where no graph shows how."""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication.step_context import StepContext

_UNKNOWN = (
    keras.layers.Lambda,
    keras.losses.Circle,
    keras.losses.Dice,
    keras.losses.Tversky,
)
_UNKNOWN_FUNCTIONS = (
    keras.losses.circle,
    keras.losses.dice,
    keras.losses.tversky,
)


def warn_of_known_sizes(model: keras.Model, error: Exception) -> None:
    """Warns if a step is traced for the size of a shard and may need more.

    In its graph the number of samples is a constant like any other.

    Args:
        model: Whose step it is.
        error: What it raises where the number of samples is not known.
    """
    reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
    layers = keras_models.all_layers(model)
    named = {
        **{f"the layer {each.name}": each for each in layers},
        **{f"the metric {each.name}": each for each in model.metrics},
        **{f"the loss {_name_of(each)}": each for each in _losses(model)},
    }
    found = [name for name, part in named.items() if not _is_known(part)]
    if found:
        warn(
            f"{model.name}: a step cannot be traced for any number of samples "
            f"({type(error).__name__}: {reason[:200]}). It is traced for that "
            "of a replica, where no graph shows how "
            f"{_listed(found)} computes from the samples. On several replicas "
            "a loss of one number is taken for a mean, samples are compared "
            "within a replica only, what is added to a weight is summed, and "
            "what is set is averaged. Results may differ from those of one "
            "device. Write `keras.ops.shape(x)[0]` in place of `x.shape[0]`, "
            "and shapes with -1."
        )


def warn_of_unknown_values(context: StepContext, key: str, what: str) -> None:
    """Warns of values that are taken for rows of samples, or for a mean.

    Args:
        context: Of the step.
        key: What is warned of, once in a step.
        what: The values, such as "what the layer 'dense' is given".
    """
    here = tf.compat.v1.get_default_graph()
    if context.kinds.is_blind or here is not context.graph:
        return  # what a graph inside of the step's is given is not known yet
    context.warn_once(
        key,
        f"the graph does not show how {what} is computed from the samples, as "
        "of Python code or a random order of samples. It is taken for one row "
        "for each sample, and a single number for a mean over samples. Where "
        "it depends on several samples, they are those of the replica's own "
        "part of the batch: write it with operations of Keras or TensorFlow, "
        "in an order that `keras.random` draws.",
    )


def has_told(value: tf.Tensor, context: StepContext) -> bool:
    """Whether a warning has told of a loss of which a value is computed."""
    return depends_on([value.op], [loss.op for loss in context.unclear_losses])


def _losses(model: keras.Model) -> list[Any]:
    given = keras.tree.flatten(getattr(model, "loss", None))
    return [keras.losses.get(each) for each in given if each is not None]


def _is_known(part: Any) -> bool:
    if isinstance(part, _UNKNOWN) or part in _UNKNOWN_FUNCTIONS:
        return False
    return keras_models.is_of_keras(part)


def _name_of(loss: Any) -> str:
    return getattr(loss, "__name__", None) or type(loss).__name__


def _listed(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" or {more} more" if more > 0 else "")
