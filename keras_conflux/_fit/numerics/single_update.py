"""An update of all copies of variables that is computed once.

An optimizer asks its strategy to call a function with each copy of a variable.
Where a step runs once, on the whole batch, the function is called once, with
the variable: what it writes goes to all copies.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._cluster.processes import process_count
from keras_conflux._compat import keras_models
from keras_conflux._replication import state


def apply(
    original: Callable, optimizer: Any, grads: Any, trained: list[Any] | None
) -> Any:
    """Applies gradients as one device does.

    Args:
        original: The optimizer's `apply`.
        optimizer: Whose variables may have copies.
        grads: Those of the whole batch.
        trained: What they are for, unless the optimizer knows.
    """
    if trained and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(trained)
    _refuse_parts(optimizer)
    strategy = keras_models.optimizer_strategy(optimizer)
    keras_models.set_optimizer_strategy(optimizer, _OneDevice())
    try:
        return original(optimizer, grads, trained)
    finally:
        keras_models.set_optimizer_strategy(optimizer, strategy)


def _refuse_parts(optimizer: Any) -> None:
    """Raises where a process may not have all that has been accumulated."""
    if process_count() > 1 and keras_models.accumulators(optimizer):
        raise NotImplementedError(
            f"{optimizer.name}: with `run_eagerly=True` over several processes "
            "no gradients are accumulated, as each process has a part of "
            "them. Received: `gradient_accumulation_steps`. Run it in one "
            "process, or leave out one of both."
        )


class _OneDevice:
    """Stands for the strategy of an optimizer."""

    @property
    def extended(self) -> "_OneDevice":
        """Where TensorFlow has what a strategy does with variables."""
        return self

    def update(
        self,
        variable: Any,
        function: Callable,
        args: tuple = (),
        kwargs: dict | None = None,
        group: bool = True,
    ) -> Any:
        """Returns what a function returns that updates a variable.

        Of one whose copies add up to its value, the first copy gets all of it.
        """
        del group  # of one call there is nothing to group
        if state.is_sum(variable):
            state.set_sum(variable, variable.read_value())
            variable = state.copies(variable)[0]
        return function(variable, *args, **(kwargs or {}))
