"""GELU in programs of XLA, and its gradients."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._replication import steps
from keras_conflux._replication.steps import CompiledStep
from keras_conflux._replication.steps import Step

X = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e4, -1e4]])
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@contextlib.contextmanager
def in_step(in_xla=True, kinds=None):
    compiled = CompiledStep() if in_xla else None
    context = Step("a step", compiled=compiled, kinds=kinds)
    with steps.entered(context):
        yield


def derivatives(x, in_xla, approximate=False, jit_compile=True):
    """Computes GELU and its first two derivatives."""

    @tf.function(autograph=False, jit_compile=jit_compile)
    def run(x):
        with in_step(in_xla), tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = keras.activations.gelu(x, approximate=approximate)
            slope = tape.gradient(y, x)
        return y, slope, outer.gradient(slope, x)

    return run(x)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_no_error_is_larger_than_that_of_keras(dtype):
    x = tf.cast(X, dtype)
    found = derivatives(x, in_xla=True)
    keras_own = derivatives(x, in_xla=False)
    exact = derivatives(tf.cast(x, "float64"), False, jit_compile=False)
    for one, other, right in zip(found, keras_own, exact, strict=True):
        assert one.dtype == dtype
        one, other = (tf.cast(each, "float64") for each in (one, other))
        errors, keras_errors = np.abs(one - right), np.abs(other - right)
        # XLA's error function ends 2e-7 above -1 on CPUs, and at -1 on GPUs.
        bound = ROUNDING[dtype] * np.abs(right) + 2e-7 * (1 + np.abs(X))
        assert (errors <= 1.05 * bound).all()
        assert errors.sum() <= keras_errors.sum() + 2e-3


def test_an_overflow_stays_visible():
    x = tf.constant([np.nan, np.inf, -np.inf], "bfloat16")
    found = derivatives(x, in_xla=True)
    expected = derivatives(x, in_xla=False)
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert not np.isfinite(tf.cast(one, "float32")).any()
        assert not np.isfinite(tf.cast(other, "float32")).any()


@pytest.mark.parametrize(
    ("dtype", "approximate"),
    [("float32", False), ("float64", False), ("bfloat16", True)],
)
def test_all_else_is_left_to_keras(dtype, approximate):
    x = tf.cast(X, dtype)
    found = derivatives(x, True, approximate)
    expected = derivatives(x, False, approximate)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(
            tf.cast(one, "float64"), tf.cast(other, "float64")
        )


def test_derivatives_in_forward_mode():
    x = tf.cast(np.linspace(-4, 4, 41), "bfloat16")

    @tf.function(jit_compile=True)
    def run(x):
        with in_step():
            ones = tf.ones_like(x)
            with tf.autodiff.ForwardAccumulator(x, ones) as accumulator:
                y = keras.activations.gelu(x, approximate=False)
            return accumulator.jvp(y)

    slope = derivatives(x, in_xla=True)[1]
    found = tf.cast(run(x), "float32")
    np.testing.assert_allclose(
        found, tf.cast(slope, "float32"), rtol=2 * ROUNDING["bfloat16"]
    )


def test_gradients_take_the_input_alone():
    @tf.function(input_signature=[tf.TensorSpec([None], "bfloat16")])
    def run(x):
        with in_step(), tf.GradientTape() as tape:
            tape.watch(x)
            y = keras.activations.gelu(x, approximate=False)
        before = len(tf.compat.v1.get_default_graph().get_operations())
        found.append((before, tape.gradient(y, x)))
        return found[-1][1]

    found = []
    graph = run.get_concrete_function().graph
    operations = graph.get_operations()
    before, after = operations[: found[0][0]], operations[found[0][0] :]
    taken = {each.op for op in after for each in op.inputs} & {*before}
    tensors = {op.type for op in taken if op.outputs[0].shape.rank != 0}
    assert tensors <= {"Placeholder", "Identity", "IdentityN"}


def test_what_is_computed_of_rows_is_rows():
    with tf.__internal__.FuncGraph("step").as_default():
        x = tf.compat.v1.placeholder("bfloat16", [None, 4])
        kinds = KindInference([x], [], [])
        with in_step(kinds=kinds):
            y = keras.activations.gelu(x, approximate=False)
            gradient = tf.gradients(tf.sin(y), x)[0]
    assert kinds.of(y) == kinds.of(gradient) == kinds.of(x)
