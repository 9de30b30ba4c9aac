"""Drawn models, options and data sizes against one device.

A few fixed draws run in CI. A search by hand prints each failure's smallest
form:

    HYPOTHESIS_PROFILE=search python -m pytest tests/test_property.py
"""

import keras
import numpy as np
from conftest import COUNTS
from conftest import ON_GPU
from hypothesis import HealthCheck
from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from keras import layers
from keras import optimizers
from models import assert_same_outcome
from models import moved_by_roundings
from models import outcome

import keras_conflux as kc


class Attends(layers.Layer):
    """Lets the tokens of a sample attend to each other."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 8)

    def call(self, x):
        return self.attention(x, x)


def as_tokens(x):
    return keras.ops.cast(keras.ops.abs(x) * 8, "int32") % 20


BODIES = {
    "dense": lambda: [layers.Dense(8, "tanh")],
    "regularized": lambda: [
        layers.Dense(8, "tanh", kernel_regularizer="l2"),
        layers.Dense(8, activity_regularizer="l1"),
    ],
    "normalized": lambda: [
        layers.Dense(8, use_bias=False),
        layers.BatchNormalization(synchronized=True),
        layers.Activation("tanh"),
    ],
    "layer norm": lambda: [layers.Dense(8), layers.LayerNormalization()],
    "convolution": lambda: [
        layers.Reshape((6, 1)),
        layers.Conv1D(4, 3, activation="tanh"),
        layers.Flatten(),
    ],
    "recurrent": lambda: [layers.Reshape((3, 2)), layers.GRU(4)],
    "tokens": lambda: [
        layers.Lambda(as_tokens),
        layers.Embedding(20, 8),
        Attends(),
        layers.Flatten(),
    ],
}
OPTIMIZERS = {
    "sgd": lambda **options: optimizers.SGD(0.05, momentum=0.9, **options),
    "adam": lambda **options: optimizers.Adam(1e-2, **options),
    "adamw": lambda **options: optimizers.AdamW(1e-2, **options),
    "rmsprop": lambda **options: optimizers.RMSprop(1e-2, **options),
}
OPTIONS = [
    {},
    {"clipnorm": 0.1},
    {"global_clipnorm": 0.1},
    {"clipvalue": 0.05},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 3, "global_clipnorm": 0.2},
    {"use_ema": True, "ema_momentum": 0.8},
    {"use_ema": True, "ema_overwrite_frequency": 2},
]
# Turns take long to trace, and `test_microbatches.py` runs some in CI.
MICROBATCHES = [1] if settings.default.derandomize else [1, 1, 2, 3]
# With a word, a model gets layers that are wide enough to lie in parts.
SHARDS = [None, None, "optimizer", "weights"]
LOSSES = ["mse", "huber", lambda y, p: keras.ops.mean((y - p) ** 2)]


@st.composite
def runs(draw):
    return {
        "body": draw(st.sampled_from(sorted(BODIES))),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "options": draw(st.sampled_from(OPTIONS)),
        "scaled": draw(st.booleans()),
        "loss": draw(st.sampled_from(range(len(LOSSES)))),
        "steps_per_execution": draw(st.sampled_from([1, 1, 2, 5])),
        "samples": draw(st.integers(1, 40)),
        "batch_size": draw(st.integers(1, 17)),
        "weighted": draw(st.sampled_from(["no", "samples", "classes"])),
        "count": draw(st.sampled_from(COUNTS)),
        "microbatches": draw(st.sampled_from(MICROBATCHES)),
        "shard": draw(st.sampled_from(SHARDS)),
        "seed": draw(st.integers(0, 1000)),
    }


def build(run) -> keras.Model:
    keras.utils.set_random_seed(run["seed"])
    body = BODIES[run["body"]]()
    if run["shard"]:
        body += [layers.Dense(64, "tanh"), layers.Dense(64, "tanh")]
    model = keras.Sequential([layers.Input((6,)), *body, layers.Dense(1)])
    optimizer = OPTIMIZERS[run["optimizer"]](**run["options"])
    if run["scaled"]:
        optimizer = optimizers.LossScaleOptimizer(optimizer)
    model.compile(
        optimizer,
        LOSSES[run["loss"]],
        metrics=["mae"],
        steps_per_execution=run["steps_per_execution"],
    )
    return model


@settings(
    max_examples=max(6, settings.default.max_examples // 6)
    if settings.default.derandomize
    else settings.default.max_examples,
    suppress_health_check=list(HealthCheck),
)
@given(runs())
def test_any_run_equals_one_device(run):
    assume(run["microbatches"] == 1 or not run["shard"])
    # On GPUs, rows that repeat are added up before an optimizer sees them, and
    # so are they where variables lie in parts.
    looked_up = (ON_GPU or run["shard"]) and run["body"] == "tokens"
    assume(not looked_up or run["optimizer"] == "sgd")
    assume(not looked_up or not any("clip" in key for key in run["options"]))
    rng = np.random.default_rng(run["seed"])
    samples = run["samples"]
    x = rng.normal(size=(samples, 6)).astype("float32")
    y = rng.normal(size=(samples, 1)).astype("float32")
    weighted = "no" if run["loss"] == 2 else run["weighted"]  # it is a scalar
    if weighted == "classes":
        y = np.round(rng.uniform(size=(samples, 1))).astype("float32")
    fit = {
        "batch_size": run["batch_size"],
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
        "sample_weight": rng.uniform(0, 2, samples)
        if weighted == "samples"
        else None,
        "class_weight": {0: 0.5, 1: 2.0} if weighted == "classes" else None,
    }

    def train(prepare=None, count=None):
        model = build(run)
        if count is not None:
            kc.replicate(
                model,
                count,
                microbatches=run["microbatches"],
                shard=run["shard"],
            )
        if prepare is not None:
            prepare(model)
        history = model.fit(x, y, **fit)
        kc.assert_in_sync(model)
        return outcome(model, history)

    expected, got = train(), train(count=run["count"])
    last = "loss of epoch 1"
    if np.isfinite(expected[last]):
        # Training may diverge, or divide by next to nothing. Then it is not to
        # be told from one device whose inputs and weights move by a rounding.
        assert_same_outcome(
            expected,
            got,
            rtol=3e-5,
            roundings=lambda: moved_by_roundings(expected, train),
        )
    else:  # whether it overflows an epoch earlier is decided by roundings
        assert not np.abs(got[last]) < 1e6
