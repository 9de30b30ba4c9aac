"""The errors that are this package's own."""


class ReplicaMismatchError(ValueError):
    """Replicas disagree where they must be alike.

    Raised when the trees given to a collective differ in structure, shape or
    dtype, when replicas make different collective calls, and by
    `assert_in_sync` when the copies of a variable differ.
    """


class StrategyError(RuntimeError):
    """An object belongs to another strategy, or to none where one is needed."""


class DeviceError(ValueError):
    """A device does not exist, repeats, is of another kind, or comes late."""


class StepTimeoutError(Exception):
    """A step has not ended in time; some replicas still wait."""
