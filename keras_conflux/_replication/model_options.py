"""Options of `replicate` that are of models alone."""

from typing import Any

import keras


def assert_models(target: Any, option: str, value: Any, says: str) -> None:
    """Raises unless a target of `replicate` is a model, or a tree of models.

    Args:
        target: Of `replicate`.
        option: The name of the option.
        value: What it was given.
        says: What it says of a model.

    Raises:
        TypeError: If the target is anything else.
    """
    leaves = keras.tree.flatten(target)
    if not leaves or not all(isinstance(x, keras.Model) for x in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            f"`{option}` says {says}, and has no meaning for: "
            f"{', '.join(kinds) or 'nothing'}. Write "
            f"`replicate(model, {option}={value!r})` for each model."
        )
