"""Each loss and metric of Keras is, replicated, what it is on one device.

The tables name all of them, so one that a new version brings is missed here.
Each has an output of its own, which keeps its gradients apart from others'.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from keras import layers
from keras import losses
from keras import metrics
from models import assert_same_outcome
from models import outcome

import keras_conflux as kc

SAMPLES = 25  # of 8 a batch: shards are uneven, and the last batch has one
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SAMPLES, 6)).astype("float32")
WEIGHTS = RNG.uniform(0.2, 2, SAMPLES).astype("float32")
CLASSES = RNG.integers(0, 4, SAMPLES)


def bits(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, (SAMPLES, *shape)).astype("float32")


# By kind: what makes an output of a tensor, and the targets.
KINDS: dict[str, tuple[Callable[[], list], np.ndarray]] = {
    "values": (
        lambda: [layers.Dense(4)],
        RNG.normal(size=(SAMPLES, 4)).astype("float32"),
    ),
    "rectified": (lambda: [layers.Dense(4, "relu")], bits(4)),
    "signs": (lambda: [layers.Dense(3, "tanh")], 2 * bits(3) - 1),
    "bits": (lambda: [layers.Dense(3, "sigmoid")], bits(3)),
    "one bit": (lambda: [layers.Dense(1, "sigmoid")], bits(1)),
    "scalars": (
        lambda: [layers.Dense(1, "sigmoid"), layers.Reshape(())],
        RNG.uniform(0.1, 0.9, SAMPLES).astype("float32"),
    ),
    "chances": (
        lambda: [layers.Dense(4, "softmax")],
        np.eye(4, dtype="float32")[CLASSES],
    ),
    "classes": (lambda: [layers.Dense(4, "softmax")], CLASSES),
    "column": (lambda: [layers.Dense(4, "softmax")], CLASSES[:, None]),
    "masks": (
        lambda: [layers.Dense(12, "sigmoid"), layers.Reshape((3, 4))],
        bits(3, 4),
    ),
    "directions": (
        lambda: [layers.Dense(4), layers.UnitNormalization()],
        CLASSES,
    ),
    "sequences": (
        lambda: [layers.Dense(35), layers.Reshape((7, 5))],
        RNG.integers(1, 5, (SAMPLES, 3)),
    ),
}


def large(activation: str) -> Callable[[], list]:
    """Gives outputs that are close to 0 and 1."""
    weights = keras.initializers.RandomNormal(0, 30, seed=1)
    return lambda: [layers.Dense(4, activation, kernel_initializer=weights)]


KINDS |= {
    "large bits": (large("sigmoid"), bits(4)),
    "large chances": (large("softmax"), KINDS["chances"][1]),
    "large classes": (large("softmax"), CLASSES),
}

LOSSES: list[tuple[str, str, dict[str, Any]]] = [
    ("BinaryCrossentropy", "bits", {}),
    ("BinaryCrossentropy", "scalars", {}),
    ("BinaryCrossentropy", "bits", {"axis": 0, "reduction": "sum"}),
    ("BinaryFocalCrossentropy", "bits", {}),
    ("BinaryFocalCrossentropy", "bits", {"axis": 0, "reduction": "sum"}),
    ("CTC", "sequences", {}),
    ("CategoricalCrossentropy", "chances", {}),
    ("CategoricalCrossentropy", "chances", {"axis": 0}),
    ("CategoricalFocalCrossentropy", "chances", {}),
    ("CategoricalGeneralizedCrossEntropy", "classes", {}),
    # Broadcasts each target against all predictions.
    ("CategoricalGeneralizedCrossEntropy", "column", {}),
    ("CategoricalHinge", "chances", {}),
    ("CategoricalHinge", "scalars", {}),
    ("Circle", "directions", {}),
    ("Circle", "directions", {"reduction": "sum", "gamma": 8}),
    ("CosineSimilarity", "values", {}),
    ("CosineSimilarity", "values", {"axis": 0}),
    ("CosineSimilarity", "scalars", {}),
    ("MeanSquaredError", "scalars", {}),
    ("Dice", "masks", {}),
    ("Dice", "masks", {"axis": (1, 2)}),
    ("Dice", "masks", {"axis": (0, 1)}),
    ("Dice", "masks", {"axis": (0, 1), "reduction": "sum"}),
    ("Hinge", "signs", {}),
    ("Huber", "values", {}),
    ("KLDivergence", "chances", {}),
    ("KLDivergence", "scalars", {}),
    ("LogCosh", "values", {}),
    ("MeanAbsoluteError", "values", {}),
    ("MeanAbsolutePercentageError", "signs", {}),
    ("MeanSquaredError", "values", {}),
    ("MeanSquaredLogarithmicError", "rectified", {}),
    ("Poisson", "bits", {}),
    ("SparseCategoricalCrossentropy", "classes", {}),
    ("SquaredHinge", "signs", {}),
    ("Tversky", "masks", {"alpha": 0.3, "beta": 0.7}),
    ("Tversky", "masks", {"axis": (0, 2), "reduction": "sum"}),
    ("Tversky", "masks", {"axis": -1}),
]

FUNCTIONS: dict[str, str] = {
    "binary_crossentropy": "bits",
    "binary_focal_crossentropy": "bits",
    "categorical_crossentropy": "chances",
    "categorical_focal_crossentropy": "chances",
    "categorical_generalized_cross_entropy": "classes",
    "categorical_hinge": "chances",
    "circle": "directions",
    "cosine_similarity": "values",
    "ctc": "sequences",
    "dice": "masks",
    "hinge": "signs",
    "huber": "values",
    "kl_divergence": "chances",
    "log_cosh": "values",
    "mean_absolute_error": "values",
    "mean_absolute_percentage_error": "signs",
    "mean_squared_error": "values",
    "mean_squared_logarithmic_error": "rectified",
    "poisson": "bits",
    "sparse_categorical_crossentropy": "classes",
    "squared_hinge": "signs",
    "tversky": "masks",
}

METRICS: list[tuple[str, str, dict[str, Any]]] = [
    ("AUC", "one bit", {}),
    ("Accuracy", "rectified", {}),
    ("BinaryAccuracy", "bits", {}),
    ("BinaryCrossentropy", "bits", {}),
    ("BinaryIoU", "bits", {}),
    ("CategoricalAccuracy", "chances", {}),
    ("CategoricalCrossentropy", "chances", {}),
    ("CategoricalHinge", "chances", {}),
    ("ConcordanceCorrelation", "values", {}),
    ("ConcordanceCorrelation", "values", {"axis": 0}),
    ("CosineSimilarity", "values", {}),
    ("CosineSimilarity", "values", {"axis": 0}),
    ("F1Score", "chances", {}),
    ("FBetaScore", "chances", {"average": "micro", "beta": 0.5}),
    ("FalseNegatives", "bits", {}),
    ("FalsePositives", "bits", {}),
    ("Hinge", "signs", {}),
    ("IoU", "rectified", {"num_classes": 9, "target_class_ids": [0, 1]}),
    ("KLDivergence", "chances", {}),
    ("KLDivergence", "scalars", {}),
    ("LogCoshError", "values", {}),
    ("MeanAbsoluteError", "values", {}),
    ("MeanAbsolutePercentageError", "signs", {}),
    ("MeanIoU", "rectified", {"num_classes": 9}),
    ("MeanSquaredError", "values", {}),
    ("MeanSquaredLogarithmicError", "rectified", {}),
    ("OneHotIoU", "chances", {"num_classes": 4, "target_class_ids": [0, 2]}),
    ("OneHotMeanIoU", "chances", {"num_classes": 4}),
    ("PearsonCorrelation", "values", {}),
    ("PearsonCorrelation", "values", {"axis": 0}),
    ("Poisson", "bits", {}),
    ("Precision", "bits", {}),
    ("PrecisionAtRecall", "bits", {"recall": 0.5}),
    ("R2Score", "values", {}),
    ("Recall", "bits", {}),
    ("RecallAtPrecision", "bits", {"precision": 0.5}),
    ("RootMeanSquaredError", "values", {}),
    ("SensitivityAtSpecificity", "bits", {"specificity": 0.5}),
    ("SparseCategoricalAccuracy", "classes", {}),
    ("SparseCategoricalCrossentropy", "classes", {}),
    ("SparseTopKCategoricalAccuracy", "classes", {"k": 2}),
    ("SpecificityAtSensitivity", "bits", {"sensitivity": 0.5}),
    ("SquaredHinge", "signs", {}),
    ("TopKCategoricalAccuracy", "chances", {"k": 2}),
    ("TrueNegatives", "bits", {}),
    ("TruePositives", "bits", {}),
]

METRIC_FUNCTIONS: dict[str, str] = FUNCTIONS | {
    "binary_accuracy": "bits",
    "categorical_accuracy": "chances",
    "concordance_correlation": "values",
    "pearson_correlation": "values",
    "sparse_categorical_accuracy": "classes",
    "sparse_top_k_categorical_accuracy": "classes",
    "top_k_categorical_accuracy": "chances",
}

# Functions that need more than targets and predictions.
OPTIONS = {"categorical_generalized_cross_entropy": {"q": 0.5}}

# A step gives them values, not targets and predictions.
OF_VALUES = {"Mean", "MeanMetricWrapper", "Sum"}


def test_each_loss_and_metric_of_keras_is_in_a_table():
    def names(module, kind):
        found = {name for name, value in vars(module).items() if kind(value)}
        return found - {"get", "serialize", "deserialize"}

    assert names(losses, inspect.isclass) - {"Loss"} == {x for x, *_ in LOSSES}
    assert names(losses, inspect.isfunction) == set(FUNCTIONS)
    classes = names(metrics, inspect.isclass) - {"Metric"}
    assert classes - OF_VALUES == {x for x, *_ in METRICS}
    assert names(metrics, inspect.isfunction) <= set(METRIC_FUNCTIONS)


def train(parts: list, count: int | None, **options: Any) -> dict:
    """Trains a model of many outputs, and returns all that it leaves.

    Args:
        parts: The kind, the loss and the metrics of each output.
        count: The number of replicas, or `None` for plain Keras.
        **options: May have `weighted`, `eager` and the number of `samples`.
    """
    keras.utils.set_random_seed(1)
    x = keras.Input((6,))
    outputs = [
        functools.reduce(lambda y, layer: layer(y), KINDS[kind][0](), x)
        for kind, *_ in parts
    ]
    names = [f"part_{index}" for index in range(len(parts))]
    model = keras.Model(x, dict(zip(names, outputs, strict=True)))
    _, made_losses, made_metrics = zip(*parts, strict=True)
    weighted = options.get("weighted", False)
    measured = dict(zip(names, made_metrics, strict=True))
    model.compile(
        keras.optimizers.SGD(0.05),
        dict(zip(names, made_losses, strict=True)),
        **{"weighted_metrics" if weighted else "metrics": measured},
        run_eagerly=options.get("eager", False),
        jit_compile=options.get("compiled", False),
    )
    if count is not None:
        kc.replicate(model, count)
    samples = options.get("samples", SAMPLES)
    y = {
        name: KINDS[kind][1][:samples]
        for name, (kind, *_) in zip(names, parts, strict=True)
    }
    data: dict[str, Any] = {"x": X[:samples], "y": y, "batch_size": 8}
    if weighted:
        data["sample_weight"] = dict.fromkeys(names, WEIGHTS[:samples])
    history = model.fit(**data, epochs=2, shuffle=False, verbose=0)
    shown = model.evaluate(**data, return_dict=True, verbose=0)
    return outcome(model, history, [shown])


def assert_equals_one_device(make: Callable[[], list], **options: Any) -> None:
    count = min(3, MANY)
    plain = train(make(), None, **options)
    assert_same_outcome(plain, train(make(), count, **options), rtol=1e-5)


def made(module, table: list) -> list:
    return [
        (kind, getattr(module, name)(**args, name=f"made_{index}"))
        for index, (name, kind, args) in enumerate(table)
    ]


def of_samples(table: list) -> list:
    """Leaves out what returns no value a sample, and so takes no weights."""
    return [row for row in table if "axis" not in row[2]]


def of_losses(table: list) -> list:
    return [(kind, loss, []) for kind, loss in made(losses, table)]


def function(name: str) -> Callable:
    found = getattr(metrics, name, None) or getattr(losses, name)
    options = OPTIONS.get(name)
    return functools.partial(found, **options) if options else found


def small(y_true: Any, y_pred: Any) -> Any:
    """A loss that goes with targets of all kinds."""
    del y_true
    return keras.ops.mean(keras.ops.square(y_pred - 0.5))


def of_metrics(table: list) -> list:
    return [(kind, small, [metric]) for kind, metric in made(metrics, table)]


def of_functions(names: list, as_losses: bool) -> list:
    return [
        (kind, function(name), [])
        if as_losses
        else (kind, small, [function(name)])
        for name, kind in names
    ]


def of_losses_as_metrics(table: list) -> list:
    return [(kind, small, [loss]) for kind, loss in made(losses, table)]


def in_parts(table: list, size: int = 8) -> list:
    """Cuts a table into models of a few outputs each."""
    return [table[i : i + size] for i in range(0, len(table), size)]


def named(part: list) -> str:
    return f"{part[0][0]} to {part[-1][0]}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("part", in_parts(LOSSES), ids=named)
def test_losses(part):
    assert_equals_one_device(lambda: of_losses(part))


@pytest.mark.long
@pytest.mark.parametrize("part", in_parts(of_samples(LOSSES)), ids=named)
def test_losses_with_weights(part):
    assert_equals_one_device(lambda: of_losses(part), weighted=True)


@pytest.mark.long
@pytest.mark.parametrize("part", in_parts([*FUNCTIONS.items()]), ids=named)
def test_functions_that_are_losses(part):
    assert_equals_one_device(lambda: of_functions(part, as_losses=True))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("part", in_parts(METRICS, 12), ids=named)
def test_metrics(part):
    assert_equals_one_device(lambda: of_metrics(part))


# Keras takes one weight per entry for these, and a sample has several entries.
UNWEIGHTED = {"BinaryIoU", "IoU", "MeanIoU"}
OF_ROWS = [row for row in of_samples(METRICS) if row[1] != "scalars"]
WEIGHTED = [row for row in OF_ROWS if row[0] not in UNWEIGHTED]


@pytest.mark.long
@pytest.mark.parametrize("part", in_parts(WEIGHTED, 12), ids=named)
def test_metrics_with_weights(part):
    assert_equals_one_device(lambda: of_metrics(part), weighted=True)


def seen(part: list, count: int, weighted: bool) -> list:
    """Returns the results of metrics that a loop of the user's updates."""
    keras.utils.set_random_seed(1)
    kinds, found = zip(*made(metrics, part), strict=True)
    kc.replicate(found, count)
    data = []
    for kind in kinds:
        make, y_true = KINDS[kind]
        y_pred = functools.reduce(lambda y, layer: layer(y), make(), X)
        data.append((y_true, y_pred.numpy(), *[WEIGHTS] * weighted))

    @kc.withdevices(devices=count)
    def step(batch):
        for metric, given in zip(found, batch, strict=True):
            metric.update_state(*given)

    for i in (0, 8, 16):
        rows = keras.tree.map_structure(lambda x: x[i : i + 8], data)  # noqa: B023
        step(kc.split(rows, count))
    return [np.asarray(metric.result()) for metric in found]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("part", in_parts(OF_ROWS, 12), ids=named)
