"""What the rules say of a tensor is what its numbers are.

Small programs are drawn. Each is traced once and then computed for a batch and
for uneven parts of it, as replicas would: what the parts give makes what the
batch gives, in the way that the kind of the tensor says. No model is trained.

A few fixed draws run in CI. A search by hand prints each failure's smallest
form:

    export HYPOTHESIS_PROFILE=search
    python -m pytest tests/batch_analysis/test_batch_kinds.py
"""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from kinds_in_numbers import Numbers
from kinds_in_numbers import are_close
from kinds_in_numbers import blocks_of
from kinds_in_numbers import combined
from kinds_in_numbers import fault
from kinds_in_numbers import unoptimized_session

from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.derivation import derivation_of
from keras_conflux._batch_analysis.kinds import Role

PARTS = (2, 1, 4)
STARTS = np.cumsum(PARTS)[:-1]
BATCH = sum(PARTS)
FEATURES = 3
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(BATCH, FEATURES)),
    "images": RNG.normal(size=(BATCH, 2, FEATURES)),
    "y": RNG.uniform(0.1, 0.9, size=(BATCH,)),
    "labels": RNG.integers(0, FEATURES, size=(BATCH,), dtype=np.int32),
    "pairs": RNG.normal(size=(2 * BATCH, FEATURES)),
}
WEIGHTS = RNG.normal(size=(FEATURES, FEATURES))


class Operands:
    """The tensors that a program has so far, and numbers to choose by."""

    def __init__(self, tensors, numbers, pairs):
        self.tensors = tensors
        self.pairs = pairs
        self._numbers = list(numbers)

    def number(self, below):
        number = self._numbers.pop(0) if self._numbers else 0
        return number % max(below, 1)

    def any(self):
        # The newest first, so that programs become deep.
        return self.tensors[-1 - self.number(len(self.tensors))]

    def real(self):
        return tf.cast(self.any(), tf.float64)

    def axis(self, tensor):
        return self.number(len(tensor.shape))

    def of(self, choices):
        return choices[self.number(len(choices))]


def _reduced(o):
    x = o.real()
    function = o.of(
        [
            tf.reduce_sum,
            tf.reduce_mean,
            tf.reduce_max,
            tf.reduce_logsumexp,
            tf.reduce_prod,
            tf.math.reduce_std,
            tf.norm,
        ]
    )
    axis = o.of([None, *range(len(x.shape))])
    return function(x, axis=axis, keepdims=o.number(2) == 1)


def _binary(o):
    function = o.of(
        [
            tf.add,
            tf.multiply,
            tf.subtract,
            tf.divide,
            tf.math.divide_no_nan,
            tf.maximum,
            tf.math.squared_difference,
        ]
    )
    return function(o.real(), o.real())


def _unary(o):
    function = o.of(
        [
            tf.abs,
            tf.sqrt,
            tf.square,
            tf.exp,
            tf.negative,
            tf.round,
            tf.sign,
            tf.stop_gradient,
            tf.nn.softplus,
            tf.ones_like,
            tf.identity,
            lambda x: x * 0.5,
            lambda x: x + 2,
            lambda x: 3 / x,
            lambda x: x > 0.1,
        ]
    )
    return function(o.real())


def _matmul(o):
    a, b = o.real(), o.real()
    return tf.matmul(
        a, b, transpose_a=o.number(2) == 1, transpose_b=o.number(2) == 1
    )


def _einsum(o):
    equation = o.of(
        [
            "ij,ij->i",
            "ij,kj->ik",
            "ij,ik->jk",
            "ij->ji",
            "ij->j",
            "ij,jk->ik",
            "ij,jk->k",
            "ijk->ki",
            "ijk,ik->ij",
            "ijk,kl->jil",
            "ij,i->j",
            "i,i->",
            "ij,ij->",
        ]
    )
    return tf.einsum(
        equation, *[o.real() for _ in range("," in equation)], o.real()
    )


def _slice(o):
    x = o.any()
    keys = [slice(None)] * o.axis(x)
    return x[
        (
            *keys,
            o.of(
                [
                    0,
                    -1,
                    slice(1, None),
                    slice(None, 1),
                    slice(None, -1),
                    slice(None, None, 2),
                    slice(None, None, -1),
                    slice(0, None),
                    tf.newaxis,
                    Ellipsis,
                ]
            ),
        )
    ]


