"""What a `PyDataset` holds, or says that it holds."""

import copy
from typing import Any

from keras_conflux._common import plain_values

_LARGEST_ATTRIBUTE = 8 * 2**20
"""How many bytes an array may have, to be saved."""
_STATE = "state_dict()"  # no attribute has such a name


def of(owner: Any) -> dict[str, Any]:
    """Returns copies of what a `PyDataset` holds, or says that it holds."""
    if not _tells_its_state(owner):
        return plain_values.attributes(owner, _LARGEST_ATTRIBUTE)
    state = copy.deepcopy(dict(owner.state_dict()))
    for name, value in state.items():
        if not plain_values.is_plain(value):
            raise TypeError(
                f"`{type(owner).__name__}.state_dict()` returns under {name!r} "
                "what cannot be saved. Expected: numbers, strings, arrays, and "
                "lists, tuples and dicts of them. Received: a "
                f"{type(value).__name__}. Of a NumPy generator, return "
                "`generator.bit_generator.state`."
            )
    return {_STATE: state}


def restore(owner: Any, attributes: dict[str, Any] | None) -> None:
    """Gives a `PyDataset` what it held."""
    if attributes is None:
        return
    if _tells_its_state(owner) != (_STATE in attributes):
        raise ValueError(
            f"`{type(owner).__name__}` has got or lost the methods "
            "`state_dict` and `load_state_dict` since the checkpoint was "
            "saved. Give the training the data that it had, or begin another "
            "one in another directory."
        )
    attributes = copy.deepcopy(attributes)
    if _STATE in attributes:
        owner.load_state_dict(attributes[_STATE])
    else:
        vars(owner).update(attributes)


def _tells_its_state(owner: Any) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