def test_metrics_in_a_loop(part, weighted):
    """They warn of nothing, either."""
    part = [row for row in part if row in WEIGHTED] if weighted else part
    many, one = (seen(part, count, weighted) for count in (min(3, MANY), 1))
    for a, b in zip(many, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "part", in_parts([*METRIC_FUNCTIONS.items()], 10), ids=named
)
def test_functions_that_are_metrics(part):
    assert_equals_one_device(lambda: of_functions(part, as_losses=False))


@pytest.mark.long
@pytest.mark.parametrize("part", in_parts(LOSSES), ids=named)
def test_losses_that_are_metrics(part):
    assert_equals_one_device(lambda: of_losses_as_metrics(part))


def pairs(y_true: Any, y_pred: Any) -> Any:
    """A value a sample, of its differences from all samples."""
    gaps = y_pred[:, None] - y_pred[None]
    return keras.ops.mean(keras.ops.square(gaps), axis=(1, 2)) + keras.ops.abs(
        y_true[:, 0] - keras.ops.max(y_pred)
    )


def of_the_users() -> list:
    """Losses that compare samples, and functions that call Keras' own."""

    def beside_others(y_true, y_pred):
        return losses.binary_crossentropy(y_true, y_pred) + losses.dice(
            y_true, y_pred
        )

    def twice(y_true, y_pred):
        return 2 * losses.circle(y_true, y_pred)

    def refers(y_true, y_pred):
        return losses.circle(y_true, y_pred, y_true, y_pred)

    return [
        ("values", pairs, [pairs]),
        ("bits", losses.BinaryFocalCrossentropy(axis=0), []),
        ("masks", beside_others, [beside_others]),
        ("directions", twice, [twice]),
        ("directions", refers, [refers]),
    ]


