"""Drawn steps, losses, state, metrics and logs against one device.

Each draw traces many programs, so a search is done by hand. It prints each
failure's smallest form:

    HYPOTHESIS_PROFILE=search python -m pytest tests/test_property_steps.py
"""

import os

import drawn_steps as drawn
import keras
import numpy as np
import pytest
from conftest import COUNTS
from hypothesis import HealthCheck
from hypothesis import event
from hypothesis import given
from hypothesis import reject
from hypothesis import settings
from hypothesis import strategies as st
from keras import optimizers
from models import assert_same_outcome
from models import moved_by_roundings
from models import outcome
from models import size

import keras_conflux as kc

pytestmark = pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "search",
    reason="takes minutes; HYPOTHESIS_PROFILE=search runs it",
)

OPTIMIZERS = {
    "sgd": lambda **options: optimizers.SGD(0.05, momentum=0.5, **options),
    "adam": lambda **options: optimizers.Adam(1e-2, epsilon=1e-2, **options),
    "rmsprop": lambda **options: optimizers.RMSprop(
        1e-2, epsilon=1e-2, **options
    ),
}
OPTIONS = [
    {},
    {},
    {"global_clipnorm": 0.1},
    {"clipvalue": 0.05},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 3, "global_clipnorm": 0.2},
    {"use_ema": True, "ema_overwrite_frequency": 2},
]
FORMS = ["tape", "tape", "compute_loss", "function", "compiled"]
NOTHING = 1e-6
"""A loss that stays below is a sum of what cancels out: it is all rounding."""
loss = drawn.of_scalars() | drawn.of_rows()


@st.composite
def runs(draw):
    form = draw(st.sampled_from(FORMS))
    run = {
        "form": form,
        "loss": draw(loss),
        "added": draw(st.lists(loss, max_size=1)),
        "kept": draw(
            st.lists(
                st.tuples(st.sampled_from(sorted(drawn.KEPT)), st.booleans()),
                max_size=2,
            )
        ),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "options": draw(st.sampled_from(OPTIONS)),
        "optimizers": "one",
        "change": "none",
        "logs": [],
        "metrics": [],
        "weighted": False,
        "steps_per_execution": draw(st.sampled_from([1, 1, 2])),
        "samples": draw(st.integers(1, 20)),
        "batch_size": draw(st.integers(1, 9)),
        "count": (count := draw(st.sampled_from(COUNTS))),
        "compiled_by_xla": count == 1 and draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }
    # XLA draws other numbers than TensorFlow's kernels, on one device as well.
    run["dropout"] = None
    if not run["compiled_by_xla"]:
        run["dropout"] = draw(st.sampled_from([None, 3]))
    if form == "tape":
        run["optimizers"] = draw(
            st.sampled_from(["one", "one", "two", "two in turn"])
        )
        if run["optimizers"] != "one" and "use_ema" in run["options"]:
            run["options"] = {}  # Keras would average all trainable weights
        changes = [*sorted(drawn.CHANGES), "accumulated"]
        run["change"] = draw(st.sampled_from(changes))
        logs = drawn.of_scalars() if run["compiled_by_xla"] else loss
        run["logs"] = draw(st.lists(logs, max_size=2))
    else:
        run["metrics"] = draw(
            st.lists(
                st.sampled_from(sorted(drawn.METRICS)), unique=True, max_size=2
            )
        )
    if form == "compiled":
        run["loss"] = draw(st.sampled_from(sorted(drawn.LOSSES)))
        run["weighted"] = draw(st.booleans())
    return run


def build(run, jit_compile) -> keras.Model:
    keras.utils.set_random_seed(run["seed"])
    kind = drawn.DrawnStep if run["form"] == "tape" else drawn.Drawn
    model = kind(run)
    model.build((None, 6))
    make = OPTIMIZERS[run["optimizer"]]
    losses = {
        "function": lambda y, p: drawn.value(run["loss"], y, p),
        "compiled": drawn.LOSSES[run["loss"]]()
        if run["form"] == "compiled"
        else None,
    }
    model.compile(
        make(**run["options"]),
        losses.get(run["form"]),
        metrics=[drawn.METRICS[name]() for name in run["metrics"]],
        steps_per_execution=run["steps_per_execution"],
        jit_compile=jit_compile,
    )
    if run["optimizers"] != "one":
        model.first = make(**run["options"])
        model.first.build(model.hidden.trainable_weights)
        model.optimizer.build(model.dense.trainable_weights)
    return model


def compare(run) -> None:
    """Trains on one device and on several, and compares all that is left."""
    rng = np.random.default_rng(run["seed"])
    samples = run["samples"]
    x = rng.normal(size=(samples, 6)).astype("float32")
    y = rng.normal(size=(samples, 3)).astype("float32")
    fit = {
        "batch_size": run["batch_size"],
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
        "sample_weight": rng.uniform(0, 2, samples)
        if run["weighted"]
        else None,
    }

    def train(prepare=None, count=None):
        by_xla = run["compiled_by_xla"] and count is not None
        model = build(run, by_xla)
        if count is not None:
            kc.replicate(model, count)
        if prepare is not None:
            prepare(model)
        history = model.fit(x, y, **fit)
        kc.assert_in_sync(model)
        return outcome(model, history)

    try:
        expected = train()
    except ValueError:  # one device refuses it, as a loss without gradients
        reject()
    losses = [x for name, x in expected.items() if name.startswith("loss of")]
    if losses and max(map(size, losses)) < NOTHING:
        reject()
    try:
        got = train(count=run["count"])
    except kc.ConfluxWarning as warning:
        if run["count"] == 1:
            raise
        # It is not equal, and the user is told.
        event("warned: " + str(warning).split(":", 1)[1][:40])
        return
    assert_same_outcome(
        expected,
        got,
        rtol=3e-5,
        roundings=lambda: moved_by_roundings(expected, train),
    )


@settings(
    max_examples=max(8, settings.default.max_examples // 5)
    if settings.default.derandomize
    else settings.default.max_examples,
    suppress_health_check=list(HealthCheck),
)
@given(runs())
def test_any_step_equals_one_device(run):
    compare(run)
