"""Which attentions a fused kernel computes as Keras does."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import tensorflow_tracing
from keras_conflux._extensions.kernels.compiled_shapes import ShapeOf

HALVES = (tf.float16, tf.bfloat16)
MAX_HEAD_SIZE = 128
MIN_LENGTH = 64
"""The fewest queries and keys. Below, the gain is less than a launch."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The attention that a layer, or a program, asks Keras for."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: bool = False
    flash_attention: bool | None = None
    attn_logits_soft_cap: Any = None

    def obstacle(self, shape_of: ShapeOf) -> str | None:
        """Returns why no fused kernel can be used, if so."""
        found = self._of_options() or self._of_dtypes()
        return found or self._of_shapes(shape_of)

    def _of_options(self) -> str | None:
        enabled = keras.config.is_flash_attention_enabled()
        if self.flash_attention is False or enabled is False:
            return "flash attention is disabled"
        if self.bias is not None:
            return "it has a bias, which may need a gradient"
        if self.attn_logits_soft_cap is not None:
            return "it has a soft cap"
        if not isinstance(self.scale, int | float | None):
            return "its scale is a tensor"
        return None

    def _of_dtypes(self) -> str | None:
        inputs = self.query, self.key, self.value
        if not all(isinstance(each, tf.Tensor) for each in inputs):
            return "its inputs are not tensors"
        dtypes = {each.dtype for each in inputs}
        if len(dtypes) > 1 or not dtypes <= {*HALVES}:
            names = ", ".join(sorted(each.name for each in dtypes))
            return f"it computes in {names}, not in float16 or bfloat16"
        if tensorflow_tracing.has_tangents(inputs):
            return "a derivative is taken in forward mode"
        is_tensor = isinstance(self.mask, tf.Tensor)
        is_boolean = is_tensor and self.mask.dtype.is_bool
        if self.mask is not None and not is_boolean:
            return "its mask is not a boolean tensor"
        return None

    def _of_shapes(self, shape_of: ShapeOf) -> str | None:
        shapes = [shape_of(each) for each in (self.query, self.key, self.value)]
        if not all(each.is_fully_defined() for each in shapes):
            listed = ", ".join(map(str, shapes))
            return f"the shapes of its inputs are not known: {listed}"
        if any(each.rank != 4 for each in shapes):
            return "its inputs are not of rank 4"
        query, key, value = (each.as_list() for each in shapes)
        if key != value or (query[0], query[3]) != (key[0], key[3]):
            return f"queries {query}, keys {key} and values {value} do not fit"
        heads, key_heads, size = query[2], key[2], query[3]
        if heads % key_heads or (key_heads == 1 and heads > 1):
            return f"{heads} heads have {key_heads} heads of keys"
        if size % 8 or size > MAX_HEAD_SIZE:
            return (
                f"a head has the size {size}, which is not one of 8, 16, ..., "
                f"{MAX_HEAD_SIZE}"
            )
        if min(query[1], key[1]) < MIN_LENGTH:
            return f"it is shorter than {MIN_LENGTH}"
        if self.mask is None:
            return None
        mask = shape_of(self.mask)
        if not _fits(mask, [query[0], heads, query[1], key[1]]):
            return f"its mask has the shape {mask}"
        if query[1] % 2 or key[1] % 2:
            return "it has a mask and an odd length"
        return None


def _fits(mask: tf.TensorShape, scores: list[int]) -> bool:
    """Whether a mask can be broadcast to scores."""
    if not mask.is_fully_defined() or len(mask) > 4:
        return False
    pairs = zip(reversed(mask.as_list()), reversed(scores), strict=False)
    return all(size in (1, full) for size, full in pairs)
