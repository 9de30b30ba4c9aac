"""What `merge_call` returns is computed by the user from all replicas."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._replication import step_context


def merge_call(
    original: Callable, replica: Any, *args: Any, **kwargs: Any
) -> Any:
    """Says that no replica's graph tells what is returned.

    It is traced in the midst of the first replica's step, from the values of
    all, so each replica would read something else in it.
    """
    result = original(replica, *args, **kwargs)
    context = step_context.current_fit_step()
    if context is not None:
        leaves = tf.nest.flatten(result, expand_composites=True)
        context.kinds.mark_merged(
            [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        )
    return result
