"""What kernels need of the insides of TensorFlow."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.eager import record

from keras_conflux._compat.private_names import version_numbers
from keras_conflux._extensions.kernels import private_names


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a gradient tape records what is computed of one of these."""
    return record.should_record_backprop(tensors)


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of these."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def has_module_calls() -> bool:
    """Whether XLA programs can have parts that are written in StableHLO."""
    return version_numbers(tf.__version__) >= private_names.MODULE_CALLS


def module_call(
    module: str,
    operands: list[tf.Tensor],
    shapes: Any,
    dtypes: list[tf.DType],
    platform: str,
) -> list[tf.Tensor]:
    """Returns what a StableHLO module computes, inside an XLA program.

    Args:
        module: Its text. Its function `main` takes the operands.
        operands: Of the shapes that `main` declares.
        shapes: Of the results.
        dtypes: Of the results.
        platform: What XLA calls the devices that the program runs on.
    """
    from tensorflow.compiler.mlir.stablehlo import stablehlo

    serialized = stablehlo.serialize_portable_artifact_str(
        module, stablehlo.get_current_version()
    )
    found: Any = gen_xla_ops.xla_call_module(
        operands,
        version=9,
        module=serialized,
        Sout=shapes,
        Tout=dtypes,
        platforms=[platform],
    )
    return list(found)