def _slice_op(o):
    x = o.any()
    begin = [0] * len(x.shape)
    size = [-1] * len(x.shape)
    axis = o.axis(x)
    begin[axis] = o.number(2)
    size[axis] = o.of([-1, 1])
    return tf.slice(x, begin, size)


def _divided_by_a_count(o):
    x, y = o.real(), o.any()
    return x / tf.cast(tf.shape(y)[o.axis(y)], tf.float64)


def _times_a_count(o):
    x, y = o.real(), o.any()
    return x * tf.cast(tf.shape(y)[o.axis(y)], tf.float64)


def _gather(o):
    x = o.any()
    indices = o.of([0, [0], [1, 0], [[0, 1], [1, 0]]])
    return tf.gather(x, indices, axis=o.axis(x))


def _reshape(o):
    x = o.any()
    return tf.reshape(
        x, o.of([[-1], [-1, 1], [1, -1], [-1, 3], [3, -1], [-1, 2, 3], [2, -1]])
    )


def _reshaped_by_a_shape(o):
    x, y = o.any(), o.any()
    first = tf.shape(y)[0]
    return tf.reshape(x, o.of([tf.shape(y), [first, -1], [-1, first], [first]]))


def _transpose(o):
    x = o.any()
    rank = len(x.shape)
    first = o.number(rank)
    return tf.transpose(x, [first, *(i for i in range(rank) if i != first)])


def _cond(o):
    x, y = o.real(), o.real()
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: y)


def _while(o):
    x = o.real()
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, z: (i + 1, z * 1.5), (0, x)
    )[1]


def _loop_to_a_count(o):
    x, y = o.real(), o.any()
    last = tf.shape(y)[0]
    return tf.while_loop(
        lambda i, _: i < last, lambda i, z: (i + 1, z * 1.1), (0, x)
    )[1]


def _recurrent(o):
    x = o.real()
    start = tf.zeros(tf.shape(x), x.dtype)
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, z: (i + 1, tf.tanh(z + x)), (0, start)
    )[1]


def _summed(o):
    x = o.real()
    return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, z: (i + 1, z + tf.reduce_sum(x)),
        (0, tf.zeros([], x.dtype)),
    )[1]


def _shifted(o):
    """Hands a mean on through the variables of a loop, one in each turn."""
    mean = tf.reduce_mean(o.real(), 0)
    return tf.while_loop(
        lambda i, *_: i < 9,
        lambda i, *each: (i + 1, mean, *each[:-1]),
        (0, *[tf.zeros_like(mean)] * 9),
    )[-1]


def _map(o):
    return tf.map_fn(lambda row: row * 2 + tf.reduce_sum(row), o.real())


def _scan(o):
    x = o.real()
    if o.number(2):
        return tf.scan(lambda a, b: 0.5 * a + b, x)
    both = (x, o.real())
    return tf.scan(lambda a, b: 0.5 * a + b[0] * b[1], both, x[0])


def _pad(o):
    x = o.real()
    paddings = [[0, 0]] * len(x.shape)
    paddings[o.axis(x)] = o.of([[1, 0], [0, 1], [0, 0]])
    return tf.pad(x, paddings)


def _tile(o):
    x = o.any()
    times = [1] * len(x.shape)
    times[o.axis(x)] = o.of([1, 2])
    return tf.tile(x, times)


def _tensor_of_size(o):
    y = o.any()
    function = o.of([tf.zeros, tf.ones, lambda s: tf.fill(s, 0.5)])
    return tf.cast(function(tf.shape(y)), tf.float64) + o.of(
        [0.0, tf.constant(WEIGHTS[0, 0])]
    )


def _of_places(o):
    n = tf.shape(o.any())[0]
    return o.of([tf.range, tf.eye, lambda n: tf.one_hot(tf.range(n) % 3, 3)])(n)


def _segments(o):
    x, labels = o.real(), o.tensors[3]
    function = o.of(
        [
            lambda: tf.math.unsorted_segment_sum(x, labels, FEATURES),
            lambda: tf.math.unsorted_segment_max(x, labels, FEATURES),
            lambda: tf.math.unsorted_segment_mean(x, labels, FEATURES),
            lambda: tf.math.segment_sum(x, tf.sort(labels)),
            lambda: tf.math.bincount(labels, minlength=FEATURES),
            lambda: tf.dynamic_partition(x, labels, FEATURES)[1],
            lambda: tf.scatter_nd(labels[:, None], x, [3, *x.shape[1:]]),
            lambda: tf.tensor_scatter_nd_update(x, [[0]], x[:1] * 0),
            lambda: tf.tensor_scatter_nd_add(
                tf.zeros([3, *x.shape[1:]], x.dtype), labels[:, None], x
            ),
            lambda: tf.unique(labels)[0],
            lambda: tf.unique(labels)[1],
            lambda: tf.unique_with_counts(labels)[2],
            lambda: tf.gather_nd(x, [[0]]),
            lambda: tf.gather_nd(x, labels[:, None] * 0),
            lambda: tf.math.confusion_matrix(labels, labels, FEATURES),
        ]
    )
    return function()


