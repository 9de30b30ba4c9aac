"""Variables and tables, as a graph knows them: by handles."""

import gc
from collections.abc import Collection
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops import resource_variable_ops

from keras_conflux._graphs import bodies

copy_handle_data = handle_data_util.copy_handle_data
"""Copies dtype and shape behind a handle to another, for shape functions."""


def variable_behind(handle: Any) -> tuple[tf.TensorShape, tf.DType] | None:
    """Returns a variable's shape and dtype, if its handle tells them."""
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    found = data.shape_and_type[0]
    return tf.TensorShape(found.shape), tf.as_dtype(found.dtype)


def container_of(handle: Any) -> Any:
    """Returns the replicated variable whose copy has this handle, if any."""
    return getattr(handle, "_distributed_container", lambda: None)()


def uses_of_resources(graph: Any) -> Iterator[tuple[Any, list[tf.Operation]]]:
    """Yields resources, as known outside of all graphs, and who uses them."""
    for placeholder in list(getattr(graph, "internal_captures", ())):
        if placeholder.dtype == tf.resource:
            yield bodies.outermost(placeholder, graph), placeholder.consumers()


def variables_behind(handles: Collection[Any]) -> dict[int, Any]:
    """Returns, by the ids of handles, the variables that have them.

    A variable with a copy for each device has several. A handle does not know
    its variable, unless that has copies: this looks at all objects then.
    """
    known = {id(handle): container_of(handle) for handle in handles}
    found = {key: each for key, each in known.items() if each is not None}
    others = (
        tf.distribute.DistributedValues,
        resource_variable_ops._UnreadVariable,
    )
    for each in gc.get_objects() if len(found) < len(known) else ():
        kind = type(each)
        if tf.Variable in kind.__mro__ and not issubclass(kind, others):
            found.setdefault(id(each.handle), each)
    return {key: each for key, each in found.items() if key in known}
