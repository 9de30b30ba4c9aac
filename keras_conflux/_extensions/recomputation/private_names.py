"""Names inside of Keras and TensorFlow that recomputation needs."""

from keras_conflux._compat.private_keras_names import TF_OPS
from keras_conflux._compat.private_names import PrivateName

_VARIABLE = "keras.src.backend.common.variables:Variable"
_LAYER = "keras.src.layers.layer:Layer"

REMAT = PrivateName(f"{TF_OPS}.core:remat", "f")
VARIABLE_VALUE = PrivateName(f"{_VARIABLE}.value", None, ("_value",))
VARIABLE_ASSIGN = PrivateName(
    f"{_VARIABLE}.assign", None, ("_convert_to_tensor", "_dtype", "add_update")
)
REMATERIALIZED_CALL = PrivateName(
    f"{_LAYER}.rematerialized_call",
    "self, layer_call, args, kwargs",
    ("_remat_mode", "mode", "activation"),
)

NAMES = (
    REMAT,
    VARIABLE_VALUE,
    VARIABLE_ASSIGN,
    REMATERIALIZED_CALL,
    PrivateName(f"{_LAYER}._flatten_layers", "self, include_self, recursive"),
    PrivateName(f"{_LAYER}._get_call_context", "self", ("current_call_ctx",)),
    PrivateName("keras.src.layers.layer:CallContext", "entry_layer"),
    PrivateName("keras.src.backend:AutocastScope", "dtype"),
    PrivateName("keras.src.backend:get_autocast_scope", ""),
    PrivateName("keras.src.backend:get_stateless_scope", ""),
    PrivateName("keras.src.backend:in_stateless_scope", ""),
    PrivateName(
        "keras.src.backend.common.symbolic_scope:in_symbolic_scope", ""
    ),
    PrivateName(
        "keras.src.backend.common.global_state:get_global_attribute",
        "name, default, set_to_default",
    ),
    PrivateName(
        "keras.src.backend.common.global_state:set_global_attribute",
        "name, value",
    ),
    PrivateName("tensorflow.python.eager.record:VariableWatcher"),
    PrivateName("tensorflow.python.ops.while_v2:_WhileBodyGradFuncGraph"),
)
"""What is replaced, and what is read."""
