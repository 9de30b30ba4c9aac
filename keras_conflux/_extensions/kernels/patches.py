"""What layers of Keras compute by faster kernels."""

from keras_conflux._compat.patching import patch_all
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._extensions.kernels import attention
from keras_conflux._extensions.kernels import dense_products
from keras_conflux._extensions.kernels import gelu

PATCHES = (
    (Patched.ATTENTION, attention.dot_product_attention),
    (Patched.GELU, gelu.gelu),
    (Patched.EINSUM, dense_products.einsum),
    (Patched.EINSUM_DENSE_CALL, dense_products.einsum_dense),
)


def install() -> None:
    """Puts the replacements in place. Called once, at import."""
    patch_all(PATCHES)
