"""Draws trainings with the steps of `drawn_steps.py`, and runs them."""

import drawn_steps as drawn
import keras
import numpy as np
from hypothesis import strategies as st
from keras import optimizers
from models import outcome

import keras_conflux as kc

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
loss = drawn.of_scalars() | drawn.of_rows()


@st.composite
def runs(draw, counts, microbatches=(1,)):
    """Draws a training for one of several numbers of devices, and of turns."""
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
        "count": (count := draw(st.sampled_from(counts))),
        "microbatches": draw(st.sampled_from(microbatches)),
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


def train(run, prepare=None, count=None) -> dict[str, np.ndarray]:
    """Trains on one device, or replicated, and returns the outcome.

    Args:
        run: What was drawn.
        prepare: Called with the model before `fit`.
        count: The number of replicas, or `None` for plain Keras.
    """
    rng = np.random.default_rng(run["seed"])
    samples = run["samples"]
    x = rng.normal(size=(samples, 6)).astype("float32")
    y = rng.normal(size=(samples, 3)).astype("float32")
    model = build(run, run["compiled_by_xla"] and count is not None)
    if count is not None:
        kc.replicate(model, count, microbatches=run["microbatches"])
    if prepare is not None:
        prepare(model)
    history = model.fit(
        x,
        y,
        batch_size=run["batch_size"],
        epochs=2,
        shuffle=False,
        verbose=0,
        sample_weight=rng.uniform(0, 2, samples) if run["weighted"] else None,
    )
    kc.assert_in_sync(model)
    if kc.process_count() > 1:
        # Until then, each process has a part of what is accumulated.
        kc.unreplicate(model)
    return outcome(model, history)
