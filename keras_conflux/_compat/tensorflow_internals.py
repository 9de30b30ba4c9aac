"""The private state, devices, variables and log of TensorFlow."""

import contextlib
import ctypes
import functools
import logging
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute import values_util
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.ops import resource_variable_ops

from keras_conflux._common.contexts import Setting
from keras_conflux._graphs import resources

_END = "_conflux_end"
"""The attribute of a variable that holds the finalizer of its value."""


def has_started() -> bool:
    """Whether TensorFlow has taken its devices and their settings are fixed."""
    # Everything in tf.config that could tell starts it.
    running: Any = context.context()
    return running._initialized


@functools.cache
def memory_of(device: str) -> int:
    """Returns how many bytes TensorFlow may take of a device's memory."""
    # tf.config tells only the memory in use. Without the running configuration
    # this would make devices of all GPUs, also of those that are hidden.
    running: Any = context.context()
    every = device_lib.list_local_devices(running.config)
    found = (x.memory_limit for x in every if x.name.endswith(f":{device}"))
    return next(found, 0)


def is_cancellation(error: BaseException) -> bool:
    """Whether a replica was stopped because of an error elsewhere."""
    # Raised in the threads of replicas that wait in `merge_call`.
    return isinstance(error, mirrored_run._RequestedStop)


def is_deterministic() -> bool:
    """Whether the user has enabled op determinism."""
    return config.is_op_determinism_enabled()


def keep_identity(old: tf.Variable, new: tf.Variable) -> None:
    """Makes dictionaries that know `old` by its key find `new` under it."""
    # Keras' optimizers index their state by `_unique_id`
    # (backend/tensorflow/optimizer.py, `_var_key`). A mirrored variable takes
    # the id of its first copy.
    new._unique_id = old._unique_id


def take_value(variable: Any, why: str) -> None:
    """Leaves a variable without a value, until it is assigned one.

    The former one is never freed. An error gives the reason when it is read.
    """
    old = variable.handle
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(old))
    with tf.init_scope(), tf.device(variable.device):
        new: Any = tf.raw_ops.VarHandleOp(
            dtype=variable.dtype,
            shape=variable.shape,
            shared_name=f"{variable.name} ({why}) {id(old)}",
        )
    resources.copy_handle_data(old, new)
    if hasattr(old, "_distributed_container"):
        new._distributed_container = old._distributed_container
    variable._handle = new
    if _END in vars(variable):  # a finalizer that was set since is lost as well
        vars(variable)[_END].detach()
    # A handle with a name does not take its value along.
    end = weakref.finalize(variable, _destroy, new)
    end.atexit = False
    setattr(variable, _END, end)


def _destroy(handle: Any) -> None:
    with tf.init_scope():
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


def replica_index() -> int:
    """Returns the index of the running replica, without adding a constant."""
    found: Any = values_util.get_current_replica_id_as_int()
    return found


_own_variables: Any = weakref.WeakValueDictionary()


def own_variable(device: str, value: Any = 0) -> tf.Variable:
    """Returns a new variable of the package's own, such as a counter.

    Whoever lists what a user's step writes leaves it out.
    """
    with tf.device(device):
        # Not `tf.Variable`, of which an open strategy would make copies.
        made: Any = resource_variable_ops.ResourceVariable(
            tf.constant(value), trainable=False
        )
    note_own(made.handle, made)
    return made


def note_own(handle: tf.Tensor, owner: Any) -> None:
    """Makes a resource one of the package's own, while it has an owner."""
    _own_variables[id(handle)] = owner


def is_own_variable(handle: Any) -> bool:
    """Whether a handle belongs to such a variable."""
    return id(handle) in _own_variables


def copy_that_is_read(variable: Any) -> tf.Variable:
    """Returns the replica's, the current device's or the first copy."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return variable
    return variable._get_on_device_or_primary()


_UNTRUE = (
    # Each process has a strategy of its own devices. Collectives join them.
    "Using MirroredStrategy with devices",
    "Initializing local devices since in-graph multi-worker training",
    # Of reductions outside of replicas, which meet in collectives.
    "Reduce to ",
    "Gather to ",
)

_is_ours = Setting(False)


def _is_true(record: logging.LogRecord) -> bool:
    return not (_is_ours.get() and record.getMessage().startswith(_UNTRUE))


def without_untrue_lines() -> contextlib.AbstractContextManager[None]:
    """Keeps these lines back while something of ours runs in this thread."""
    tf.get_logger().addFilter(_is_true)  # once, however often it is called
    return _is_ours.to(True)
