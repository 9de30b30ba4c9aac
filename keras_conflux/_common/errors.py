"""The errors and warnings that are this package's own.

ConfluxError
├── ReplicaMismatchError   also a ValueError
├── StrategyError          also a RuntimeError
├── DeviceError            also a ValueError
└── StepTimeoutError       also a TimeoutError
ConfluxWarning             a UserWarning
"""


class ConfluxError(Exception):
    """The base of all errors that are this package's own.

    What is wrong with an argument's type or value is a plain `TypeError` or
    `ValueError`, as in Keras.

    Example:
        ```python
        try:
            kc.replicate(model, devices=[0, 9])
        except kc.ConfluxError as error:
            print(error)
        ```
    """


class ReplicaMismatchError(ConfluxError, ValueError):
    """Replicas disagree where they must be alike.

    Raised when the trees given to a collective differ in structure, shape or
    dtype, when replicas make different collective calls, and by
    `assert_in_sync` when the copies of a variable differ.
    """


class StrategyError(ConfluxError, RuntimeError):
    """An object belongs to another strategy, or to none where one is needed."""


class DeviceError(ConfluxError, ValueError):
    """A device does not exist, repeats, is of another kind, or comes late.

    It comes late when TensorFlow has started with other settings already.
    """


class StepTimeoutError(ConfluxError, TimeoutError):
    """A step has not ended in time; some replicas still wait.

    The program cannot be stopped. End the process.
    """


class ConfluxWarning(UserWarning):
    """The category of all warnings of this package.

    Example:
        ```python
        warnings.filterwarnings("error", category=kc.ConfluxWarning)
        ```
    """
