"""Tells what a `tf.function` is given that a step calls.

A function is traced from within, where nobody can tell what its arguments are.
One trace may serve several calls, which then have to agree.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._replication import step_context


def call(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and notes the kinds of its arguments."""
    context = step_context.current_fit_step()
    if context is None or context.graph is None or context.kinds.is_blind:
        return original(function, *args, **kwargs)
    given = [
        context.kinds.of(leaf)
        for leaf in tf.nest.flatten((args, kwargs), expand_composites=True)
        if _is_argument(leaf)
    ]
    with context.kinds.calling(function, given) as is_as_traced:
        result = original(function, *args, **kwargs)
    if not is_as_traced:
        name = getattr(function, "__name__", str(function))
        context.warn_once(
            f"function {name}",
            f"the step calls the `tf.function` {name!r} several times, with "
            "arguments that are made of the samples in different ways, and "
            "one trace serves all calls. What the function differentiates, "
            "averages or writes is taken to be as in the first call. Call the "
            "Python function instead, without `tf.function`.",
        )
    return result


def _is_argument(leaf: Any) -> bool:
    """Whether a function has a placeholder for a leaf of its arguments."""
    return tf.is_tensor(leaf) or type(leaf).__module__ == "numpy"