def _by_labels(o):
    x, labels = o.any(), o.tensors[3]
    function = o.of(
        [
            lambda: tf.gather(tf.constant(WEIGHTS), labels),
            lambda: tf.one_hot(labels, FEATURES),
            lambda: tf.gather(x, labels, axis=1, batch_dims=1),
            lambda: tf.gather(x, labels % 2),
            lambda: tf.gather(x, tf.argsort(labels, stable=True)),
            lambda: tf.repeat(x, labels, axis=0),
            lambda: tf.repeat(x, 2, axis=0),
            lambda: tf.reverse_sequence(x, labels + 1, 1, 0),
            lambda: tf.sequence_mask(labels, FEATURES),
            lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x),
            lambda: tf.nn.in_top_k(labels, tf.cast(x, tf.float32), 2),
            lambda: tf.nn.embedding_lookup(tf.constant(WEIGHTS), labels),
        ]
    )
    return function()


def _mask(o):
    x = o.any()
    keep = o.tensors[2] > 0.4
    function = o.of(
        [
            lambda: tf.boolean_mask(x, keep),
            lambda: tf.where(keep),
            lambda: tf.where(keep, x, x * 0),
            lambda: tf.where(keep[:, None], x, 1),
            lambda: tf.where(o.real() > 0, o.real(), 0.5),
            lambda: tf.where(tf.reduce_any(keep), x, x * 0),
        ]
    )
    return function()


def _ordered(o):
    x = o.real()
    axis = o.axis(x)
    function = o.of(
        [
            lambda: tf.cumsum(x, axis),
            lambda: tf.cumsum(x, axis, reverse=True, exclusive=True),
            lambda: tf.math.cumprod(x, axis),
            lambda: tf.sort(x, axis),
            lambda: tf.argsort(x, axis),
            lambda: tf.argmax(x, axis),
            lambda: tf.nn.softmax(x, axis),
            lambda: tf.nn.log_softmax(x, axis),
            lambda: tf.nn.l2_normalize(x, axis),
            lambda: tf.nn.moments(x, axis)[1],
            lambda: tf.math.top_k(x, 2)[0],
            lambda: tf.math.top_k(x, 1)[1],
            lambda: tf.reverse(x, [axis]),
            lambda: tf.roll(x, 1, axis),
            lambda: tf.math.cumulative_logsumexp(x, axis),
            lambda: tf.reduce_all(x > -0.5, axis),
            lambda: tf.searchsorted(tf.sort(tf.reshape(x, [-1])), [0.0]),
            lambda: tf.clip_by_norm(x, 1.0),
            lambda: tf.clip_by_norm(x, 1.0, axis),
        ]
    )
    return function()


def _joined(o):
    x, y = o.real(), o.real()
    function = o.of(
        [
            lambda: tf.concat([x, y], o.axis(x)),
            lambda: tf.concat([x, x * 2], 0),
            lambda: tf.concat([x, x * 2, x + 1], 0),
            lambda: tf.concat([o.pairs, x], 0),
            lambda: tf.concat([x, tf.reshape(o.tensors[1], [-1, FEATURES])], 0),
            lambda: tf.concat([tf.concat([x, o.pairs], 0), y], 0),
            lambda: tf.split(x, 2, 0)[o.number(2)],
            lambda: tf.split(x, 3, o.axis(x))[2],
            lambda: tf.stack([x, y], o.number(len(x.shape) + 1)),
            lambda: tf.split(x, [1, -1], o.axis(x))[1],
            lambda: tf.unstack(x, axis=-1)[0],
            lambda: tf.unstack(x, num=1, axis=0)[0],
            lambda: tf.expand_dims(x, o.number(len(x.shape) + 1)),
            lambda: tf.squeeze(x),
            lambda: tf.squeeze(x, o.axis(x)),
            lambda: tf.broadcast_to(x, tf.shape(y)),
            lambda: tf.broadcast_to(x, [2, *tf.unstack(tf.shape(x))]),
            lambda: tf.tensordot(x, y, 1),
            lambda: tf.tensordot(x, y, [[0], [0]]),
            lambda: tf.add_n([x, y]),
            lambda: tf.meshgrid(x, y)[o.number(2)],
        ]
    )
    return function()


