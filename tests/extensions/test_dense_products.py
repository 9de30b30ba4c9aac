"""A batch times a matrix is one product, and so are its gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_training
from test_attention import in_a_program

import keras_conflux as kc
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import Entries

SIZES = {"a": 3, "b": 5, "c": 4, "d": 2, "e": 6}

PRODUCTS = [
    # The equations that Keras' einsum computes by `tf.matmul`.
    "abc,cd->abd",
    "abc,dc->abd",
    "abc,cde->abde",
    "abc,dce->abde",
    "abc,dec->abde",
    "abcd,cde->abe",
    "abcd,ced->abe",
    "abcd,ecd->abe",
    # Others of the same form.
    "abcd,de->abce",
    "abcd,dce->abe",
    "abc,dec->abed",
]


def operands(equation, dtype="float32"):
    rng = np.random.default_rng(0)
    terms = equation.split("->")[0].split(",")
    return [
        tf.cast(rng.normal(size=[SIZES[x] for x in term]), dtype)
        for term in terms
    ]


def value_and_gradients(equation, arrays, in_xla, jit_compile=True):
    """Computes a product for any number of samples, and says by which graph."""
    batch, weights = arrays

    @tf.function(
        autograph=False,
        jit_compile=jit_compile,
        input_signature=[
            tf.TensorSpec([None, *batch.shape[1:]], batch.dtype),
            tf.TensorSpec(weights.shape, weights.dtype),
        ],
    )
    def run(x, y):
        with in_a_program(in_xla), tf.GradientTape() as tape:
            tape.watch([x, y])
            product = keras.ops.einsum(equation, x, y)
            loss = tf.reduce_sum(tf.cast(tf.sin(product), "float32"))
        return product, *tape.gradient(loss, [x, y])

    operations = run.get_concrete_function().graph.get_operations()
    return run(batch, weights), operations


@pytest.mark.sampled(3)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("equation", PRODUCTS)
def test_products_are_those_of_keras(equation, jit_compile):
    arrays = operands(equation)
    found, operations = value_and_gradients(equation, arrays, True, jit_compile)
    expected, _ = value_and_gradients(equation, arrays, False, jit_compile)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    products = [
        x for x in operations if "MatMul" in x.type or x.type == "Einsum"
    ]
    assert [x.type for x in products] == ["MatMul"] * 3
    assert all(x.outputs[0].shape.rank == 2 for x in products)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats(dtype):
    # A batch of 64: a sum of roundings for each sample would be far off.
    rng = np.random.default_rng(0)
    batch = tf.cast(rng.normal(size=(64, 3, 4)), dtype)
    weights = tf.cast(rng.normal(size=(4, 2, 5)), dtype)
    found, _ = value_and_gradients("abc,cde->abde", (batch, weights), True)
    wide = [tf.cast(each, "float64") for each in (batch, weights)]
    expected, _ = value_and_gradients("abc,cde->abde", wide, False)
    rounding = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12}[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        scale = np.abs(other).max()
        np.testing.assert_allclose(
            tf.cast(one, "float64"), other, atol=rounding * scale
        )


@pytest.mark.parametrize(
    "equation",
    [
        "ab,bc->ac",  # a product of two matrices as it is
        "abc,acd->abd",  # a matrix for each sample
        "abc,cd->bad",  # axes in another order
        "abc,cd->adb",
        "abc,bd->acd",  # what is summed is not last
        "abc,cd->ab",  # a sum over the columns
        "abc,c->ab",  # no columns
        "abc,de->abcde",  # nothing is summed
        "acb,bd->acdb",  # what is summed is kept
        "...c,cd->...d",  # axes without letters
    ],
)
def test_other_equations_are_left_to_keras(equation):
    arrays = operands(equation.replace("...", "ab"))
    graphs = [
        value_and_gradients(equation, arrays, in_xla, False)[1]
        for in_xla in (True, False)
    ]
    one, other = ([x.type for x in operations] for operations in graphs)
    assert one == other


def graph_of(function, *specs, in_xla=True, kinds=None):
    """Returns the types of the operations of a step."""

    @tf.function(input_signature=[tf.TensorSpec(*spec) for spec in specs])
    def run(*arguments):
        with in_a_program(in_xla, kinds):
            return function(*arguments)

    operations = run.get_concrete_function().graph.get_operations()
    return [x.type for x in operations]


@pytest.mark.parametrize(
    ("batch", "weights", "options"),
    [
        (([None, 3, 4], "int32"), ([4, 5], "int32"), {}),
        (([None, 3, 4], "bfloat16"), ([4, 5], "float32"), {}),
        (([None, 3, 4], "float32"), ([4, 5], "bfloat16"), {}),
        (([None, 3, 4], "float32"), ([4, 5], "float32"), {"optimize": "auto"}),
        (([None, 0, 4], "float32"), ([4, 5], "float32"), {}),
        (([None, 3, 0], "float32"), ([0, 5], "float32"), {}),
        (([None, None, 4], "float32"), ([4, 5], "float32"), {}),
        (([None, 3, 4], "float32"), ([4, None], "float32"), {}),
        (([None, 3, 4], "float32"), ([None, 5], "float32"), {}),
        ((None, "float32"), ([4, 5], "float32"), {}),
        (([None, 3, 4], "float32"), (None, "float32"), {}),
    ],
)
def test_other_tensors_are_left_to_keras(batch, weights, options):
    def product(x, y):
        return keras.ops.einsum("abc,cd->abd", x, y, **options)

    graphs = [
        graph_of(product, batch, weights, in_xla=in_xla)
        for in_xla in (True, False)
    ]
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize(
    ("equation", "batch", "weights"),
    [
        ("abc,cd->abd", (3, 5, 4), (2, 6)),
        ("abc,dc->abd", (3, 5, 4), (6, 1)),
        ("abcd,de->abce", (3, 5, 4, 2), (1, 6)),
    ],
)
def test_sizes_that_do_not_agree_raise(equation, batch, weights):
    def product(x, y):
        return keras.ops.einsum(equation, x, y)

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        graph_of(product, ([None, *batch[1:]], "float32"), (weights, "float32"))


@pytest.mark.parametrize(
    ("equation", "batch", "weights"),
    [
        ("abc,cde->abde", (3, 5, 4), (2, 2, 6)),
        ("abcd,cde->abe", (3, 5, 4, 2), (2, 4, 6)),
    ],
)
def test_sizes_that_keras_does_not_compare_are_left_to_it(
    equation, batch, weights
):
    def product(x, y):
        return keras.ops.einsum(equation, x, y)

    specs = ([None, *batch[1:]], "float32"), (weights, "float32")
    graphs = [graph_of(product, *specs, in_xla=x) for x in (True, False)]
    assert graphs[0] == graphs[1]


def test_outside_of_programs_nothing_is_changed():
    layer = keras.layers.EinsumDense("abc,cde->abde", (5, 2, 6), bias_axes="de")
    layer.build((None, 5, 4))
    spec = [None, 5, 4], "float32"
    plain = graph_of(layer, spec, in_xla=False)
    assert "BatchMatMulV2" in plain
    assert "BatchMatMulV2" not in graph_of(layer, spec)
    with in_a_program():  # with `tf.config.run_functions_eagerly(True)`
        x = np.ones((3, 5, 4), "float32")
        np.testing.assert_array_equal(layer(x), layer(tf.constant(x)))


class Noisy(keras.layers.EinsumDense):
    """Computes its kernel anew each time that it is read."""

    reads = 0

    @property
    def kernel(self):
        self.reads += 1
        return self._kernel * 1.0


@pytest.mark.parametrize("in_xla", [False, True])
@pytest.mark.parametrize("bias_axes", ["de", "e", None])
def test_a_kernel_is_read_once(in_xla, bias_axes):
    layer = Noisy("abc,cde->abde", (5, 2, 6), bias_axes=bias_axes)
    layer.build((None, 5, 4))
    graph_of(layer.call, ([None, 5, 4], "float32"), in_xla=in_xla)
    assert layer.reads == 1


def test_samples_that_are_known_stay_an_axis():
    # Among rows it could not be told where one sample ends.
    def product(x):
        x = tf.ensure_shape(x, (4, 5, 4))
        return keras.ops.einsum("abc,cd->abd", x, tf.ones((4, 6)))

    spec = [None, 5, 4], "float32"
    followed = graph_of(product, spec, kinds=KindInference([], [], []))
    assert "BatchMatMulV2" in followed
    assert "BatchMatMulV2" not in graph_of(product, spec)


@pytest.mark.parametrize("equation", PRODUCTS)
def test_products_and_their_gradients_are_rows_of_samples(equation):
    batch, weights = operands(equation)
    with tf.__internal__.FuncGraph("step").as_default():
        x = tf.compat.v1.placeholder("float32", [None, *batch.shape[1:]])
        kinds = KindInference([x], [], [])
        with in_a_program(kinds=kinds):
            product = keras.ops.einsum(equation, x, weights)
            gradient = tf.gradients(tf.sin(product), x)[0]
    found = [kinds.of(tensor) for tensor in (product, gradient)]
    assert all(kind.regular for kind in found)
    found = [kind.with_entries(Entries.ONE) for kind in found]
    assert found == [kinds.of(x)] * 2


LAYERS = {
    "a bias of two axes": ("abc,cde->abde", (5, 2, 6), "de", "gelu"),
    "a bias of one axis": ("abc,cde->abde", (5, 2, 6), "e", None),
    "no bias": ("abc,cd->abd", (5, 6), None, "relu"),
    "two axes summed": ("abcd,cde->abe", (5, 6), "e", None),
    "an ellipsis": ("...c,cd->...d", (6,), "d", None),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_as_without_replicas(name):
    equation, output_shape, bias_axes, activation = LAYERS[name]
    shape = (5, 4, 2) if equation.startswith("abcd") else (5, 4)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, *shape)).astype("float32")
    y = rng.normal(size=(12, 1)).astype("float32")

    def build():
        keras.utils.set_random_seed(0)
        layer = keras.layers.EinsumDense(
            equation,
            output_shape,
            activation,
            bias_axes,
            bias_initializer="random_normal",
        )
        head = [keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input(shape), layer, *head])
        model.compile("sgd", "mse", jit_compile=True)
        return model

    one, many = build(), kc.replicate(build(), 1)
    fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    logs = [model.fit(x, y, **fit) for model in (one, many)]
    assert_same_training(one, many, *logs)
    np.testing.assert_allclose(
        many.predict(x, verbose=0),
        one.predict(x, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_bias_is_added_to_the_rows():
    layer = keras.layers.EinsumDense(
        "abc,cde->abde", (None, 2, 6), bias_axes="de"
    )
    layer.build((None, 5, 4))

    @tf.function(input_signature=[tf.TensorSpec([None, 5, 4])])
    def run(x):
        with in_a_program():
            return layer(x)

    assert run(tf.ones([3, 5, 4])).shape == (3, 5, 2, 6)
    graph = run.get_concrete_function().graph
    last = graph.outputs[0].op.inputs[0].op
    assert last.type == "Reshape"
    assert last.inputs[0].op.type in ("AddV2", "BiasAdd")
    assert last.inputs[0].shape.rank == 2


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float64"])
def test_policies_of_layers(policy):
    layer = filled(dtype=policy)
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")
    found, expected = run_in_step(layer, x), layer(x)
    assert found.dtype == expected.dtype
    wide = filled(dtype="float64")
    wide.set_weights(layer.get_weights())
    exact = wide(x)
    rounding = 1e-12 if policy == "float64" else 0.02
    scale = np.abs(exact).max()
    found = tf.cast(found, "float64")
    np.testing.assert_allclose(found, exact, atol=rounding * scale)


def test_columns_in_another_order_than_those_of_the_weights():
    layer = filled("abc,cde->abed", "ed", (5, 6, 2))
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")
    np.testing.assert_allclose(
        run_in_step(layer, x), layer(x), rtol=1e-5, atol=1e-6
    )


def test_weights_of_low_rank_and_quantized_ones():
    low_rank, quantized = filled(), filled()
    low_rank.enable_lora(2)
    low_rank.lora_kernel_b.assign(tf.ones(low_rank.lora_kernel_b.shape))
    quantized.quantize("int8")
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")
    for layer in (low_rank, quantized):
        np.testing.assert_allclose(
            run_in_step(layer, x), layer(x), rtol=1e-5, atol=1e-6
        )


def filled(
    equation="abc,cde->abde", bias_axes="de", shape=(5, 2, 6), **options
):
    """Returns a layer whose kernel and bias are random numbers."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.EinsumDense(
        equation,
        shape,
        bias_axes=bias_axes,
        bias_initializer="random_normal",
        **options,
    )
    layer.build((None, 5, 4))
    return layer


def run_in_step(layer, x):
    @tf.function(input_signature=[tf.TensorSpec([None, 5, 4])])
    def run(x):
        with in_a_program():
            return layer(x)

    graph = run.get_concrete_function().graph.get_operations()
    assert "BatchMatMulV2" not in [each.type for each in graph]
    return run(x)
