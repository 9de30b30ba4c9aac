"""The methods of Keras' layers that run faster kernels."""

from keras_conflux._compat.patching import patch_all
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.kernels import attention
from keras_conflux._extensions.kernels import dense_products
from keras_conflux._extensions.kernels import gelu
from keras_conflux._extensions.kernels import pointwise
from keras_conflux._extensions.kernels import replacements
from keras_conflux._replication import steps

PATCHES = (
    (private_names.ATTENTION, attention.dot_product_attention),
    (private_names.GELU, gelu.gelu),
    (private_names.EINSUM, dense_products.einsum),
    (private_names.EINSUM_DENSE_CALL, dense_products.einsum_dense),
    (private_names.CONV, pointwise.conv),
    (private_names.SEPARABLE_CONV, pointwise.separable_conv),
)


def install() -> None:
    """Puts the replacements in place. Called once, at import."""
    patch_all(PATCHES)
    steps.finish_by(replacements.replace)
