"""cuDNN's attention, as XLA calls it on NVIDIA GPUs.

XLA knows the kernel as a custom call with a configuration of its own, whose
fields are the fields of XLA's `CudnnfMHABackendConfig`. The results of the call
have the shape `(B, N, T, H)` and a layout in which they lie as `(B, T, N, H)`,
so that no tensor has to be transposed in memory. Layouts can be given in
StableHLO only, which is why the call is a small module.

B is the number of samples, T of queries, S of keys, N of heads, K of heads of
keys and values (N is a multiple of it), and H a head's size. All are known.
"""

import dataclasses
import json
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_xla
from keras_conflux._compat.tensorflow_xla import type_name
from keras_conflux._replication.steps import Step

MIN_CAPABILITY = (8, 0)
"""The compute capability of the oldest GPUs that cuDNN has a kernel for."""
_Result = tuple[Any, tf.DType]
"""The shape and the dtype of a result."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of an attention, apart from its tensors."""

    scale: float
    """The factor of the products of queries and keys."""
    is_causal: bool
    """Whether query `t` attends to the keys 0 to `t` only."""


def obstacle(step: Step) -> str | None:
    """Returns why the program that is traced cannot use it, if so."""
    if not step.in_xla:
        return "the step is not compiled by XLA"
    if not tensorflow_xla.has_module_calls():
        return "TensorFlow is older than 2.21"
    capability = tf.distribute.get_strategy().communicator.compute_capability
    if capability is None:
        return "not all devices are CUDA GPUs"
    if capability < MIN_CAPABILITY:
        major, minor = capability
        return f"a GPU has the compute capability {major}.{minor}"
    if tensorflow_internals.is_deterministic():
        return "operations are to be deterministic"
    return None


def forward(
    queries: tf.Tensor,
    keys: tf.Tensor,
    values: tf.Tensor,
    bias: tf.Tensor | None,
    form: Form,
) -> list[tf.Tensor]:
    """Returns the output, and the statistics for `backward`.

    These are float32 of shape `(B, N, T)`. Queries are `(B, T, N, H)`, keys and
    values `(B, S, K, H)`, the summand of the scores `(B or 1, N or 1, T, S)`.
    """
    batch, length, heads, _ = queries.shape
    statistics = (batch, heads, length), tf.float32
    results = [(queries.shape, queries.dtype), statistics]
    operands = trees.present([queries, keys, values, bias])
    products = {
        "bmm1_dot_dimension_numbers": _product(3, 3),
        "bmm2_dot_dimension_numbers": _product(3, 1, 1, 2),
    }
    config = _config(queries, keys, form, products)
    return _call(_target(bias), operands, results, config)


def backward(
    queries: tf.Tensor,
    keys: tf.Tensor,
    values: tf.Tensor,
    bias: tf.Tensor | None,
    form: Form,
    output: tf.Tensor,
    statistics: tf.Tensor,
    upstream: tf.Tensor,
) -> list[tf.Tensor]:
    """Returns the gradients of queries, keys and values; see `forward`."""
    results = [(each.shape, each.dtype) for each in (queries, keys, values)]
    given = [queries, keys, values, statistics, upstream, bias, output]
    operands = trees.present(given)
    products = {
        "bmm1_grad_gemm1_dot_dimension_numbers": _product(2, 1, 1, 2),
        "bmm1_grad_gemm2_dot_dimension_numbers": _product(3, 1, 1, 2),
        "bmm2_grad_gemm1_dot_dimension_numbers": _product(2, 1, 1, 2),
        "bmm2_grad_gemm2_dot_dimension_numbers": _product(3, 3),
    }
    config = _config(queries, keys, form, products)
    return _call(_target(bias) + "Backward", operands, results, config)


def _target(bias: tf.Tensor | None) -> str:
    return "__cudnn$fmha" + ("Softmax" if bias is None else "ScaleBiasSoftmax")


def _product(
    left: int, right: int, left_heads: int = 2, right_heads: int = 2
) -> dict[str, list[str]]:
    """Describes a product of two tensors, for each sample and head.

    It sums over an axis of each. Scores have their heads at 1, all others at 2.
    """
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": ["0", str(left_heads)],
        "rhs_batch_dimensions": ["0", str(right_heads)],
    }


def _config(
    queries: tf.Tensor, keys: tf.Tensor, form: Form, products: dict[str, Any]
) -> str:
    """Returns XLA's configuration of the call, as JSON."""
    batch, length, heads, _ = queries.shape
    scores = {
        "element_type": tensorflow_xla.NAMES[queries.dtype].upper(),
        "dimensions": [str(n) for n in (batch, heads, length, keys.shape[1])],
        "tuple_shapes": [],
        "layout": {
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": form.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if form.is_causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": "0",
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        **products,
    }
    return json.dumps({"cudnn_fmha_backend_config": attention})


def _call(
    target: str, operands: list[tf.Tensor], results: list[_Result], config: str
) -> list[tf.Tensor]:
    """Calls cuDNN. The results of rank 4 are `(B, T, N, H)`."""
    inputs = [type_name(tensor.shape, tensor.dtype) for tensor in operands]
    input_layouts = [_row_major(len(tensor.shape)) for tensor in operands]
    outputs = [type_name(*result) for result in results]
    raw, layouts, lines, names = [], [], [], []
    for i, (shape, dtype) in enumerate(results):
        if len(shape) != 4:
            raw.append(outputs[i])
            layouts.append(_row_major(len(shape)))
            names.append(f"%raw#{i}")
        else:
            batch, length, heads, size = shape
            raw.append(type_name((batch, heads, length, size), dtype))
            layouts.append("dense<[3, 1, 2, 0]> : tensor<4xindex>")
            names.append(f"%out{i}")
            lines.append(
                f"%out{i} = stablehlo.transpose %raw#{i}, "
                f"dims = [0, 2, 1, 3] : ({raw[i]}) -> {outputs[i]}"
            )
    raw.append("tensor<0xui8>")  # the workspace, whose size XLA finds out
    layouts.append("dense<0> : tensor<1xindex>")
    given = ", ".join(f"%in{i}: {each}" for i, each in enumerate(inputs))
    passed = ", ".join(f"%in{i}" for i in range(len(inputs)))
    quoted = config.replace('"', "\\22")
    module = f"""module @attention {{
  func.func public @main({given}) -> ({", ".join(outputs)}) {{
    %raw:{len(raw)} = "stablehlo.custom_call"({passed}) <{{
      call_target_name = "{target}", has_side_effect = false,
      backend_config = "{quoted}", api_version = 2 : i32,
      operand_layouts = [{", ".join(input_layouts)}],
      result_layouts = [{", ".join(layouts)}]
    }}> : ({", ".join(inputs)}) -> ({", ".join(raw)})
    {" ".join(lines)}
    return {", ".join(names)} : {", ".join(outputs)}
  }}
}}"""
    shapes, dtypes = map(list, zip(*results, strict=True))
    return tensorflow_xla.module_call(module, operands, shapes, dtypes)


def _row_major(rank: int) -> str:
    return f"dense<{[*range(rank)][::-1]}> : tensor<{rank}xindex>"
