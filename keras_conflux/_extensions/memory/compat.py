"""Losses without a trace, and XLA's figures of compiled programs."""

import contextlib
import re
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.contexts import having
from keras_conflux._compat.private_names import module_if_any

hlo_pb2 = module_if_any("tensorflow.compiler.xla.service.hlo_pb2")

_SIZE = re.compile(r"preallocated temp allocation: +([\d.]+)((?:[KMGTP]i)?)B\b")
"""XLA's words on a program that gets no memory: the bytes that it needs."""


def bytes_of_failed_program(error: BaseException) -> int | None:
    """Returns the bytes that a program without memory needs, if XLA says."""
    said = _SIZE.search(str(error))
    if said is None:
        return None
    number, unit = said.groups()
    return int(float(number) * 1024 ** " KMGTP".index(unit[:1] or " ")) or None


def bytes_of_program(
    function: Callable, signature: Sequence[tf.TensorSpec], device: str
) -> int | None:
    """Returns what a compiled program needs besides its arguments, if known."""
    traced: Any = tf.function(function, jit_compile=True, autograph=False)
    compiled = traced.experimental_get_compiler_ir(*signature)
    with warnings.catch_warnings():
        # Without a name, which is deprecated, TensorFlow draws a random number.
        warnings.simplefilter("ignore")
        kind, name = "optimized_hlo_proto_serialized", f"/device:{device}"
        try:
            document = compiled(kind, device_name=name)
        except (ValueError, tf.errors.OpError):  # XLA cannot compile it
            return None
    found = hlo_pb2.HloProto.FromString(document).buffer_assignment
    needed = [x for x in found.buffer_allocations if not x.is_thread_local]
    own = [x.size for x in needed if not x.is_entry_computation_parameter]
    return sum(own) or None


def with_loss_of_its_own(
    model: keras.Model,
) -> contextlib.AbstractContextManager[None]:
    """Has a model compute its loss without building its own loss object."""
    # A loss is built by its first call, which is not this.
    own: Any = model._compile_loss
    if own is not None:
        given = own._user_loss, own._user_loss_weights
        own = type(own)(*given, own.reduction, own.output_names)
    return having(model, _compile_loss=own)
