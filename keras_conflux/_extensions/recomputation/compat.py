"""The insides of Keras that recomputation needs."""

from typing import Any

import keras

from keras_conflux._compat.private_names import module_if_any

symbolic_scope = module_if_any("keras.src.backend.common.symbolic_scope")


def scope_of(operation: Any) -> Any:
    """Returns the `keras.RematScope` that a layer was made in, or its like."""
    make: Any = keras.RematScope
    return getattr(operation, "_remat_mode", None) or make(None)