def _of_layers(o):
    images = o.of([o.tensors[1], o.real()])
    if len(images.shape) != 3:
        images = o.tensors[1]
    function = o.of(
        [
            lambda: tf.nn.conv1d(images, tf.constant(WEIGHTS[None]), 1, "SAME"),
            lambda: tf.nn.max_pool1d(images, 2, 1, "VALID"),
            lambda: tf.nn.avg_pool1d(images, 2, 1, "SAME"),
            lambda: tf.space_to_batch(images[..., None], [1, 3], [[0, 0]] * 2),
            lambda: tf.nn.bias_add(images, WEIGHTS[0]),
            lambda: tf.linalg.diag_part(images),
            lambda: tf.linalg.band_part(images, 0, -1),
            lambda: tf.linalg.matrix_transpose(images),
            lambda: tf.image.resize(images[..., None], [2, 2]),
            lambda: tf.linalg.inv(
                tf.matmul(images, images, transpose_b=True)
                + tf.eye(2, dtype=tf.float64)
            ),
            lambda: tf.function(lambda z: z * tf.reduce_sum(z, 0))(images),
            lambda: tf.function(lambda z: tf.reduce_mean(z, 0))(images),
        ]
    )
    return function()


def _of_matrices(o):
    x = o.real()
    function = o.of(
        [
            lambda: tf.linalg.diag(x),
            lambda: tf.linalg.diag_part(x),
            lambda: tf.linalg.band_part(x, 0, -1),
            lambda: tf.linalg.trace(x),
            lambda: tf.linalg.det(x),
            lambda: tf.linalg.set_diag(x, x[:, 0]),
            lambda: tf.linalg.eigvalsh(x),
            lambda: tf.nn.softmax_cross_entropy_with_logits(x, x),
            lambda: tf.matmul(x, tf.transpose(x)),
            lambda: tf.nn.l2_loss(x),
        ]
    )
    return function()


def _gradient(o):
    y, x = o.real(), o.any()
    found = tf.gradients(o.of([y, tf.reduce_sum(y), tf.reduce_mean(y)]), x)[0]
    return None if found is None else tf.convert_to_tensor(found)


def _repeated(o):
    """Returns the derivative by a tensor that meets a larger one."""
    x, y = o.real(), o.real()
    weights = tf.constant(WEIGHTS, tf.float64)
    one = o.of([weights[0], weights[0, 0], x[:, :1], x[..., None], x[:1], x])
    result = tf.square(one * o.of([y, y[:, None], y[..., None], y[0]]))
    found = tf.gradients(o.of([result, tf.reduce_mean(result)]), one)[0]
    return found if o.of([True, False]) else tf.square(found)


def _counts(o):
    x = o.any()
    shape = tf.shape(x)
    function = o.of(
        [
            lambda: tf.size(x),
            lambda: shape,
            lambda: shape[0],
            lambda: shape[-1],
            lambda: shape[1:],
            lambda: shape[::-1],
            lambda: tf.reduce_prod(shape),
            lambda: tf.reduce_prod(shape[:-1]),
            lambda: shape * 2,
            lambda: tf.concat([shape, [2]], 0),
            lambda: tf.stack([shape[0], 3]),
            lambda: tf.stack([shape[0], shape[0]]),
            lambda: tf.cast(shape[0], tf.float64),
            lambda: shape[0] // 2,
            lambda: shape[0] - 1,
            lambda: 1 / shape[0],
            lambda: tf.rank(x),
        ]
    )
    return function()


def _cast(o):
    x = o.any()
    return tf.cast(x, o.of([tf.int32, tf.bool, tf.float64, tf.int64]))


def _weights(o):
    return tf.constant(o.of([WEIGHTS, WEIGHTS[0], WEIGHTS[0, 0]]))


