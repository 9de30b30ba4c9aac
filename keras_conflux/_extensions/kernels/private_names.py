"""Names inside of Keras and TensorFlow that kernels need."""

from keras_conflux._compat.private_keras_names import TF_OPS
from keras_conflux._compat.private_names import PrivateName

_STABLEHLO = "tensorflow.compiler.mlir.stablehlo.stablehlo"

MODULE_CALLS = (2, 21)
"""The first version whose names for calls of StableHLO modules were read."""

ATTENTION = PrivateName(
    f"{TF_OPS}.nn:dot_product_attention",
    "query, key, value, bias, mask, scale, is_causal, flash_attention, "
    "attn_logits_soft_cap",
)
GELU = PrivateName(f"{TF_OPS}.nn:gelu", "x, approximate")
EINSUM = PrivateName(f"{TF_OPS}.numpy:einsum", "subscripts, operands, kwargs")
EINSUM_DENSE_CALL = PrivateName(
    "keras.src.layers.core.einsum_dense:EinsumDense.call",
    "self, inputs, training",
)

NAMES = (
    ATTENTION,
    GELU,
    EINSUM,
    EINSUM_DENSE_CALL,
    PrivateName(
        "tensorflow.compiler.tf2xla.ops.gen_xla_ops:xla_call_module",
        "args, version, module, Sout, Tout, dim_args_spec, platforms, "
        "function_list, has_token_input_output, disabled_checks, "
        "use_shardy_partitioner, name",
        since=MODULE_CALLS,
    ),
    PrivateName(
        f"{_STABLEHLO}:serialize_portable_artifact_str", since=MODULE_CALLS
    ),
    PrivateName(f"{_STABLEHLO}:get_current_version", since=MODULE_CALLS),
    PrivateName(
        "tensorflow.python.eager.forwardprop_util:TangentInfo.__new__",
        None,
        ("tangents",),
    ),
    PrivateName(
        "tensorflow.python.eager.forwardprop_util:pack_tangents",
        "tensors",
        ("TangentInfo",),
    ),
    PrivateName(
        "tensorflow.python.eager.record:should_record_backprop", "tensors"
    ),
)
