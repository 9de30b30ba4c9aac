"""Products and their summands, as rows of one matrix.

cuBLASLt adds another matrix to a product. If that has more axes
than the product, XLA adds in place, and copies the matrix before, as a layer
and the backward pass still read it. Of several products that are added, each
can add the sum before it, if summands that are no products come first.
"""

import tensorflow as tf

from keras_conflux._extensions.kernels.compiled_shapes import ShapeOf


def replacement(
    operation: tf.Operation, shape_of: ShapeOf
) -> list[tf.Tensor] | None:
    """Returns the sum of products and tensors of more axes, as a matrix."""
    shape = operation.outputs[0].shape
    if (
        shape.rank is None
        or shape.rank < 3
        or not shape[1:].is_fully_defined()
        or any(x.shape.as_list() != shape.as_list() for x in operation.inputs)
    ):
        return None
    products = [
        each
        for each in operation.inputs
        if _is_product(each) and _is_read_once(each)
    ]
    others = [x for x in operation.inputs if all(x is not y for y in products)]
    if len(products) < (1 if others else 3) or _is_broadcast(
        operation, shape_of
    ):
        return None
    if others:
        total = tf.reshape(tf.add_n(others), [-1, shape[-1]])
    else:
        total = _rows(products.pop())
    for each in products:
        total = _rows(each) + total  # XLA lets the first of two products add
    return [tf.reshape(total, [shape[0] or -1, *shape[1:]])]


def _is_broadcast(operation: tf.Operation, shape_of: ShapeOf) -> bool:
    """Whether one sample of a summand may be added to many of another."""
    if operation.type == "AddN":
        return False
    first, *rest = map(shape_of, operation.inputs)
    return not first.is_fully_defined() or any(x != first for x in rest)


def _is_read_once(tensor: tf.Tensor) -> bool:
    return sum(each.type != "Shape" for each in tensor.consumers()) == 1


def _is_product(tensor: tf.Tensor) -> bool:
    """Whether a product, perhaps with a bias, has got more axes here."""
    operation = tensor.op
    if operation.type == "BiasAdd":
        is_last = operation.get_attr("data_format") == b"NHWC"
        return is_last and _is_product(operation.inputs[0])
    if operation.type != "Reshape":
        return False
    rows = operation.inputs[0]
    source = rows.op
    if source.type in ("AddV2", "BiasAdd"):  # of a bias, as in dense_products
        source = source.inputs[0].op
    is_matrix = rows.shape.rank == 2 and rows.shape[1] == tensor.shape[-1]
    return is_matrix and source.type == "MatMul"


def _rows(product: tf.Tensor) -> tf.Tensor:
    """Returns a product before it got more axes."""
    operation = product.op
    if operation.type == "BiasAdd":
        product, bias = operation.inputs
        return tf.nn.bias_add(_rows(product), bias)
    return operation.inputs[0]