USERS = range(len(of_the_users()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("index", USERS)
def test_losses_that_compare_samples(index):
    assert_equals_one_device(lambda: [of_the_users()[index]])


@pytest.mark.long
def test_one_replica_compiled_by_xla():
    plain = train(of_the_users(), None)
    compiled = train(of_the_users(), 1, compiled=True)
    assert_same_outcome(plain, compiled, rtol=1e-5)


def root(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [("values", small), ("values", root), ("values", pairs), ("masks", "dice")],
    ids=["mean", "root", "pairs", "dice"],
)
def test_losses_of_the_batch_with_weights(kind, loss):
    """One device weighs a mean by the mean of the weights."""
    assert_equals_one_device(lambda: [(kind, loss, [])], weighted=True)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["Circle", "Dice", "MeanSquaredError"])
def test_losses_that_are_not_reduced(loss):
    kind = {"Circle": "directions", "Dice": "masks"}.get(loss, "values")

    def make():
        return [(kind, getattr(losses, loss)(reduction=None), [])]

    assert_equals_one_device(make)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "reduction", ["sum", "mean", "mean_with_sample_weight"]
)
def test_reductions_of_what_compares_samples(reduction):
    def make():
        return [("directions", losses.Circle(reduction=reduction), [])]

    assert_equals_one_device(make, weighted=True)


