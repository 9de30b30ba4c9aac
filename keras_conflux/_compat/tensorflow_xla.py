"""Operations that XLA alone knows."""

import contextlib
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from keras_conflux._common.trees import length
from keras_conflux._compat.private_names import version_numbers
from keras_conflux._compat.private_tensorflow_names import MODULE_CALLS
from keras_conflux._graphs import effects
from keras_conflux._graphs import rewriting

NAMES = {
    tf.float16: "f16",
    tf.bfloat16: "bf16",
    tf.float32: "f32",
    tf.float64: "f64",
}
"""The names of dtypes in StableHLO."""
_PLATFORM = "CUDA"


def xla_all_reduce(tensor: tf.Tensor, count: int, op: str) -> tf.Tensor:
    """All-reduces inside an XLA program that runs on `count` devices.

    Of float16, bfloat16, float32 or int32: `"Add"`, `"Mul"`, `"Min"`, `"Max"`.
    """
    # The mode "CrossReplica" gives each replica back its own tensor, as
    # TensorFlow compiles a program for each.
    reduced = gen_xla_ops.xla_all_reduce(
        tensor, [list(range(count))], op, "CrossReplicaAndPartition"
    )
    rewriting.must_run(reduced)
    return reduced


def barriers(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors of which XLA computes all when one entry is needed.

    It does not know their origin.
    """
    passed: Any = gen_xla_ops.xla_optimization_barrier(list(tensors))
    return list(passed)


def replaced(whole: tf.Tensor, part: tf.Tensor, begins: Any) -> tf.Tensor:
    """Returns a tensor in which a part, at unknown places, is another."""
    return gen_xla_ops.xla_dynamic_update_slice(whole, part, begins)


def _gradient_of_replaced(
    operation: tf.Operation, upstream: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, None]:
    _, part, begins = operation.inputs
    sizes = tf.shape(part, begins.dtype)
    of_part = tf.slice(upstream, begins, sizes)
    return replaced(upstream, tf.zeros_like(part), begins), of_part, None


# TensorFlow has it as the gradient of `tf.slice`, and none of its own, so that
# XLA has no second derivatives of a slice.
with contextlib.suppress(KeyError):
    tf.RegisterGradient("XlaDynamicUpdateSlice")(_gradient_of_replaced)


def has_module_calls() -> bool:
    """Whether XLA programs can have parts that are written in StableHLO."""
    return version_numbers(tf.__version__) >= MODULE_CALLS


def module_call(
    module: str,
    operands: list[tf.Tensor],
    shapes: Any,
    dtypes: list[tf.DType],
    waits: bool = False,
) -> list[tf.Tensor]:
    """Returns the results of a StableHLO module, inside an XLA program.

    The function `main` of its text takes the operands. It has no effect, but
    replicas may wait for each other in it.
    """
    from tensorflow.compiler.mlir.stablehlo import stablehlo

    serialized = stablehlo.serialize_portable_artifact_str(
        module, stablehlo.get_current_version()
    )
    effects.note_module(serialized, waits)
    found: Any = gen_xla_ops.xla_call_module(
        operands,
        version=9,
        module=serialized,
        Sout=shapes,
        Tout=dtypes,
        platforms=[_PLATFORM],
    )
    return list(found)


def all_gather(
    parts: Sequence[tf.Tensor],
    count: int,
    channel: int,
    after: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor]:
    """Joins the parts of `count` devices, in one collective of XLA.

    The parts have one axis. The channel is a number that this call has on all
    devices, and no other. An entry of each of the floats `after` travels along,
    so that they have to be known before.
    """
    after = [_of_known_shape(each) for each in after]
    operands = [*parts, *after]
    names = [f"%a{i}" for i in range(len(operands))]
    types = [type_name(x.shape, x.dtype) for x in operands]
    arguments = ", ".join(map(": ".join, zip(names, types, strict=True)))
    shapes = [[count * length(part)] for part in parts]
    dtypes = [part.dtype for part in parts]
    own = len(parts)
    moved, given = names[:own], types[:own]
    found = list(map(type_name, shapes, dtypes))
    entries: list[str] = []
    if after:
        entries = _entries(names[own:], after, dtypes[0])
        moved.append("%entries")
        given.append(type_name([len(after)], dtypes[0]))
        found.append(type_name([count * len(after)], dtypes[0]))
    results = [f"%r#{i}" for i in range(own)]
    kept = ", ".join(found[:own])
    text = f"""module {{ func.func @main({arguments}) -> ({kept}) {{
      {" ".join(entries)}
      %r:{len(moved)} = "stablehlo.all_gather"({", ".join(moved)}) <{{
        all_gather_dim = 0 : i64, {_group(count, channel)}}}>
        : ({", ".join(given)}) -> ({", ".join(found)})
      return {", ".join(results)} : {kept} }} }}"""
    return module_call(text, operands, shapes, dtypes, waits=True)


def _entries(
    names: Sequence[str], tensors: Sequence[tf.Tensor], dtype: tf.DType
) -> list[str]:
    """Returns the lines that join an entry of each tensor as `%entries`."""
    lines: list[str] = []
    one = type_name([1], dtype)
    for i, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        rank, own = len(tensor.shape), type_name([1], tensor.dtype)
        given = type_name(tensor.shape, tensor.dtype)
        cut = type_name([1] * rank, tensor.dtype)
        where = ", ".join(["0:1"] * rank)
        lines += [
            f"%s{i} = stablehlo.slice {name} [{where}] : ({given}) -> {cut}",
            f"%f{i} = stablehlo.reshape %s{i} : ({cut}) -> {own}",
            f"%e{i} = stablehlo.convert %f{i} : ({own}) -> {one}",
        ]
    joined = ", ".join(f"%e{i}" for i in range(len(tensors)))
    ones = ", ".join([one] * len(tensors))
    lines.append(
        f'%entries = "stablehlo.concatenate"({joined}) <{{dimension = 0 : i64}}'
        f"> : ({ones}) -> {type_name([len(tensors)], dtype)}"
    )
    return lines


def _of_known_shape(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor, or one entry if nobody knows how many it has."""
    rank = tensor.shape.rank
    if rank is None:
        return tf.ensure_shape(tf.reshape(tensor, [-1])[:1], [1])
    if rank and not tensor.shape.is_fully_defined():
        return tf.slice(tensor, [0] * rank, [1] * rank)
    return tensor if rank else tf.reshape(tensor, [1])


def type_name(shape: Iterable[int | None], dtype: tf.DType) -> str:
    """Returns StableHLO's name of a type whose sizes are known."""
    return f"tensor<{'x'.join([*map(str, shape), NAMES[dtype]])}>"


def reduce_scatter(flat: tf.Tensor, count: int, channel: int) -> tf.Tensor:
    """Returns this device's part of a sum. See `all_gather`."""
    size, dtype = length(flat), flat.dtype
    given, found = type_name([size], dtype), type_name([size // count], dtype)
    one = type_name([], dtype)
    text = f"""module {{ func.func @main(%0: {given}) -> {found} {{
      %1 = "stablehlo.reduce_scatter"(%0) <{{
        scatter_dimension = 0 : i64, {_group(count, channel)}}}> ({{
          ^bb0(%a: {one}, %b: {one}):
            %c = stablehlo.add %a, %b : {one}
            stablehlo.return %c : {one} }})
        : ({given}) -> {found}
      return %1 : {found} }} }}"""
    return module_call(text, [flat], [[size // count]], [dtype], waits=True)[0]


def exchanged_sum(
    flat: tf.Tensor, dtype: tf.DType, rank: Any, channel: int
) -> tf.Tensor:
    """Returns this device's half of a sum of two devices, added up here.

    Each sends the other's half in its own dtype, in fewer bytes than a sum's.
    """
    size = length(flat)
    half = size // 2
    given, part = type_name([size], flat.dtype), type_name([half], flat.dtype)
    found = type_name([half], dtype)
    cut = f"<{{slice_sizes = array<i64: {half}>}}>"
    text = f"""module {{ func.func @main(%flat: {given}, %rank: tensor<i64>)
        -> {found} {{
      %one = stablehlo.constant dense<1> : tensor<i64>
      %half = stablehlo.constant dense<{half}> : tensor<i64>
      %other = stablehlo.subtract %one, %rank : tensor<i64>
      %mine = stablehlo.multiply %rank, %half : tensor<i64>
      %yours = stablehlo.multiply %other, %half : tensor<i64>
      %kept = "stablehlo.dynamic_slice"(%flat, %mine) {cut}
        : ({given}, tensor<i64>) -> {part}
      %sent = "stablehlo.dynamic_slice"(%flat, %yours) {cut}
        : ({given}, tensor<i64>) -> {part}
      %all = "stablehlo.all_gather"(%sent) <{{
        all_gather_dim = 0 : i64, {_group(2, channel)}}}>
        : ({part}) -> {given}
      %got = "stablehlo.dynamic_slice"(%all, %yours) {cut}
        : ({given}, tensor<i64>) -> {part}
      %a = stablehlo.convert %kept : ({part}) -> {found}
      %b = stablehlo.convert %got : ({part}) -> {found}
      %sum = stablehlo.add %a, %b : {found}
      return %sum : {found} }} }}"""
    operands = [flat, tf.cast(rank, tf.int64)]
    return module_call(text, operands, [[half]], [dtype], waits=True)[0]


def _group(count: int, channel: int) -> str:
    # Without a channel, XLA takes each program for one of its own.
    ranks = ", ".join(map(str, range(count)))
    handle = f"#stablehlo.channel_handle<handle = {channel}, type = 1>"
    return f"""replica_groups = dense<[[{ranks}]]> : tensor<1x{count}xi64>,
        channel_handle = {handle}"""
