"""Operations that XLA alone knows."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from keras_conflux._batch_analysis import traced_graphs
from keras_conflux._common.parts import length
from keras_conflux._compat import tensorflow_graphs
from keras_conflux._compat.private_names import version_numbers
from keras_conflux._compat.private_tensorflow_names import MODULE_CALLS


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
    return version_numbers(tf.__version__) >= MODULE_CALLS


def module_call(
    module: str,
    operands: list[tf.Tensor],
    shapes: Any,
    dtypes: list[tf.DType],
    platform: str,
    waits: bool = False,
) -> list[tf.Tensor]:
    """Returns what a StableHLO module computes, inside an XLA program.

    It may have no effect but that replicas wait for each other.

    Args:
        module: Its text. Its function `main` takes the operands.
        operands: Of the shapes that `main` declares.
        shapes: Of the results.
        dtypes: Of the results.
        platform: What XLA calls the devices that the program runs on.
        waits: Whether replicas wait for each other in it.
    """
    from tensorflow.compiler.mlir.stablehlo import stablehlo

    serialized = stablehlo.serialize_portable_artifact_str(
        module, stablehlo.get_current_version()
    )
    traced_graphs.note_module(serialized, waits)
    found: Any = gen_xla_ops.xla_call_module(
        operands,
        version=9,
        module=serialized,
        Sout=shapes,
        Tout=dtypes,
        platforms=[platform],
    )
    return list(found)


_NAMES = {
    tf.float16: "f16",
    tf.bfloat16: "bf16",
    tf.float32: "f32",
    tf.float64: "f64",
}
_PLATFORM = "CUDA"


def all_gather(
    parts: Sequence[tf.Tensor], count: int, channel: int
) -> list[tf.Tensor]:
    """Joins the parts of `count` devices, in one collective of XLA.

    Args:
        parts: This device's, of one axis.
        count: How many devices there are.
        channel: A number that this call has on all devices, and no other.
    """
    given = [f"tensor<{length(x)}x{_NAMES[x.dtype]}>" for x in parts]
    found = [f"tensor<{count * length(x)}x{_NAMES[x.dtype]}>" for x in parts]
    names = [f"%a{i}" for i in range(len(parts))]
    arguments = ", ".join(map(": ".join, zip(names, given, strict=True)))
    several = len(parts) > 1
    results = [f"%r#{i}" for i in range(len(parts))] if several else ["%r"]
    bound = f"%r:{len(parts)}" if several else "%r"
    text = f"""module {{ func.func @main({arguments}) -> ({", ".join(found)}) {{
      {bound} = "stablehlo.all_gather"({", ".join(names)}) <{{
        all_gather_dim = 0 : i64, {_group(count, channel)}}}>
        : ({", ".join(given)}) -> ({", ".join(found)})
      return {", ".join(results)} : {", ".join(found)} }} }}"""
    shapes = [[count * length(part)] for part in parts]
    dtypes = [part.dtype for part in parts]
    return module_call(text, list(parts), shapes, dtypes, _PLATFORM, waits=True)


def reduce_scatter(flat: tf.Tensor, count: int, channel: int) -> tf.Tensor:
    """Returns this device's part of a sum, by a collective of XLA.

    Args:
        flat: This device's summand, of one axis.
        count: How many devices there are.
        channel: A number that this call has on all devices, and no other.
    """
    size, dtype = length(flat), _NAMES[flat.dtype]
    given, found = f"tensor<{size}x{dtype}>", f"tensor<{size // count}x{dtype}>"
    text = f"""module {{ func.func @main(%0: {given}) -> {found} {{
      %1 = "stablehlo.reduce_scatter"(%0) <{{
        scatter_dimension = 0 : i64, {_group(count, channel)}}}> ({{
          ^bb0(%a: tensor<{dtype}>, %b: tensor<{dtype}>):
            %c = stablehlo.add %a, %b : tensor<{dtype}>
            stablehlo.return %c : tensor<{dtype}> }})
        : ({given}) -> {found}
      return %1 : {found} }} }}"""
    shapes, dtypes = [[size // count]], [flat.dtype]
    return module_call(text, [flat], shapes, dtypes, _PLATFORM, waits=True)[0]


def _group(count: int, channel: int) -> str:
    # Without a channel, XLA takes each program for one of its own.
    ranks = ", ".join(map(str, range(count)))
    handle = f"#stablehlo.channel_handle<handle = {channel}, type = 1>"
    return f"""replica_groups = dense<[[{ranks}]]> : tensor<1x{count}xi64>,
        channel_handle = {handle}"""
