"""The models that are in `fit`, `evaluate` or `predict` at the moment.

The loop of such a call keeps the functions and the iterator that it began with,
so its model cannot change its devices meanwhile: that is a `StrategyError`.
"""

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_models
from keras_conflux._replication import state
from keras_conflux._replication import traced_functions

_calls: list[tuple[Any, str]] = []
"""The models and their calls. One may be in `evaluate` within `fit`."""


@contextlib.contextmanager
def running(model: Any, call: str) -> Iterator[None]:
    """Marks a model as one that is in a call."""
    _calls.append((model, call))
    try:
        yield
    finally:
        _calls.remove((model, call))


def assert_not_running(models: Iterable[Any], change: str) -> None:
    """Raises if a model that is to have other devices is running."""
    ids = set(map(id, models))
    for model, call in list(_calls):
        if id(model) in ids:
            raise _refusal(model, call, change)


def assert_not_held(owners: Iterable[Any], change: str) -> None:
    """Raises if a running model is, or holds, an object to be put back."""
    ids = set(map(id, owners))
    for model, call in list(_calls):
        if any(id(each) in ids for each in state.stateful_objects(model)):
            raise _refusal(model, call, change)


def assert_not_read(variables: Iterable[Any], change: str) -> None:
    """Raises if a running model that is not replicated reads variables."""
    plain = [x for x in list(_calls) if keras_models.strategy_of(x[0]) is None]
    if not plain:
        return
    handles = {id(copy.handle) for v in variables for copy in state.copies(v)}
    changed = set(map(id, variables))
    for model, call in plain:
        is_its_own = any(id(v) in changed for v in state.variables_of(model))
        if is_its_own or traced_functions.read_by_functions(model, handles):
            raise _refusal(model, call, change)


def plain_models() -> list[Any]:
    """Returns the models in a call that are not replicated."""
    return [m for m, _ in list(_calls) if keras_models.strategy_of(m) is None]


def _refusal(model: Any, call: str, change: str) -> StrategyError:
    return StrategyError(
        f"`{change}` was called while {model.name!r} is in `{call}`, which "
        f"goes on with the devices that it began with. Call it before or after "
        f"`{call}`; to stop between two epochs, end `fit` and go on with "
        "`fit(..., initial_epoch=n)`."
    )
