"""The insides of Keras that recomputation needs."""

from typing import Any

from keras_conflux._compat.private_names import module_if_any

symbolic_scope = module_if_any("keras.src.backend.common.symbolic_scope")


def mode_of(operation: Any) -> str | None:
    """Returns the mode of the `keras.RematScope` that a layer was made in."""
    mode = getattr(operation, "_remat_mode", None)
    return mode.mode if mode else None