@pytest.mark.long
def test_metrics_that_compare_samples_with_weights():
    """Of these samples, Keras masks those without a loss."""

    def circle(y_true, y_pred):
        return losses.circle(y_true, y_pred, gamma=800)

    def make():
        return [("directions", small, [circle]), ("values", small, [pairs])]

    assert_equals_one_device(make, weighted=True)


class Share(keras.metrics.Metric):
    """The share of batches whose mean error is small."""

    def __init__(self):
        super().__init__(name="share")
        self.small = self.add_variable((), "zeros", name="small")
        self.large = self.add_variable((), "zeros", name="large")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.mean(keras.ops.abs(y_true - y_pred))
        keras.ops.cond(
            error < 1.25,
            lambda: self.small.assign_add(1.0),
            lambda: self.large.assign_add(1.0),
        )

    def result(self):
        return self.small / (self.small + self.large)


def test_a_metric_that_chooses_what_it_adds():
    assert_equals_one_device(lambda: [("values", "mse", [Share()])])


class Totals(keras.Sequential):
    """Gives sums and means of a step's values to metrics, with weights."""

    def train_step(self, data):
        logs = super().train_step(data)
        x, _ = data
        rows = keras.ops.square(x)
        total = self.total_of_rows
        total.update_state(rows[:, 0], sample_weight=0.5)
        self.mean_of_rows.update_state(rows, sample_weight=2.0)
        weights = rows[:, 0] / keras.ops.max(rows)
        self.weighted.update_state(rows, sample_weight=weights)
        self.drawn.update_state(tf.random.uniform((), 1.0, 1.0))
        return {
            **logs,
            "total": total.result(),
            "mean": self.mean_of_rows.result(),
            "weighted": self.weighted.result(),
            "drawn": self.drawn.result(),
        }


@pytest.mark.long
def test_metrics_that_a_step_updates():
    trained = []
    for count in (None, min(3, MANY)):
        keras.utils.set_random_seed(1)
        model = Totals([keras.Input((6,)), layers.Dense(4)])
        model.total_of_rows = metrics.Sum("total")
        model.mean_of_rows = metrics.Mean("mean")
        model.weighted = metrics.Mean("weighted")
        model.drawn = metrics.Mean("drawn")
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        if count:
            kc.replicate(model, count)
        data = X, KINDS["values"][1]
        history = model.fit(*data, batch_size=8, shuffle=False, verbose=0)
        trained.append(outcome(model, history))
    assert_same_outcome(*trained)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["binary", "categorical", "sparse_categorical"]
)
def test_saturated_outputs_of_a_loss_that_compares_samples(name):
    """Keras computes cross-entropies of outputs from what is behind them."""
    kind = {"binary": "bits", "categorical": "chances"}.get(name, "classes")

    def largest(y_true, y_pred):
        each = getattr(losses, f"{name}_crossentropy")(y_true, y_pred)
        return keras.ops.logsumexp(each)

    assert_equals_one_device(lambda: [(f"large {kind}", largest, [])])
