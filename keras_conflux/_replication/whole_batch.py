"""Which strategy's devices a step that runs once keeps its variables on.

With `run_eagerly=True` a step runs once, on the whole batch, outside of all
strategies: it is that of one device. What it reads is the first copy of a
variable, and what it writes goes to all copies.
"""

import contextlib
import contextvars
from collections.abc import Iterator

from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import in_replica

_strategy: contextvars.ContextVar[ReplicatedStrategy | None] = (
    contextvars.ContextVar("strategy_of_whole_batch", default=None)
)


@contextlib.contextmanager
def entered(strategy: ReplicatedStrategy) -> Iterator[None]:
    """Says that a step runs on the whole batch in this thread.

    Args:
        strategy: What replicates the model.
    """
    token = _strategy.set(strategy)
    try:
        yield
    finally:
        _strategy.reset(token)


def current() -> ReplicatedStrategy | None:
    """Returns what replicates the model whose step runs once here, if any."""
    return None if in_replica() else _strategy.get()
