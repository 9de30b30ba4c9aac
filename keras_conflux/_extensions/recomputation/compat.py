"""The insides of Keras that recomputation needs."""

from types import SimpleNamespace
from typing import Any

from keras_conflux._compat.private_names import module_if_any

symbolic_scope = module_if_any("keras.src.backend.common.symbolic_scope")

_NO_SCOPE = SimpleNamespace(mode=None, layer_names=())


def scope_of(operation: Any) -> Any:
    """Returns the `keras.RematScope` that a layer was made in, or its like."""
    return getattr(operation, "_remat_mode", None) or _NO_SCOPE
