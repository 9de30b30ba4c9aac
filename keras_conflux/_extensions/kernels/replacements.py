"""Operations of a step that XLA compiles to slow programs, replaced by others.

A gradient is asked for by a tensor that the program has, and follows traced
operations. So operations are replaced when the whole step has been traced.
"""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from keras_conflux._compat import tensorflow_xla
from keras_conflux._extensions.kernels import largest_of_windows
from keras_conflux._extensions.kernels.compiled_shapes import CompiledShapes
from keras_conflux._extensions.kernels.compiled_shapes import ShapeOf
from keras_conflux._graphs import rewriting
from keras_conflux._replication.steps import Step


def replace(step: Step) -> None:
    """Replaces operations of the graph of a step that XLA will compile."""
    shape_of = CompiledShapes.of(step).shape_of
    for operation in step.graph.get_operations():
        if operation.type in _REPLACEMENTS:
            _replace(operation, shape_of)


def _replace(operation: tf.Operation, shape_of: ShapeOf) -> None:
    # Before the replacement reads them.
    readers = [found.consumers() for found in operation.outputs]
    if not any(readers):
        return
    others = _REPLACEMENTS[operation.type](operation, shape_of)
    if others is None:
        return
    outputs = operation.outputs
    for found, reading, other in zip(outputs, readers, others, strict=True):
        rewriting.redirect(found, other, reading)


def _cross_entropy(
    operation: tf.Operation, shape_of: ShapeOf
) -> list[tf.Tensor] | None:
    """Returns losses that read the logit of a label, and their gradients.

    XLA adds up a row of products with zeros and a one. In a language model
    that is a pass over the largest tensor of a step, for one number of each
    row. And it may keep the exponentials of all logits for the gradient, in
    float32. The losses are the same but for roundings.
    """
    logits, labels = operation.inputs
    if logits.dtype != tf.float32:
        return None  # XLA would round otherwise
    # Whoever differentiates this gets the derivatives of the losses.
    largest = tf.stop_gradient(tf.reduce_max(logits, 1, keepdims=True))
    shifted = logits - largest
    total = tf.reduce_sum(tf.exp(shifted), 1, keepdims=True)
    losses = tf.math.log(total[:, 0]) - tf.gather(shifted, labels, batch_dims=1)
    if shape_of(logits).is_fully_defined():
        # To XLA, the exponentials of the gradient are others.
        (largest,) = tensorflow_xla.barriers([largest])
        largest = tf.stop_gradient(largest)
    classes = tf.range(tf.shape(logits, labels.dtype)[1])
    is_label = tf.cast(tf.equal(labels[:, None], classes), logits.dtype)
    gradients = tf.exp(logits - largest) / total - is_label
    is_class = (labels >= 0) & (labels < tf.size(classes, labels.dtype))
    return [
        tf.where(is_class, losses, float("nan")),
        tf.where(is_class[:, None], gradients, float("nan")),
    ]


def _sum_of_rows(operation: tf.Operation, _: ShapeOf) -> list[tf.Tensor] | None:
    """Returns a product with a row of ones, for a sum of numbers of 16 bits.

    The gradient of a tensor that is added to each sample alike, such as a
    vector for each position, is the sum over all samples. XLA would lay out
    all activations so that this sum is fast, with samples innermost, and turn
    them around before and after each product. A product asks for no other
    layout. In float32, one on GPUs might round to TF32.
    """
    summands, axes = operation.inputs
    shape = summands.shape
    if (
        summands.dtype not in (tf.bfloat16, tf.float16)
        or not shape[1:].is_fully_defined()
        or len(shape) < 3
        or 0 in shape.as_list()
        or not _are_of_samples(axes, shape)
    ):
        return None
    samples = tf.reshape(summands, [-1, shape[1:].num_elements()])
    ones = tf.ones([1, tf.shape(samples)[0]], summands.dtype)
    # XLA may hand on a sum that has not been rounded to 16 bits.
    wide = tf.raw_ops.BatchMatMulV3(x=ones, y=samples, Tout=tf.float32)
    total = operation.outputs[0]
    return [tf.cast(tf.reshape(wide, tf.shape(total)), total.dtype)]


def _are_of_samples(axes: tf.Tensor, shape: tf.TensorShape) -> bool:
    """Whether axes are the first one alone."""
    known = tf.get_static_value(axes)
    if known is not None:
        return known.ravel().tolist() == [0]
    if axes.op.type != "BroadcastGradientArgs":
        return False
    # These are the axes along which something of this shape was repeated.
    repeated = tf.get_static_value(axes.op.inputs[axes.value_index])
    if repeated is None:
        return False
    missing = shape.rank - len(repeated)
    return [1] * missing + [*repeated] == [1, *shape[1:]]


def _residual_sum(
    operation: tf.Operation, shape_of: ShapeOf
) -> list[tf.Tensor] | None:
    """Returns the sum of products and tensors of more axes, as a matrix.

    cuBLASLt adds another matrix to a product. If that has more axes than the
    product, XLA adds in place, and copies the matrix before, as a layer and
    the backward pass still read it. Of several products that are added, each
    can add the sum before it, if summands that are no products come first.
    """
    shape = operation.outputs[0].shape
    if not shape[1:].is_fully_defined() or len(shape) < 3:
        return None
    if any(x.shape.as_list() != shape.as_list() for x in operation.inputs):
        return None
    found = filter(_is_product, operation.inputs)
    readers = [(x, [y.type for y in x.consumers()]) for x in found]
    products = [x for x, y in readers if len(y) - y.count("Shape") == 1]
    others = [x for x in operation.inputs if all(x is not y for y in products)]
    too_few = len(products) < (1 if others else 3)
    if too_few or _is_broadcast(operation, shape_of):
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


_REPLACEMENTS: dict[
    str, Callable[[tf.Operation, ShapeOf], Sequence[tf.Tensor] | None]
] = {
    "AddN": _residual_sum,
    "AddV2": _residual_sum,
    "MaxPoolGrad": largest_of_windows.replacement,
    "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "Sum": _sum_of_rows,
}
"""By the type of an operation, a function of other outputs, or `None`."""
