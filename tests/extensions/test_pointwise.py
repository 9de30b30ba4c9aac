"""A convolution of single positions is a product, and so are its gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_training
from test_attention import in_a_program

import keras_conflux as kc
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import Entries

CONVOLUTIONS = {
    "2D": ((6, 4, 3), (1, 1, 3, 5), {}),
    "2D, strides": ((6, 5, 3), (1, 1, 3, 5), {"strides": 2}),
    "2D, other strides": ((6, 5, 3), (1, 1, 3, 5), {"strides": (1, 3)}),
    "2D, same": ((6, 5, 3), (1, 1, 3, 5), {"strides": 2, "padding": "same"}),
    "1D": ((6, 3), (1, 3, 5), {"strides": 2}),
    "3D": ((4, 3, 2, 3), (1, 1, 1, 3, 5), {"strides": 2}),
}


def value_and_gradients(function, shape, kernels, in_xla, dtype="float32"):
    """Computes a function for any number of samples, and says how."""
    rng = np.random.default_rng(0)
    specs = [tf.TensorSpec(x, dtype) for x in ([None, *shape], *kernels)]

    @tf.function(autograph=False, input_signature=specs)
    def run(*operands):
        with in_a_program(in_xla), tf.GradientTape() as tape:
            tape.watch(operands)
            result = function(*operands)
            loss = tf.reduce_sum(tf.cast(tf.sin(result), "float32"))
        return result, *tape.gradient(loss, operands)

    arrays = [
        tf.cast(rng.normal(size=x), dtype) for x in ((7, *shape), *kernels)
    ]
    operations = run.get_concrete_function().graph.get_operations()
    return run(*arrays), [x.type for x in operations]


def assert_close(found, expected, rounding=1e-5):
    for one, other in zip(found, expected, strict=True):
        one, other = (tf.cast(x, "float64") for x in (one, other))
        atol = rounding * np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_results_are_those_of_keras(name):
    shape, kernel, options = CONVOLUTIONS[name]

    def conv(x, y):
        return keras.ops.conv(x, y, **options)

    found, types = value_and_gradients(conv, shape, [kernel], True)
    expected, _ = value_and_gradients(conv, shape, [kernel], False)
    assert_close(found, expected)
    assert not any("Conv" in each for each in types)
    assert types.count("MatMul") == 3


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [("float16", 2e-3), ("bfloat16", 2e-2), ("float64", 1e-12)],
)
def test_other_floats(dtype, rounding):
    shape, kernel, options = CONVOLUTIONS["2D, strides"]

    def conv(x, y):
        return keras.ops.conv(x, y, **options)

    found, _ = value_and_gradients(conv, shape, [kernel], True, dtype)
    assert {x.dtype for x in found} == {tf.as_dtype(dtype)}
    expected, _ = value_and_gradients(conv, shape, [kernel], False, "float64")
    assert_close(found, expected, rounding)


def graph_or_error(function, in_xla, *specs):
    """Returns the types of a graph's operations, or why there is no graph."""

    @tf.function(input_signature=[tf.TensorSpec(*x) for x in specs])
    def run(*operands):
        with in_a_program(in_xla):
            return function(*operands)

    try:
        graph = run.get_concrete_function().graph
    except (TypeError, ValueError) as error:
        return type(error), str(error).splitlines()[-1]
    return [x.type for x in graph.get_operations()]


