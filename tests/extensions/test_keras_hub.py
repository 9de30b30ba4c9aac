"""keras-hub's models, replicated, train as on one device.

It is installed at night. Of what it needs, its models take no more than
`regex`, `sentencepiece` and `tokenizers`.
"""

import pathlib

import keras
import numpy as np
import pytest
from conftest import DEVICES
from conftest import MANY
from conftest import several
from keras import distribution

import keras_conflux as kc
from keras_conflux._replication import state

hub = pytest.importorskip("keras_hub")

pytestmark = [
    several,
    pytest.mark.filterwarnings("error::keras_conflux.ConfluxWarning"),
    # Of what no loss depends on, as of the head of an embedding.
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
]
NAMES = [f"{device.kind.lower()}:{device.ordinal}" for device in DEVICES]
SHAPE = (2, 2) if MANY >= 4 else (1, MANY)
SAMPLES, TOKENS, WORDS = 11, 6, 150
OF_DECODERS = {
    "vocabulary_size": WORDS,
    "num_layers": 1,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 96,  # so that each matrix is large enough for parts
    "intermediate_dim": 128,
}
OF_ENCODERS = {
    "vocabulary_size": WORDS,
    "num_layers": 1,
    "num_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}
OF_EXPERTS = {
    "moe_intermediate_dim": 16,
    "shared_expert_intermediate_dim": 16,
    "num_experts": 4,
    "top_k": 2,
}
WITH_LAYOUTS = {
    "GemmaBackbone": OF_DECODERS | {"head_dim": 32},
    "Llama3Backbone": OF_DECODERS,
    "QwenBackbone": OF_DECODERS,
}
OTHERS = {
    "BertBackbone": OF_ENCODERS,
    "GPT2Backbone": OF_ENCODERS,
    "LlamaBackbone": OF_DECODERS | {"dropout": 0.1},
    "MistralBackbone": OF_DECODERS,
    "Phi3Backbone": OF_DECODERS,
    "QwenMoeBackbone": OF_DECODERS | OF_EXPERTS,
    "T5Backbone": OF_ENCODERS,
}


@pytest.fixture(autouse=True)
def _no_distribution():
    yield
    distribution.set_distribution(None)


def build(name):
    keras.utils.set_random_seed(1)
    backbone = getattr(hub.models, name)(**(WITH_LAYOUTS | OTHERS)[name])
    output = backbone.output
    if isinstance(output, dict):
        (name,) = [key for key in output if key.endswith("sequence_output")][
            -1:
        ]
        output = output[name]
    head = keras.layers.Dense(WORDS, name="head")
    model = keras.Model(backbone.input, head(output))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def trained(model):
    """Trains on batches of 8 and 3 samples."""
    random = np.random.default_rng(0)
    words = random.integers(2, WORDS, (SAMPLES, TOKENS))
    inputs = {name: words for name in model.input}
    for name in inputs:
        if name.endswith("padding_mask"):
            inputs[name] = np.arange(TOKENS) < random.integers(
                3, TOKENS + 1, (SAMPLES, 1)
            )
        if name == "segment_ids":
            inputs[name] = words % 2
    history = model.fit(
        inputs, words, batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    return history.history["loss"]


def assert_equal(found, expected):
    losses = trained(expected)
    np.testing.assert_allclose(trained(found), losses, rtol=5e-5)
    for a, b in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5, err_msg=a.path)
    kc.assert_in_sync(found)


@pytest.mark.parametrize("name", WITH_LAYOUTS)
def test_its_own_layouts(name):
    expected = build(name)
    mesh = distribution.DeviceMesh(
        SHAPE, ["batch", "model"], NAMES[: SHAPE[0] * SHAPE[1]]
    )
    layouts = getattr(hub.models, name).get_layout_map(mesh)
    distribution.set_distribution(
        distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    found = build(name)
    assert_equal(found, expected)
    in_parts = {v.path for v in found.weights if state.is_in_parts(v)}
    assert in_parts == {v.path for v in found.weights if layouts[v.path]}
    assert len(in_parts) == 1 + 7


@pytest.mark.parametrize("name", OTHERS)
def test_replicas(name):
    found = build(name)
    kc.replicate(found, min(MANY, 3))
    assert_equal(found, build(name))


def test_the_page_on_fine_tuning_runs(tmp_path, capsys):
    sizes = OF_ENCODERS | {"max_sequence_length": TOKENS}
    backbone = hub.models.BertBackbone(**sizes)
    hub.models.BertTextClassifier(backbone, 2).save_to_preset(tmp_path)
    page = pathlib.Path(__file__).parents[2] / "docs" / "fine-tuning.md"
    program = page.read_text().partition("```py\n")[2].partition("```")[0]
    program = program.replace('"bert_base_en_uncased"', repr(str(tmp_path)))
    rows = np.random.default_rng(0).integers(WORDS, size=(SAMPLES, TOKENS))
    texts = {
        "token_ids": rows,
        "padding_mask": np.ones_like(rows),
        "segment_ids": np.zeros_like(rows),
    }
    names = {"keras": keras, "kc": kc, "texts": texts, "labels": rows[:, 0] % 2}
    exec(program, names)
    assert "Trainable params: 1,218" in capsys.readouterr().out
    model, file = names["model"], tmp_path / "model.weights.h5"
    assert model.optimizer.iterations == 1
    backbone.load_weights(file)
    table = "token_embedding/embeddings"
    (wanted,) = [v for v in backbone.variables if v.path.endswith(table)]
    (found,) = [v for v in model.variables if v.path.endswith(table)]
    np.testing.assert_array_equal(found, wanted)