OPERATIONS = {
    name.strip("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and callable(function) and name[1] != "_"
}


def traced(program):
    """Returns a graph, its inputs, and the tensors of a program in it."""
    graph = tf.__internal__.FuncGraph("program")
    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(
                tf.as_dtype(each.dtype), [None, *each.shape[1:]], name
            )
            for name, each in DATA.items()
        ]
        *tensors, pairs = inputs
        for name, numbers in program:
            # A draw that does not fit the shapes says nothing.
            try:
                found = OPERATIONS[name](Operands(tensors, numbers, pairs))
            except (ValueError, TypeError, IndexError, tf.errors.OpError):
                continue
            except LookupError:  # an operation without a gradient
                continue
            if tf.is_tensor(found) and found.shape.rank is not None:
                tensors.append(found)
    return graph, inputs, tensors[len(inputs) - 1 :]


def check(program):
    """Compares the kinds of a program's tensors with their numbers."""
    graph, inputs, tensors = traced(program)
    with graph.as_default():
        kinds = KindInference(inputs, [], [])
    with graph.as_default(), unoptimized_session(graph) as session:
        run = Runs(session, inputs)
        for tensor in tensors:
            computed = run(tensor)
            if computed is None:
                continue
            what = f"{kinds.of(tensor)} of {tensor.op.type} {tensor.shape}"
            compare(tensor, kinds.of(tensor), computed, run, what)
            if kinds.of(tensor).role is not Role.OPAQUE:
                compare_derived(tensor, computed[1], run, kinds, what)
    return [kinds.of(tensor) for tensor in tensors]


class Runs:
    """Computes tensors for the parts of the batch, and for all of it."""

    def __init__(self, session, inputs):
        self.session = session
        parts = zip(
            *(
                np.split(each, STARTS * (len(each) // BATCH))
                for each in DATA.values()
            ),
            strict=True,
        )
        self._feeds = [
            dict(zip((x.name for x in inputs), values, strict=True))
            for values in (*parts, DATA.values())
        ]

    def of_batch(self):
        return dict(self._feeds[-1])

    def __call__(self, tensor):
        """Returns the values of the parts and of the batch, if there are."""
        try:
            *parts, whole = (
                self.session.run(tensor, feed) for feed in self._feeds
            )
        except tf.errors.OpError:  # as a slice beyond the end
            return None
        return parts, whole


def numbers_of(tensor, kind, computed, run):
    """Returns a tensor in numbers, and the blocks that it was joined of."""
    blocks = blocks_of(tensor, kind)
    if blocks is not None:
        blocks = list(zip(*(run(each)[0] for each in blocks), strict=True))
    return Numbers(*computed, PARTS, blocks)


def compare(tensor, kind, computed, run, what):
    wrong = fault(kind, numbers_of(tensor, kind, computed, run))
    assert not wrong, f"{what}: {wrong}"


def compare_derived(tensor, whole, run, kinds, what):
    """Computes a tensor once more, from what the parts are combined to."""
    try:
        found = derivation_of(tensor, kinds)
    except NotDerivable:
        return
    known, feed = {}, run.of_batch()
    for key, source in found.sources.items():
        kind = kinds.of(source)
        if kind.role is Role.EQUAL:
            known[key] = source
            continue
        computed = run(source)
        if computed is None:
            return
        value = combined(kind, numbers_of(source, kind, computed, run))
        known[key] = tf.compat.v1.placeholder(source.dtype, source.shape)
        feed[known[key].name] = value
    got = run.session.run(found.recomputed(known), feed)
    assert are_close(got, whole), f"{what}, computed once more"


PROGRAMS = st.lists(
    st.tuples(
        st.sampled_from(sorted(OPERATIONS)),
        st.lists(st.integers(0, 59), min_size=5, max_size=5),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=max(100, settings().max_examples))
@given(PROGRAMS)
def test_kinds_of_drawn_programs(program):
    check(program)


@pytest.mark.parametrize(
    ("which", "role"), [(0, Role.TOTAL), (1, Role.TOTAL), (2, Role.ROWS)]
)
def test_derivatives_by_what_is_repeated_are_followed(which, role):
    (*_, kind) = check([("repeated", [3, 3, which])])
    assert kind.role is role


def test_a_sum_of_turns_is_a_sum_over_samples():
    (*_, kind) = check([("summed", [0])])
    assert kind.role is Role.TOTAL


def test_a_loop_of_many_variables_is_followed():
    (*_, kind) = check([("shifted", [0])])
    assert kind.role is Role.MEAN


def test_what_a_loop_makes_of_zeros_is_rows():
    (*_, kind) = check([("recurrent", [0])])
    assert kind.role is Role.ROWS
    assert not kind.is_out_of_order
