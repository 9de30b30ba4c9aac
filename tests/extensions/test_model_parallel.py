"""`keras.distribution.ModelParallel` stores in parts, and trains the same."""

import keras
import numpy as np
import pytest
from conftest import DEVICES
from conftest import MANY
from conftest import several
from keras import distribution
from keras import layers

import keras_conflux as kc
from keras_conflux._extensions.keras_distribution import (
    model_parallel as parallel_layouts,
)
from keras_conflux._replication import state

NAMES = [f"{device.kind.lower()}:{device.ordinal}" for device in DEVICES]
SHAPES = [(1, MANY), (MANY, 1), (1, 2)] + [(2, 2)] * (MANY == 4)
WORDS, WIDTH, HEADS = 150, 32, 4
TOKENS = np.random.default_rng(0).integers(0, WORDS, (22, 6))

pytestmark = several


@pytest.fixture(autouse=True)
def _no_distribution():
    yield
    distribution.set_distribution(None)


def layout_map(shape):
    """Its keys are those of `LlamaBackbone.get_layout_map` of keras-hub 0.32.0.

    A dot there stands for a slash as well.
    """
    names = NAMES[: shape[0] * shape[1]]
    mesh = distribution.DeviceMesh(shape, ["batch", "model"], names)
    found = distribution.LayoutMap(mesh)
    block, attention = "transformer_layer.*", "self_attention.*"
    found["token_embedding/embeddings"] = ("model", "batch")
    found[f"{block}{attention}(query|key|value).kernel"] = (
        "model",
        "batch",
        None,
    )
    found[f"{block}attention_output.kernel"] = ("model", None, "batch")
    found[f"{block}feedforward_intermediate_dense.kernel"] = ("batch", "model")
    found[f"{block}feedforward_gate_dense.kernel"] = ("batch", "model")
    found[f"{block}feedforward_output_dense.kernel"] = ("model", "batch")
    return found


def parallel(shape):
    return distribution.ModelParallel(
        layout_map=layout_map(shape), batch_dim_name="batch"
    )


IN_PARTS = {
    "token_embedding/embeddings",
    "transformer_layer_0/self_attention/query/kernel",
    "transformer_layer_0/self_attention/key/kernel",
    "transformer_layer_0/self_attention/value/kernel",
    "transformer_layer_0/self_attention/attention_output/kernel",
    "transformer_layer_0/feedforward_intermediate_dense/kernel",
    "transformer_layer_0/feedforward_gate_dense/kernel",
    "transformer_layer_0/feedforward_output_dense/kernel",
}


@keras.saving.register_keras_serializable("tests")
class TransformerLayer(layers.Layer):
    """Has the paths of the variables of keras-hub's Llama."""

    def build(self, shape):
        self.attention = layers.MultiHeadAttention(
            HEADS, 33, use_bias=False, name="self_attention"
        )
        self.attention.build(shape, shape)
        inner = (*shape[:-1], 130)
        self.gate = self._dense(130, "gate", shape)
        self.intermediate = self._dense(130, "intermediate", shape)
        self.output_dense = self._dense(WIDTH, "output", inner)

    def _dense(self, units, name, shape):
        name = f"feedforward_{name}_dense"
        made = layers.Dense(units, use_bias=False, name=name)
        made.build(shape)
        return made

    def call(self, x):
        x += self.attention(x, x, use_causal_mask=True)
        gate = keras.ops.silu(self.gate(x))
        return x + self.output_dense(self.intermediate(x) * gate)


def decoder():
    """A block of a decoder, whose head no layout names."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="token_embedding")(tokens)
    x = TransformerLayer(name="transformer_layer_0")(x)
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(WORDS, name="head")(x))


def trained(model, **options):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    history = model.fit(
        TOKENS, TOKENS, batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    return history.history["loss"]


def assert_equal(found, losses, expected, expected_losses):
    np.testing.assert_allclose(losses, expected_losses, rtol=5e-5)
    for a, b in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5, err_msg=a.path)
    kc.assert_in_sync(found)


def in_parts(model):
    return {v.path for v in model.weights if state.is_in_parts(v)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
def test_fit_equals_one_device(shape, options):
    expected = decoder()
    expected_losses = trained(expected, **options)
    distribution.set_distribution(parallel(shape))
    found = decoder()
    losses = trained(found, **options)
    assert_equal(found, losses, expected, expected_losses)
    assert in_parts(found) == IN_PARTS
    strategy = found.distribute_strategy
    assert strategy.devices == DEVICES[: shape[0] * shape[1]]
    moved = [v for v in found.optimizer.variables if "momentum" in v.path]
    # The state of what stays whole is cut as well, if it is large.
    assert sum(map(state.is_in_parts, moved)) == len(IN_PARTS) + 1


@pytest.mark.long
def test_a_scope_and_files(tmp_path):
    with parallel((1, MANY)).scope():
        found = decoder()
    assert in_parts(found) == IN_PARTS
    losses = trained(found)
    expected = decoder()
    assert_equal(found, losses, expected, trained(expected))
    found.save(tmp_path / "a.keras")
    found.save_weights(tmp_path / "a.weights.h5")
    plain = keras.saving.load_model(tmp_path / "a.keras")
    assert not in_parts(plain)
    with parallel((1, 2)).scope():
        there = keras.saving.load_model(tmp_path / "a.keras")
        other = decoder()
        other.load_weights(tmp_path / "a.weights.h5")
    for model in (plain, there, other):
        for a, b in zip(model.get_weights(), found.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert in_parts(there) == in_parts(other) == IN_PARTS
    state_of = [model.optimizer.variables for model in (there, found)]
    for a, b in zip(*state_of, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_a_model_that_was_made_and_trained_before():
    found, expected = decoder(), decoder()
    for each in (found, expected):
        trained(each, gradient_accumulation_steps=2)
    with parallel((1, 2)).scope():
        losses = trained(found)
        assert in_parts(found) == IN_PARTS
    assert_equal(found, losses, expected, trained(expected))


def test_what_is_not_split_is_said_once(capfd):
    one = parallel((1, 2))
    for _ in range(2):
        with one.scope():
            pass
    said = capfd.readouterr().err
    assert said.count("activations are not split") == 1
    assert "over 2 devices" in said


def test_outputs_of_layers_have_no_layout():
    layouts = layout_map((1, 2))
    layouts["token_embedding/output"] = ("batch", None, None)  # as it is
    layouts["transformer_layer_0/output"] = (None, None, "model")
    one = distribution.ModelParallel(layout_map=layouts)
    with (
        one.scope(),
        pytest.raises(NotImplementedError, match=r"stores .* in parts, on all"),
    ):
        trained(decoder())


def test_layouts_that_do_not_fit(monkeypatch):
    layouts = layout_map((1, 2))
    layouts["head/bias"] = (None, "model")
    one = distribution.ModelParallel(layout_map=layouts)
    with one.scope(), pytest.raises(ValueError, match="has 2 axes, and"):
        decoder()
    layouts = layout_map((1, 2))
    layouts[".*gate_dense/kernel"] = (None, "model")
    one = distribution.ModelParallel(layout_map=layouts)
    with one.scope(), pytest.raises(ValueError, match="matches multiple"):
        decoder()
    monkeypatch.setattr(parallel_layouts, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="There are 2 processes"):
        distribution.set_distribution(one)
    assert distribution.distribution() is None
