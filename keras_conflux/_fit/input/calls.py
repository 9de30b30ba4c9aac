"""Calls of Keras' `fit`, `evaluate` and `predict`: callbacks and observers.

By default nobody observes calls of `fit`, and the batches that epochs draw.
`observers` gets somebody else, once.
"""

import dataclasses
import inspect
from collections.abc import Callable
from collections.abc import Generator
from typing import Any

import keras

from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_models


class KerasCall:
    """A call whose arguments are bound, and may be changed before it is run."""

    def __init__(
        self, name: str, method: Callable, model: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.model = model
        self.name = name
        self._original = method
        # A wrapper that somebody has put in place may take any arguments.
        own = [vars(x)[name] for x in keras.Model.__mro__ if name in vars(x)]
        try:
            bind = inspect.signature(own[-1]).bind
            self._bound = bind(model, *args, **kwargs)
        except TypeError:  # which Keras raises in its own words
            with errors_reported_to_all(f"{self.name} of {model.name}"):
                method(model, *args, **kwargs)
            raise
        self._bound.apply_defaults()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of Keras' method, by name."""
        return self._bound.arguments

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks, in one list."""
        given = self.arguments["callbacks"]
        if isinstance(given, keras.callbacks.CallbackList):
            given = given.callbacks
        return keras.tree.flatten(given or [])

    @callbacks.setter
    def callbacks(self, callbacks: list[Any]) -> None:
        given = self.arguments["callbacks"]
        if isinstance(given, keras.callbacks.CallbackList):
            given.callbacks = callbacks
        else:
            self.arguments["callbacks"] = callbacks

    def run(self) -> Any:
        """Calls Keras' method."""
        # As a user would: a wrapper may look for what is given to it.
        known, every = self._bound.signature.parameters, self.arguments.items()
        given = {k: v for k, v in every if v is not known[k].default}
        others = given.pop("kwargs", {})
        return self._original(given.pop("self"), **given, **others)


class LogSource(keras.callbacks.Callback):
    """A callback that adds to the logs, and that `fit` calls before others.

    Keras hands one dictionary of logs to all callbacks in turn. Later ones see
    the entries that one of them adds: so do `CSVLogger`, `History`, the
    progress bar. Where several processes train together, all have it, or none.
    """


def log_sources_in_words(callbacks: list[Any]) -> str:
    """Returns how messages say which callbacks add to the logs."""
    sources = [each for each in callbacks if isinstance(each, LogSource)]
    return "".join(f" with {type(each).__name__}" for each in sources)


def needs_every_batch(callback: Any) -> bool:
    """Whether a callback has something to do at each batch."""
    return any(_overrides(callback, hook) for hook in _HOOKS)


def may_steer_data(callback: Any) -> bool:
    """Whether the user's code runs at each batch, and may steer data."""
    return any(runs_users_code(callback, hook) for hook in _HOOKS)


def runs_users_code(callback: Any, hook: str) -> bool:
    """Whether a hook of a callback is neither Keras' nor this package's."""
    owner = _owner(callback, hook)
    package = None if owner is None else owner.__module__.split(".")[0]
    return package not in ("keras", "keras_conflux")


_HOOKS = [
    f"on_{kind}batch_{when}"
    for kind in ("", "train_", "test_")
    for when in ("begin", "end")
]


def _overrides(callback: Any, hook: str) -> bool:
    owner = _owner(callback, hook)
    if owner is None:
        return True
    if owner in (
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.BackupAndRestore,
    ):
        return getattr(callback, "save_freq", 1) not in ("epoch", False)
    if owner is keras.callbacks.TensorBoard:
        return keras_models.tensorboard_needs_batches(callback)
    plain = keras.callbacks.Callback, keras.callbacks.ProgbarLogger
    return owner not in plain


def _owner(callback: Any, hook: str) -> Any:
    """Returns the class that has a hook; `None` for the callback itself."""
    if hook in vars(callback):  # as LambdaCallback sets it
        return None
    return next(
        (kind for kind in type(callback).__mro__ if hook in vars(kind)),
        keras.callbacks.Callback,
    )


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The steps of an epoch, as Keras enumerates them."""

    steps: Generator[tuple, None, None]
    """Yields `(first step, last step, source)`."""
    skipped: int = 0
    """How many batches of the epoch have been trained before."""
    note_batch: Callable[[int, Tree], None] | None = None
    """Is told the last step of an execution and its batch, before it runs."""


class EpochObserver:
    """Follows the epochs of one epoch iterator of Keras: here, nothing."""

    def begins(self, steps: Generator[tuple, None, None]) -> Epoch:
        """Returns the epoch that is to be run."""
        return Epoch(steps)


class FitObserver:
    """Follows calls of `fit`: here, nothing."""

    def fit(self, call: KerasCall, run: Callable[[], Any]) -> Any:
        """Returns the result of a call of `fit`."""
        return run()

    def follow(self, iterator: Any, make: Callable[[], None]) -> EpochObserver:
        """Has Keras make an epoch iterator, and returns its observer."""
        make()
        return EpochObserver()


observers = [FitObserver()]
"""The last one follows all calls of `fit`."""
