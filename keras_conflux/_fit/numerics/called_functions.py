"""Tells what a `tf.function` is given that a step calls.

A function is traced from within, where nobody can tell what its arguments are,
and what it writes is noted while it is traced. So each step traces it anew,
once for each way in which its arguments are made of the samples.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_tracing
from keras_conflux._replication import step_context


def call(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and notes the kinds of its arguments."""
    context = step_context.current_fit_step()
    if context is None or context.graph is None or tf.executing_eagerly():
        return original(function, *args, **kwargs)
    leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
    kinds = [context.kinds.of(leaf) for leaf in leaves if _is_argument(leaf)]
    known = context.called_functions
    key = id(function), tuple(kinds)
    if key not in known:
        own = tensorflow_tracing.untraced(function)
        known[key] = function, own  # the id is that of no other one
    with context.kinds.calling(kinds):
        return original(known[key][1], *args, **kwargs)


def _is_argument(leaf: Any) -> bool:
    """Whether a function has a placeholder for a leaf of its arguments."""
    return tf.is_tensor(leaf) or type(leaf).__module__ == "numpy"
