"""What callbacks hold, and how it is given back."""

from typing import Any

from keras_conflux._common import plain_values
from keras_conflux._common.stored_arrays import Arrays
from keras_conflux._compat import keras_callbacks

_SET_ANEW = {"params", "min_delta"}
"""Attributes that Keras sets in each training, `min_delta` by its old value."""


class CallbackStates:
    """Tells which attributes of callbacks have changed while they trained.

    What a script says, such as a `patience`, is obeyed as it is now.

    Args:
        callbacks: After their `on_train_begin`.
    """

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self._before = [_held_by(each) for each in callbacks]

    def changed(self, arrays: Arrays) -> list[list[Any]]:
        """Returns `[class, values]` for each callback.

        Args:
            arrays: Gets the arrays among the values.
        """
        found = []
        for callback, before in zip(self._callbacks, self._before, strict=True):
            values = {
                name: value
                for name, value in _held_by(callback).items()
                if name not in before
                or not plain_values.are_equal(value, before[name])
            }
            if hasattr(callback, "monitor_op"):
                values["monitor_op"] = callback.monitor_op is not None
            encoded = plain_values.encode(values, arrays)
            found.append([type(callback).__name__, encoded])
        return found

    def restore(self, saved: list[list[Any]], arrays: Arrays) -> None:
        """Gives the callbacks what they had."""
        _assert_same(self._callbacks, saved)
        for callback, (_, encoded) in zip(self._callbacks, saved, strict=True):
            values = plain_values.decode(encoded, arrays)
            if values.pop("monitor_op", False) and callback.monitor_op is None:
                keras_callbacks.set_monitor(callback)
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(values)
            else:
                vars(callback).update(values)


def _assert_same(callbacks: list[Any], saved: list[list[Any]]) -> None:
    """Raises `ValueError` if the callbacks are not those that were saved."""
    here = [type(each).__name__ for each in callbacks]
    there = [name for name, _ in saved]
    if here != there:
        raise ValueError(
            f"The checkpoint was saved with the callbacks {there}, and the "
            f"call has {here}. What they hold belongs to the training: pass "
            "the same ones in the same order, or use another directory."
        )


def _held_by(callback: Any) -> dict[str, Any]:
    if hasattr(callback, "state_dict"):
        return dict(callback.state_dict())
    held = plain_values.attributes(callback)
    return {k: v for k, v in held.items() if k not in _SET_ANEW}
