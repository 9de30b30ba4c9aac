"""Layers of users' own: which of them mix samples is found out by running them.

Each function stands for the `call` of a layer. What warns in `fit`, and that it
does, is tested in `test_global_batch.py`.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from keras import ops
from models import assert_same_training

import keras_conflux as kc
from keras_conflux._batch_analysis import KindInference
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import OwnGradients
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import rows_by_trial

COUNTER = tf.Variable(0.0)
"""The number of steps, as a warm-up counts them."""
KERNEL = tf.reshape(tf.sin(tf.range(64.0)), [8, 8])
SMALL = KERNEL[:4, :4]


def _deviation(x):
    return tf.reduce_mean(tf.math.reduce_std(x, 0))


def _beside(x, statistic):
    return tf.concat([x, statistic], -1)


def _discriminated(x):
    distances = ops.sum(ops.abs(x[:, None] - x[None]), -1)
    return _beside(x, ops.sum(ops.exp(-distances), 1, keepdims=True))


def _ranks(x):
    found = tf.unique(tf.cast(x[:, 0] * 2, tf.int32))[0]
    return x * tf.cast(tf.shape(found)[0], x.dtype)


def _groups_of_four(x):
    groups = tf.reshape(x[: tf.shape(x)[0] // 4 * 4], [4, -1, 8])
    deviation = tf.reduce_mean(tf.math.reduce_std(groups, 0))
    return _beside(x, tf.ones_like(x[:, :1]) * deviation)


def _solved_by_all(x):
    matrices = tf.linalg.diag(1.0 + x * x)
    found = tf.linalg.triangular_solve(matrices, x[:, None, :, None])
    return tf.reduce_mean(found, 1)[..., 0]


def _balanced(x):
    """Takes turns until all samples hardly change, or eight."""

    def turn(i, h, gap):
        new = tf.tanh(0.2 * h @ KERNEL + x)
        return i + 1, new, tf.norm(new - h)

    found = tf.while_loop(
        lambda i, h, gap: (i < 8) & (gap > 0.1), turn, (0, x, tf.norm(x) + 1)
    )
    return found[1]


def _halted(x):
    """Takes turns until each sample has stopped by itself."""

    def turn(i, h, left):
        h += left[:, None] * tf.tanh(h @ KERNEL)
        return i + 1, h, left * tf.cast(h[:, 0] < 0, x.dtype)

    found = tf.while_loop(
        lambda i, h, left: (i < 8) & tf.reduce_any(left > 0),
        turn,
        (0, x, tf.ones_like(x[:, 0])),
    )
    return found[1]


def _damped(x, values):
    """Returns smaller values if any sample is very large."""
    return tf.cond(tf.reduce_any(x > 3e4), lambda: 0.1 * values, lambda: values)


def _damped_in_turns(x):
    return tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, _damped(h, h + 1.0)), (0, x)
    )[1]


def _damped_by_a_sum(x):
    """Adds samples up, one after another."""

    def turn(before, row):
        return before[0] + row[0], _damped(before[0], row)

    first = tf.zeros([], x.dtype), tf.zeros_like(x[0])
    return tf.scan(turn, x, first)[1]


def _attended(x):
    return tf.nn.softmax(x @ tf.transpose(x)) @ x


@tf.function
def _later(count):
    return tf.where(count > 8, count, 0.0)


def _filled_by_others(x):
    missing = tf.math.is_nan(x)
    filled = tf.where(missing, 0.0, x)
    return tf.where(missing, _attended(filled), filled)


def _attended_in_groups(x):
    group = tf.cast(x[:, 0] * 100, tf.int32)
    same = (group[:, None] == group) & (group > 9000)
    same |= tf.eye(tf.shape(x)[0]) > 0
    return tf.nn.softmax(tf.where(same, x @ tf.transpose(x), -1e9)) @ x


MIXING = {
    "later steps": lambda x: tf.where(
        COUNTER.read_value() > 8, _attended(x), x
    ),
    "a gate": lambda x: x + tf.nn.relu(COUNTER.read_value() - 8) * _attended(x),
    "little": lambda x: x + 1e-4 * _attended(x),
    "a gate of the larger one": lambda x: (
        x + tf.maximum(COUNTER.read_value() - 8, 0) * _attended(x)
    ),
    "a gate that opens slowly": lambda x: (
        x + tf.tanh(COUNTER.read_value() / 1e5) * _attended(x)
    ),
    "later steps in a function": lambda x: (
        x + _later(COUNTER.read_value()) * _attended(x)
    ),
    "missing values that others fill": _filled_by_others,
    "groups": _attended_in_groups,
    "large values in a function": tf.function(lambda x: _damped(x, x)),
    "large values in turns": _damped_in_turns,
    "large values for a sample": lambda x: tf.map_fn(
        lambda row: _damped(x, row), x
    ),
    "large values of earlier samples": _damped_by_a_sum,
    "a large batch": lambda x: tf.cond(
        tf.shape(x)[0] > 99, lambda: 0.1 * x, lambda: x
    ),
    "missing values": lambda x: tf.cond(
        tf.reduce_any(tf.math.is_nan(x)), lambda: tf.zeros_like(x), lambda: x
    ),
    "large values": lambda x: ops.cond(
        ops.max(ops.abs(x)) > 300, lambda: x / ops.max(x), lambda: x
    ),
    "turns until a norm is small": _balanced,
    "center": lambda x: x - ops.mean(x, 0),
    "standardize": lambda x: (x - ops.mean(x, 0)) / (ops.std(x, 0) + 1e-3),
    "moments": lambda x: tf.nn.batch_normalization(
        x, *tf.nn.moments(x, [0]), None, None, 1e-3
    ),
    "scale by the largest": lambda x: x / ops.max(ops.abs(x)),
    "scale by a mean": lambda x: x * ops.mean(x),
    "deviation, broadcast": lambda x: _beside(
        x, tf.broadcast_to(_deviation(x)[None, None], [tf.shape(x)[0], 1])
    ),
    "deviation, tiled": lambda x: _beside(
        x, tf.tile(_deviation(x)[None, None], [tf.shape(x)[0], 1])
    ),
    "deviation, filled": lambda x: _beside(
        x, tf.fill([tf.shape(x)[0], 1], _deviation(x))
    ),
    "deviation, repeated": lambda x: _beside(
        x, tf.repeat(_deviation(x)[None, None], tf.shape(x)[0], 0)
    ),
    "deviation, times ones": lambda x: _beside(
        x, ops.ones_like(x[:, :1]) * _deviation(x)
    ),
    "deviation of groups": _groups_of_four,
    "softmax over the batch": lambda x: ops.softmax(x, axis=0),
    "attention over the batch": lambda x: ops.matmul(
        ops.softmax(ops.matmul(x, ops.transpose(x)), -1), x
    ),
    "minibatch discrimination": _discriminated,
    "cumulative sum": lambda x: ops.cumsum(x, axis=0),
    "flip": lambda x: x + ops.flip(x, 0),
    "roll": lambda x: x + ops.roll(x, 1, axis=0),
    "sort": lambda x: ops.sort(x, 0),
    "first row": lambda x: x - x[:1],
    "numbers of a constant seed": lambda x: (
        x + tf.random.stateless_normal(tf.shape(x), [1, 2])
    ),
    "sorted order": lambda x: x + tf.gather(x, tf.argsort(x[:, 0])),
    "norm of columns": lambda x: tf.math.l2_normalize(x, 0),
    "norm": lambda x: x / ops.norm(x),
    "quantized": lambda x: tf.quantization.fake_quant_with_min_max_vars(
        x, tf.reduce_min(x), tf.reduce_max(x)
    ),
    "clipped by a quantile": lambda x: ops.minimum(x, ops.quantile(x, 0.8)),
    "clipped by a norm": lambda x: tf.clip_by_norm(x, 5.0),
    "place among many": lambda x: tf.sort(
        tf.one_hot(tf.argmin(x @ tf.transpose(x), 1), 8), 1
    ),
    "number of kinds": _ranks,
    "as many features as samples": lambda x: _beside(
        x, tf.tile(tf.linalg.diag_part(x)[None], [tf.shape(x)[0], 1])
    ),
    "branch by a mean": lambda x: tf.cond(
        tf.reduce_mean(x) > 0.02, lambda: x * 2.0, lambda: x
    ),
    "mask by a mean": lambda x: tf.where(x > tf.reduce_mean(x, 0), x, 0.0),
    "constant deviation": lambda x: (
        x / (tf.stop_gradient(tf.math.reduce_std(x)) + 0.1)
    ),
    "best of the batch": lambda x: (
        x * tf.cast(x[:, :1] >= tf.math.top_k(x[:, 0], 2).values[-1], x.dtype)
    ),
    "products of features": lambda x: x @ tf.einsum("bi,bj->ij", x, x),
    "equations of all": _solved_by_all,
    "whitening": lambda x: x @ tf.linalg.inv(tf.transpose(x) @ x + tf.eye(8)),
}


def _capsules(x):
    parts = tf.reshape(x, [-1, 2, 4])
    logits = tf.zeros([tf.shape(x)[0], 2])
    for _ in range(3):
        weights = tf.nn.softmax(logits)
        out = tf.reduce_sum(weights[..., None] * parts, 1)
        logits += tf.reduce_sum(parts * out[:, None], -1)
    return tf.concat([out, out], -1)


def _scanned(x):
    steps = tf.transpose(tf.reshape(x, [-1, 4, 2]), [1, 0, 2])
    states = tf.scan(lambda a, b: tf.tanh(a + b @ SMALL[:2, :2]), steps)
    return tf.reshape(tf.transpose(states, [1, 0, 2]), [-1, 8])


def _partitioned(x):
    kinds = tf.cast(x[:, 0] > 0, tf.int32)
    one, other = tf.dynamic_partition(x, kinds, 2)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), kinds, 2)
    return tf.dynamic_stitch(places, [one * 2.0, tf.tanh(other)])


def _chosen(x):
    chosen = x[:, 0] > 0
    places = tf.cast(tf.where(chosen), tf.int32)
    added = tf.matmul(tf.boolean_mask(x, chosen), KERNEL)
    return tf.tensor_scatter_nd_add(x, places, added)


def _twice(x):
    one, other = tf.split(tf.tanh(tf.concat([x, -x], 0) @ KERNEL), 2)
    return one * other


def _ragged(x):
    lengths = tf.cast(tf.abs(x[:, 0]) * 3, tf.int64) + 1
    rows = tf.RaggedTensor.from_tensor(x, lengths=lengths)
    return tf.reduce_mean(rows, 1)[:, None] * x


def _quantized(x):
    distances = tf.reduce_sum((x[:, None] - KERNEL[None]) ** 2, -1)
    return x + tf.gather(KERNEL, tf.argmin(distances, -1))


def _own_place(x):
    actions = tf.argmax(x, -1, output_type=tf.int32)
    places = tf.range(tf.shape(x)[0])
    return tf.gather_nd(x, tf.stack([places, actions], 1))[:, None]


def _inverse(x):
    matrices = x[:, :4, None] * x[:, None, 4:] + 3.0 * tf.eye(4)
    return tf.linalg.solve(matrices, x[:, :4, None])[..., 0]


def _sampled_bilinearly(x):
    """As spatial transformers do, by four corners of each place."""
    image = tf.reshape(x, [-1, 2, 4])
    size = tf.shape(image)[0]
    places = tf.tanh(image) * 0.4 + 0.5
    first = tf.cast(places, tf.int32)
    sample = tf.tile(tf.range(size)[:, None, None], [1, 2, 4])
    found = 0.0
    for corner in range(4):
        row, column = first + corner % 2, first + corner // 2
        at = tf.stack([sample, tf.clip_by_value(row, 0, 1), column], 3)
        weight = places - tf.cast(row + column, tf.float32)
        found += weight * tf.gather_nd(image, at)
    return tf.reshape(found, [-1, 8])


def _sampled_hierarchically(x):
    """As radiance fields do. At 1, the place jumps by a rounding."""
    weights = tf.nn.softplus(x)
    shares = weights / tf.reduce_sum(weights, -1, keepdims=True)
    sums = tf.cumsum(shares, -1)
    wanted = tf.tile(tf.linspace(0.0, 1.0, 8)[None], [tf.shape(x)[0], 1])
    at = tf.searchsorted(sums, wanted, side="right")
    return wanted - tf.gather(sums, tf.minimum(at, 7), batch_dims=1)


def _where(is_other, value, x):
    """Each number that is another one becomes a value."""
    found = tf.map_fn(tf.identity, x)
    return tf.where(is_other(found), value, found)


APART = {
    "bilinear samples": _sampled_bilinearly,
    "hierarchical samples": _sampled_hierarchically,
    "capsules": _capsules,
    "scan": _scanned,
    "loop": lambda x: tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ KERNEL)), (0, x)
    )[1],
    "windows": lambda x: tf.reshape(
        tf.reshape(tf.reshape(x, [-1, 2, 4]), [-1, 4]) @ SMALL, [-1, 8]
    ),
    "repeated": lambda x: tf.reduce_mean(
        tf.reshape(tf.nn.relu(tf.repeat(x, 3, 0) @ KERNEL), [-1, 3, 8]), 1
    ),
    "quantization": _quantized,
    "map": lambda x: tf.map_fn(lambda row: tf.linalg.matvec(KERNEL, row), x),
    "vectorized map": lambda x: tf.vectorized_map(
        lambda row: tf.tanh(tf.linalg.matvec(KERNEL, row)), x
    ),
    "chosen samples": _chosen,
    "partitioned": _partitioned,
    "both in one": _twice,
    "attention of each": lambda x: ops.matmul(
        ops.softmax(x[:, :, None] * x[:, None, :], -1), x[:, :, None]
    )[..., 0],
    "transposed": lambda x: tf.transpose(KERNEL @ tf.transpose(x)),
    "Fourier": lambda x: tf.math.real(
        tf.signal.ifft(tf.signal.fft(tf.cast(x, tf.complex64)) * 2.0)
    ),
    "sorted features": lambda x: tf.sort(x, -1) + tf.cumsum(x, -1),
    "best features": lambda x: tf.gather(
        x, tf.math.top_k(x, 8).indices, batch_dims=1
    ),
    "own places": _own_place,
    "inverse": _inverse,
    "sparse": lambda x: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(tf.nn.relu(x)), KERNEL
    ),
    "ragged": _ragged,
    "turns until each has stopped": _halted,
    "branches of each sample": lambda x: tf.map_fn(
        lambda row: tf.cond(
            row[0] > 0, lambda: row * KERNEL[0, 0], lambda: row
        ),
        x,
    ),
    "no missing values": lambda x: _where(tf.math.is_nan, 0.0, _twice(x)),
    "no zeros": lambda x: _where(lambda y: tf.equal(y, 0), 1.0, x),
    "branch of no samples": lambda x: tf.cond(
        tf.shape(x)[0] > 0, lambda: tf.tanh(x), lambda: x
    ),
    "branch by a weight": lambda x: tf.cond(
        tf.reduce_sum(KERNEL) > 0, lambda: tf.tanh(x), lambda: x
    ),
}


def _is_apart(function):
    graph = tf.__internal__.FuncGraph("layer")
    with graph.as_default():
        x = tf.compat.v1.placeholder("float32", [None, 8])
        kinds = KindInference([x], [], lambda handle: False)
        output = tf.convert_to_tensor(function(x))
        kind = kinds.of(output)
        if kind.role is Role.ROWS and not kind.is_out_of_order:
            return True
        try:
            return rows_by_trial(output, kinds, [x]) is not None
        except NotDerivable:  # which warns as well
            return False


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_is_found(name):
    assert not _is_apart(MIXING[name])


def test_imaginary_parts_are_compared():
    assert not _is_apart(lambda x: tf.complex(x, _attended(x)))


@pytest.mark.parametrize("name", APART)
def test_a_layer_that_treats_samples_apart_is_found(name):
    assert _is_apart(APART[name])


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: ops.take(KERNEL, x, axis=0), "int32"),
        (lambda x: tf.reduce_logsumexp(x, 1), "float32"),
        (ops.nan_to_num, "float32"),
        (keras.layers.Masking(), "float32"),
    ],
)
def test_values_that_are_rarely_drawn_are_tried(function, dtype):
    """Else replicas would compute such layers for the samples of all."""
    graph = tf.__internal__.FuncGraph("layer")
    with graph.as_default():
        x = tf.compat.v1.placeholder(dtype, [None, 8])
        kinds = KindInference([x], [], lambda handle: False)
        assert rows_by_trial(function(x), kinds, [x]) is not None


class OwnLayer(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def trained(function, count):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(8, use_bias=False),
            OwnLayer(function),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", jit_compile=False)
    if count:
        kc.replicate(model, count)
    x = np.random.default_rng(0).normal(size=(11, 8))
    logs = model.fit(x, x[:, :1], 11, epochs=2, shuffle=False, verbose=0)
    return model, logs


def _filled_in(x):
    """Fills missing values by the mean of those that are there."""
    missing = tf.abs(x) < 0.02
    present = tf.cast(~missing, x.dtype)
    mean = tf.reduce_sum(x * present, 0) / (tf.reduce_sum(present, 0) + 1)
    return tf.where(missing & (x > -0.02), mean + tf.zeros_like(x), x)


UNTRIED = {
    "codes below zero": lambda x: tf.where(
        tf.cast(x * 1e4, tf.int32) % 7 == 5, tf.reduce_mean(x, 0), x
    ),
    "extremes": lambda x: x / tf.maximum(1e-3, tf.reduce_max(tf.abs(x)) - 200),
    "missing values": _filled_in,
    "large batches": lambda x: tf.where(
        tf.shape(x)[0] < 3, x, tf.where(tf.shape(x)[0] < 12, x - _mean(x), x)
    ),
    "complex": lambda x: tf.abs(
        tf.complex(x, 2 * x) - tf.reduce_mean(tf.complex(x, x * x), 0)
    ),
    "little": lambda x: x + 2e-5 * tf.reduce_mean(1e3 * x, 0),
}
"""Most mix samples only where drawn ones hardly come."""


def _mean(x):
    return tf.reduce_mean(x, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", UNTRIED)
def test_rules_are_believed_before_trials(name):
    one, first = trained(UNTRIED[name], None)
    many, second = trained(UNTRIED[name], MANY)
    assert_same_training(one, many, first, second)


@several
def test_rules_are_believed_where_nothing_is_computed_once_more():
    def function(x):
        mixed = UNTRIED["extremes"](x)
        return tf.while_loop(
            lambda i, h: i < 1, lambda i, h: (i + 1, tf.tanh(h)), (0, mixed)
        )[1]

    with pytest.warns(kc.ConfluxWarning, match="depends on other samples"):
        trained(function, MANY)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [x for x in MIXING if "as many" not in x])
def test_a_layer_that_mixes_is_that_of_one_device_or_warns(name):
    one, first = trained(MIXING[name], None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        many, second = trained(MIXING[name], MANY)
    if not any(issubclass(x.category, kc.ConfluxWarning) for x in caught):
        assert_same_training(one, many, first, second)


def test_a_trial_tells_how_many_rows_a_sample_has():
    graph = tf.__internal__.FuncGraph("layer")
    with graph.as_default():
        x = tf.compat.v1.placeholder("float32", [None, 8])
        kinds = KindInference([x], [], lambda handle: False)
        found = [
            rows_by_trial(each, kinds, [x]).entries.name
            for each in (
                tf.map_fn(tf.tanh, x),
                tf.repeat(tf.map_fn(tf.tanh, x), 2, 0),
                tf.boolean_mask(tf.map_fn(tf.tanh, x), x[:, 0] > 0),
            )
        ]
    assert found == ["ONE", "SAME", "VARYING"]


def _with_gradient(gradient):
    @tf.custom_gradient
    def function(x):
        return tf.identity(x), lambda upstream: gradient(upstream, x)

    return function


GRADIENTS_THAT_MIX = {
    "normalized": lambda d, x: d / (tf.norm(d) + 1e-6),
    "clipped by a norm": lambda d, x: tf.clip_by_norm(d, 0.05),
    "clipped by a large norm": lambda d, x: tf.clip_by_norm(d, 200.0),
    "centered": lambda d, x: d - tf.reduce_mean(d, 0),
    "over the batch size": lambda d, x: d / tf.cast(tf.shape(d)[0], d.dtype),
    "scaled by a deviation": lambda d, x: d * tf.math.reduce_std(x),
}
GRADIENTS_APART = {
    "the same": lambda d, x: d,
    "reversed": lambda d, x: -0.3 * d,
    "clipped": lambda d, x: tf.clip_by_value(d, -0.1, 0.1),
    "rows clipped by a norm": lambda d, x: tf.clip_by_norm(d, 0.05, [1]),
    "of a step": lambda d, x: d * tf.cast(tf.abs(x) < 1, d.dtype),
    "of a sigmoid": lambda d, x: d * tf.sigmoid(x) * (1 - tf.sigmoid(x)),
    "where it is small": lambda d, x: tf.where(tf.abs(x) < 1, d, 0.0),
    "none": lambda d, x: None,
}
GRADIENTS_OF_WEIGHTS_THAT_MIX = ("normalized", "clipped by a norm", "clipped")
GRADIENTS_OF_WEIGHTS_APART = (
    *("the same", "reversed", "of a step", "none", "where it is small"),
)


def _does_gradient_mix(function, of_weights=False):
    graph = tf.__internal__.FuncGraph("layer")
    with graph.as_default():
        x = tf.compat.v1.placeholder("float32", [None, 8])
        kinds = KindInference([x], [], lambda handle: False)
        output = x @ function(KERNEL) if of_weights else function(x)
        gradients = OwnGradients(kinds)
        (found,) = gradients.between([output], [x])
        return gradients.mixes(found, [x])


@pytest.mark.parametrize("name", GRADIENTS_THAT_MIX)
def test_a_gradient_that_mixes_is_found(name):
    assert _does_gradient_mix(_with_gradient(GRADIENTS_THAT_MIX[name]))


@pytest.mark.parametrize("name", GRADIENTS_APART)
def test_a_gradient_that_treats_samples_apart_is_found(name):
    assert not _does_gradient_mix(_with_gradient(GRADIENTS_APART[name]))


def test_the_gradient_of_silu_does_not_mix():
    assert not _does_gradient_mix(tf.nn.silu)


PLACES = {
    "product of matrices": lambda f, x: f(
        tf.tensordot(tf.reshape(x, [-1, 2, 4]), SMALL, 1)
    ),
    "several rows of each": lambda f, x: tf.reshape(
        f(tf.reshape(x, [-1, 4]) @ SMALL), [-1, 8]
    ),
    "another axis": lambda f, x: tf.transpose(f(tf.transpose(x))),
    "several along another axis": lambda f, x: tf.reshape(
        tf.transpose(f(tf.transpose(tf.reshape(x, [-1, 4])))), [-1, 8]
    ),
    "open axes": lambda f, x: f(x[:, None] * x[:, : tf.size(x[0]) // 2, None]),
    "unknown operation": lambda f, x: f(tf.map_fn(tf.tanh, x)),
    "function": lambda f, x: tf.function(f)(x),
    "branch": lambda f, x: tf.cond(
        tf.reduce_sum(KERNEL) > 0, lambda: f(x), lambda: x
    ),
    "branch in a function": lambda f, x: tf.function(
        lambda x: PLACES["branch"](f, x * 2.0)
    )(x),
    "loop": lambda f, x: tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, f(h @ KERNEL)), (0, x)
    )[1],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_is_followed_wherever_it_is(place):
    def does_mix(function):
        return _does_gradient_mix(lambda x: PLACES[place](function, x))

    @tf.custom_gradient
    def centered(x):
        mean = tf.reduce_mean(x)
        return tf.identity(x), lambda d: d * mean

    assert not does_mix(tf.nn.silu)
    assert not does_mix(_with_gradient(GRADIENTS_APART["of a step"]))
    assert does_mix(_with_gradient(GRADIENTS_THAT_MIX["normalized"]))
    assert does_mix(centered)


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_in_a_loss_is_found_wherever_it_is(place):
    def does_mix(gradient):
        function = _with_gradient(gradient)
        graph = tf.__internal__.FuncGraph("loss")
        with graph.as_default():
            x = tf.compat.v1.placeholder("float32", [None, 8])
            kinds = KindInference([x], [], lambda handle: False)
            loss = tf.reduce_mean(PLACES[place](function, x))
            return id(loss) in OwnGradients(kinds).depending_on_mixed(loss)

    assert not does_mix(GRADIENTS_APART["clipped"])
    assert does_mix(GRADIENTS_THAT_MIX["normalized"])


def test_a_gradient_in_a_loop_over_samples():
    def does_mix(gradient):
        function = _with_gradient(gradient)
        return _does_gradient_mix(lambda x: tf.map_fn(function, x))

    assert not does_mix(GRADIENTS_APART["of a sigmoid"])
    with pytest.raises(NotDerivable):  # as it could be one of a batch
        does_mix(GRADIENTS_THAT_MIX["normalized"])


def test_a_gradient_of_rows_of_which_samples_have_some():
    with pytest.raises(NotDerivable):
        _does_gradient_mix(lambda x: tf.nn.silu(tf.boolean_mask(x, x > 0)))


@pytest.mark.parametrize("name", GRADIENTS_OF_WEIGHTS_THAT_MIX)
def test_a_gradient_of_weights_that_is_no_sum_is_found(name):
    gradient = (GRADIENTS_THAT_MIX | GRADIENTS_APART)[name]
    assert _does_gradient_mix(_with_gradient(gradient), of_weights=True)


@pytest.mark.parametrize("name", GRADIENTS_OF_WEIGHTS_APART)
def test_a_gradient_of_weights_that_is_a_sum_is_found(name):
    gradient = GRADIENTS_APART[name]
    assert not _does_gradient_mix(_with_gradient(gradient), of_weights=True)


def test_what_may_mix_derivatives_of_weights_is_not_believed_to_be_a_sum():
    assert _does_gradient_mix(
        _with_gradient(lambda d, x: tf.clip_by_value(d, -200.0, 200.0)),
        of_weights=True,
    )


def _in_python(d, x):
    found = tf.numpy_function(lambda a: a / (1 + abs(a)), [d], d.dtype)
    return tf.ensure_shape(found, d.shape)


def test_a_gradient_that_cannot_be_followed():
    with pytest.raises(NotDerivable):
        _does_gradient_mix(_with_gradient(_in_python))


class Slopes(keras.layers.Layer):
    def call(self, x):
        @tf.custom_gradient
        def function(x):
            return tf.identity(x), lambda d: _in_python(d, x)

        return function(x)


@several
def test_a_layer_whose_gradient_cannot_be_followed_warns():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8), Slopes(name="slopes")]
    )
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, 2)
    x = np.ones((8, 8))
    message = "the gradient that the layer 'slopes' .* cannot be followed"
    with pytest.warns(kc.ConfluxWarning, match=message) as caught:
        model.fit(x, x, verbose=0)
    (warning,) = [each for each in caught if "slopes" in str(each.message)]
    assert warning.filename == __file__


class Limited(keras.layers.Layer):
    """Scales a weight by the deviation of the batch, and limits it twice."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def build(self, shape):
        size = (shape[-1], 5)
        self.kernel = self.add_weight(shape=size)
        self.top = self.add_weight(shape=size, initializer="ones")

    def call(self, x):
        top = self.limit(0.6 * self.top)
        scaled = self.kernel / ops.std(x, 0)[:, None]
        scaled = ops.where(scaled > top, top, scaled)
        return x @ ops.where(scaled < -top, -top, scaled)


def assert_a_step_is_one_devices(make):
    """One step on the whole batch moves the weights as one device does."""

    def train(count):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
        if count:
            kc.replicate(model, count)
        x = np.random.default_rng(0).normal(size=(13, 6))
        return model, model.fit(x, x[:, :1], 13, verbose=0)

    (one, first), (many, second) = train(None), train(MANY)
    assert_same_training(one, many, first, second)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", [ops.square, ops.exp, lambda top: top - 0.1])
def test_a_source_that_is_made_of_another_counts_once(limit):
    assert_a_step_is_one_devices(
        lambda: keras.Sequential([keras.Input((6,)), Limited(limit)])
    )


class Straight(keras.layers.Layer):
    """Rounds what it scales by the deviation of the batch."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5))

    def call(self, x):
        @tf.custom_gradient
        def rounded(x):
            return tf.round(x * 8) / 8, lambda d: tf.where(x < 0.5, d, 0.0)

        return x @ rounded(self.kernel / ops.std(x, 0)[:, None])


class Around(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


def test_a_straight_gradient_of_a_statistic_is_one_devices():
    """And the gradient by which the package passes it on does not warn."""
    assert_a_step_is_one_devices(lambda: Around(Straight()))
