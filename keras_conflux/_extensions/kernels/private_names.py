"""Names inside of Keras and TensorFlow that kernels need."""

from keras_conflux._compat.private_keras_names import TF_OPS
from keras_conflux._compat.private_names import PrivateName

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
CONV = PrivateName(
    f"{TF_OPS}.nn:conv",
    "inputs, kernel, strides, padding, data_format, dilation_rate",
)
SEPARABLE_CONV = PrivateName(
    f"{TF_OPS}.nn:separable_conv",
    "inputs, depthwise_kernel, pointwise_kernel, strides, padding, "
    "data_format, dilation_rate",
)

NAMES = (
    ATTENTION,
    GELU,
    EINSUM,
    EINSUM_DENSE_CALL,
    CONV,
    SEPARABLE_CONV,
)
