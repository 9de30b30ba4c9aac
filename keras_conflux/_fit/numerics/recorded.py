"""Lets gradient tapes see computations that no tape has recorded.

Operations that are copied into a graph, and the results of `tf.gradients` for
them, are not recorded. Here they are, with derivatives of any order.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def slopes_of(
    results: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor] | None = None,
    others: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor | None]:
    """Returns derivatives, which a tape can differentiate further.

    Args:
        results: Floating tensors that the graph has computed.
        sources: Floating tensors, by which they are differentiated.
        upstream: The derivatives by the results, or `None` for ones.
        others: Floating tensors of which the results are made besides.

    Returns:
        `None` for sources of which no result is made.
    """
    if upstream is None:
        upstream = [tf.ones_like(each) for each in results]
    # Each of the sources is held, also where one is computed of another.
    found = tf.gradients(
        [*results], [*sources], [*upstream], stop_gradients=[*sources]
    )
    given = [tf.convert_to_tensor(x) for x in found if x is not None]
    seen = iter(_recorded(given, [*sources, *others, *upstream]))
    return [None if each is None else next(seen) for each in found]


def _recorded(
    results: list[tf.Tensor], sources: list[tf.Tensor]
) -> list[tf.Tensor]:
    @tf.custom_gradient
    def passed(*_: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            return slopes_of(results, sources, upstream)

        return [tf.identity(each) for each in results], gradient

    return list(passed(*sources)) if results else []
