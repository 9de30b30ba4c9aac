"""Operations that XLA alone knows."""

from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from keras_conflux._compat import private_tensorflow_names
from keras_conflux._compat import tensorflow_graphs
from keras_conflux._compat.private_names import version_numbers


def xla_all_reduce(tensor: tf.Tensor, count: int, op: str) -> tf.Tensor:
    """All-reduces inside an XLA program that runs on `count` devices.

    Args:
        tensor: float16, bfloat16, float32 or int32.
        count: How many devices.
        op: `"Add"`, `"Mul"`, `"Min"` or `"Max"`.
    """
    # The mode "CrossReplica" gives each replica back its own tensor, as
    # TensorFlow compiles a program for each.
    reduced = gen_xla_ops.xla_all_reduce(
        tensor, [list(range(count))], op, "CrossReplicaAndPartition"
    )
    tensorflow_graphs.must_run(reduced)
    return reduced


def has_module_calls() -> bool:
    """Whether XLA programs can have parts that are written in StableHLO."""
    return (
        version_numbers(tf.__version__) >= private_tensorflow_names.MODULE_CALLS
    )


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