@pytest.mark.parametrize(
    ("inputs", "kernel", "options"),
    [
        ([None, 6, 4, 3], [2, 1, 3, 5], {}),
        ([None, 6, 4, 4], [1, 1, 2, 6], {}),  # two groups
        ([None, 3, 6, 3], [1, 1, 3, 5], {"data_format": "channels_first"}),
        ([None, 6, 4, 3], [1, 1, 3, 5], {"padding": "causal"}),
        ([None, 6, 4, 3], [1, 1, 3, 5], {"dilation_rate": 2}),
        ([None, 6, 4, 3], [1, 1, 3, 5], {"strides": 2, "dilation_rate": 2}),
        ([None, 6, 4, 3], [1, 1, 3, 5], {"strides": [2]}),  # of each axis
        ([None, 6, 4, 3], [1, 1, 3, 5], {"strides": (1, 2, 2, 1)}),
        ([None, 6, 4, 3], [1, 1, 3, 5], {"strides": 0}),
        ([None, 6, 4, 3], [1, 1, 3, 5], {"strides": -1}),
        ([None, 6, 4, 3], [1, 1, 3, 5], {"strides": np.int64(2)}),
        ([2, None, 6, 4, 3], [1, 1, 3, 5], {}),  # two axes of samples
        ([None, None, 4, 3], [1, 1, 3, 5], {}),
        ([None, 6, 4, None], [1, 1, 3, 5], {}),
        ([None, 6, 4, 3], [1, 1, 3, None], {}),
        ([None, 6, 4, 3], None, {}),
        (None, [1, 1, 3, 5], {}),
    ],
)
def test_others_are_left_to_keras(inputs, kernel, options):
    def conv(x, y):
        return keras.ops.conv(x, y, **options)

    found, expected = (
        graph_or_error(conv, in_xla, [inputs], [kernel])
        for in_xla in (True, False)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("inputs", "kernel"), [("float32", "bfloat16"), ("int32", "int32")]
)
def test_other_dtypes_are_left_to_keras(inputs, kernel):
    found, expected = (
        graph_or_error(
            keras.ops.conv,
            in_xla,
            ([None, 6, 4, 3], inputs),
            ([1, 1, 3, 5], kernel),
        )
        for in_xla in (True, False)
    )
    assert [x for x in found if x != "Squeeze"] == [*expected]


def test_other_kernels_are_read_once():
    layer = keras.layers.Conv2D(5, (2, 1))
    layer.build((None, 6, 4, 3))
    found, expected = (
        graph_or_error(layer, in_xla, ([None, 6, 4, 3],))
        for in_xla in (True, False)
    )
    assert found == expected


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_results_and_gradients_are_rows_of_samples(name):
    shape, kernel, options = CONVOLUTIONS[name]
    with tf.__internal__.FuncGraph("step").as_default():
        x = tf.compat.v1.placeholder("float32", [None, *shape])
        kinds = KindInference([x], [], [])
        with in_a_program(kinds=kinds):
            result = keras.ops.conv(x, tf.ones(kernel), **options)
            gradient = tf.gradients(tf.sin(result), x)[0]
    found = [kinds.of(tensor) for tensor in (result, gradient)]
    assert all(kind.regular for kind in found)
    found = [kind.with_entries(Entries.ONE) for kind in found]
    assert found == [kinds.of(x)] * 2


def test_a_fixed_number_of_samples_is_left_to_keras():
    with tf.__internal__.FuncGraph("step").as_default():
        x = tf.compat.v1.placeholder("float32", [8, 6, 4, 3])
        with in_a_program(kinds=KindInference([x], [], [])):
            result = keras.ops.conv(x, tf.ones((1, 1, 3, 5)))
    assert result.op.type == "Conv2D"


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_layers_train_as_without_replicas(policy):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 6, 6, 3)).astype("float32")
    y = rng.normal(size=(12, 1)).astype("float32")

    def build():
        keras.utils.set_random_seed(0)
        layers = [
            keras.Input((6, 6, 3)),
            keras.layers.Conv2D(8, 1, 2, activation="relu", dtype=policy),
            keras.layers.Conv2D(8, 1, lora_rank=2, dtype=policy),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", jit_compile=True)
        return model

    one, many = build(), kc.replicate(build(), 1)
    fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    logs = [model.fit(x, y, **fit) for model in (one, many)]
    if policy == "float32":
        assert_same_training(one, many, *logs)
    else:
        for name in logs[0].history:
            np.testing.assert_allclose(
                logs[1].history[name], logs[0].history[name], rtol=0.02
            )
