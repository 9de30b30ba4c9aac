"""The errors and warnings that are this package's own, and notes on errors.

ConfluxError
├── ReplicaMismatchError   also a ValueError
├── StrategyError          also a RuntimeError
├── DeviceError            also a ValueError
├── ClusterError           also a ValueError
├── ProcessError           also a RuntimeError
└── StepTimeoutError       also a TimeoutError
ConfluxWarning             a UserWarning
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any


class ConfluxError(Exception):
    """The base of all errors that are this package's own.

    Wrong arguments raise a plain `TypeError` or `ValueError`, as in Keras.

    Example:
        ```python
        try:
            kc.replicate(build_model(), devices=["GPU:0", "GPU:99"])
        except kc.ConfluxError as error:
            print(error)
        ```
    """


class ReplicaMismatchError(ConfluxError, ValueError):
    """Replicas disagree where they must be alike.

    Raised when the trees given to a collective differ in structure, shape or
    dtype, when replicas make different collective calls, and by
    `assert_in_sync` when the copies of a variable differ.

    Example:
        ```python
        try:
            kc.allreduce("sum", tf.zeros(2), tf.zeros(3))
        except kc.ReplicaMismatchError as error:
            print(error)  # names the leaf and both replicas
        ```
    """


class StrategyError(ConfluxError, RuntimeError):
    """An object belongs to another strategy, or to none where one is needed.

    Example:
        ```python
        model = kc.replicate(build_model(), devices=[0, 1])
        try:
            kc.replicate(model, devices=[2, 3])
        except kc.StrategyError:
            kc.replicate(kc.unreplicate(model), devices=[2, 3])
        ```
    """


class DeviceError(ConfluxError, ValueError):
    """A device does not exist, repeats, is of another kind, or comes late.

    It comes late when TensorFlow has started with other settings already.

    Example:
        ```python
        try:
            strategy = kc.replicate(devices="gpu")
        except kc.DeviceError:
            strategy = kc.replicate(devices="cpu")
        ```
    """


class ProcessError(ConfluxError, RuntimeError):
    """Another process has failed, has ended, or does something else.

    The processes cannot train together any more, and there is no way back:
    save the values that are worth saving, and end the process.

    Example:
        ```python
        model = kc.replicate(build_model())
        model.compile("sgd", "mse")
        try:
            model.fit(dataset, verbose=0)
        except kc.ProcessError as error:
            print(error)  # names the process, and what it has raised
            raise
        ```
    """


class ClusterError(ConfluxError, ValueError):
    """It is unclear which processes train together, or which one this is.

    Raised when the addresses of the processes are wrong or incomplete, or a
    launcher's environment variables are incomplete or contradict each other.

    Example:
        ```python
        try:
            kc.replicate(build_model())
        except kc.ClusterError as error:
            print(error)  # names the variables, and what to type
        ```
    """


class StepTimeoutError(ConfluxError, TimeoutError):
    """A step has not ended in time; some replicas still wait.

    The program cannot be stopped. End the process.

    Example:
        ```python
        import os

        model = kc.replicate(build_model())
        model.compile("sgd", "mse")
        try:
            model.fit(dataset, verbose=0)
        except kc.StepTimeoutError as error:
            print(error, flush=True)
            os._exit(1)
        ```
    """


class ConfluxWarning(UserWarning):
    """The category of all warnings of this package.

    Example:
        ```python
        import warnings

        warnings.filterwarnings("error", category=kc.ConfluxWarning)
        ```
    """


AddNote = Callable[[BaseException, Any, bool], None]
_adding: list[AddNote] = []
add_notes_by = _adding.append
"""Has a function add notes from now on. See `add_notes`."""


def add_notes(
    error: BaseException, model: Any = None, keeps_activations: bool = True
) -> None:
    """Has notes added to an error that is about to be raised.

    They are told the model whose step has raised it, `None` for a function of
    the user's own, and whether it is of a graph that may have gradients.
    """
    for add in _adding:
        add(error, model, keeps_activations)


@contextlib.contextmanager
def with_notes(model: Any, keeps_activations: bool = True) -> Iterator[None]:
    """Adds notes to errors raised while a model's step is made or runs."""
    try:
        yield
    except Exception as error:
        add_notes(error, model, keeps_activations)
        raise
