"""The table of what must equal one device: one `Case` a row.

A case is a compiled model and the arguments of `fit`. `test_equal.py` trains
it with plain Keras on one device and replicated, and compares.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import optimizers
from models import Keeps

SAMPLES = 61  # of 16 a batch: the last batch has 13, for 2, 3 and 4 devices
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SAMPLES, 8)).astype("float32")
Y = (X[:, :1] * 2 + np.sin(X[:, 1:2])).astype("float32")
LABELS = (X[:, 2] > 0).astype("int32") + (X[:, 3] > 0)
BINARY = (X[:, :1] > 0).astype("float32")
IMAGES = RNG.normal(size=(SAMPLES, 6, 6, 2)).astype("float32")
TOKENS = RNG.integers(1, 12, (SAMPLES, 5)).astype("int32")
TOKENS[::3, 3:] = 0  # padding, unevenly spread
WEIGHTS = RNG.uniform(0, 2, SAMPLES).astype("float32")


@dataclasses.dataclass
class Case:
    """One row of the table."""

    name: str
    build: Callable[[], keras.Model]
    """Returns a compiled model, the same at each call."""
    fit: Callable[[], dict[str, Any]]
    """Returns the arguments of `fit`."""
    rtol: float = 1e-5
    """Over 1e-5 only with a reason beside it."""
    only_roundings: tuple[str, ...] = ()
    """Parts of the names of variables that would be zero, if nothing were
    rounded. Only with a reason beside it."""
    steps: int | None = None
    """The number of steps, where plain Keras may count one more than it takes:
    at the end of a generator the step starts once more before it finds no
    data."""


CASES: dict[str, Case] = {}


def case(
    name: str,
    body: Callable[[], list] | None = None,
    *,
    optimizer: Callable[[], Any] = lambda: optimizers.SGD(0.05, momentum=0.9),
    model: Callable[[], keras.Model] | None = None,
    compile: Callable[[], dict] = dict,
    fit: Callable[[], dict] | None = None,
    x: Any = X,
    y: Any = Y,
    rtol: float = 1e-5,
    only_roundings: tuple[str, ...] = (),
    steps: int | None = None,
    built: bool = False,
    **fit_options: Any,
) -> None:
    """Adds a row: a dense regression unless something else is said."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = model() if model else keras.Sequential((body or mlp)())
        made.compile(
            **{
                "optimizer": optimizer(),
                "loss": "mse",
                "metrics": ["mae"],
                # Plain Keras compiles with XLA on a GPU, which fails on some
                # of these and rounds otherwise.
                "jit_compile": False,
                **compile(),
            }
        )
        if built:
            # Built in its first step, Keras' optimizer repeats its
            # initialization in every step (schedule_free_adamw.py).
            made.optimizer.build(made.trainable_variables)
        return made

    def data() -> dict[str, Any]:
        given = fit() if fit else {"x": x, "y": y, "batch_size": 16}
        options = {"epochs": 3, "shuffle": False, "verbose": 0}
        return {**options, **fit_options, **given}

    assert name not in CASES
    CASES[name] = Case(name, build, data, rtol, only_roundings, steps)


def mlp() -> list:
    return [layers.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(1)]


# Optimizers.

OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.05),
    "SGD with Nesterov momentum": lambda: optimizers.SGD(
        0.05, momentum=0.9, nesterov=True
    ),
    "Adam": lambda: optimizers.Adam(1e-2),
    "Adam with amsgrad": lambda: optimizers.Adam(1e-2, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(1e-2),
    "Adamax": lambda: optimizers.Adamax(1e-2),
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adafactor": lambda: optimizers.Adafactor(1e-2),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lamb": lambda: optimizers.Lamb(1e-2),
    "Lion": lambda: optimizers.Lion(1e-3),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(1e-2)
    ),
    "Muon": lambda: optimizers.Muon(1e-2),
    "Nadam": lambda: optimizers.Nadam(1e-2),
    "RMSprop": lambda: optimizers.RMSprop(1e-2, centered=True),
}


def multi_optimizer() -> optimizers.Optimizer:
    first, second = optimizers.Adam(1e-2), optimizers.SGD(0.05)
    return optimizers.MultiOptimizer(
        lambda variable: first if "kernel" in variable.path else second
    )


if hasattr(optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["ScheduleFreeAdamW"] = lambda: optimizers.ScheduleFreeAdamW(1e-2)
if hasattr(optimizers, "MultiOptimizer"):  # from Keras 3.15 on
    OPTIMIZERS["MultiOptimizer"] = multi_optimizer


def layerwise() -> list:
    return [
        layers.Input((8,)),
        layers.Dense(16, "tanh", name="body"),
        layers.Dense(1, name="head"),
    ]


def slow_body_fast_head(**options) -> optimizers.Optimizer:
    slow = optimizers.Adam(1e-4, **options)
    fast = optimizers.SGD(1e-2, momentum=0.9)
    return optimizers.MultiOptimizer(
        lambda variable: fast if "head" in variable.path else slow
    )


if hasattr(optimizers, "MultiOptimizer"):
    case("learning rates by layer", layerwise, optimizer=slow_body_fast_head)
    case(
        "accumulation in one of several optimizers",
        layerwise,
        optimizer=lambda: slow_body_fast_head(gradient_accumulation_steps=5),
    )

for name, make in OPTIMIZERS.items():
    case(
        f"optimizer {name}",
        optimizer=make,
        built=name == "ScheduleFreeAdamW",
    )

# What optimizers do with gradients. The limits bind. A learning rate that is no
# power of two shows in which order numbers are multiplied.

case("clipnorm", optimizer=lambda: optimizers.SGD(0.3, clipnorm=0.1))
case("clipvalue", optimizer=lambda: optimizers.SGD(0.5, clipvalue=0.02))
case(
    "global_clipnorm",
    optimizer=lambda: optimizers.SGD(0.3, global_clipnorm=0.1),
)
case("weight decay", optimizer=lambda: optimizers.SGD(0.05, weight_decay=0.1))
case("ema", optimizer=lambda: optimizers.SGD(0.05, use_ema=True))
case(
    "ema overwrites",
    optimizer=lambda: optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
)
case(
    "accumulation of 2",
    optimizer=lambda: optimizers.SGD(
        0.3, gradient_accumulation_steps=2, global_clipnorm=0.1
    ),
)
case(
    "accumulation of 5",  # 12 batches leave a group that is not applied
    optimizer=lambda: optimizers.Adam(
        1e-2, gradient_accumulation_steps=5, global_clipnorm=0.5
    ),
)
case(
    "accumulation with loss scaling",
    optimizer=lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(1e-2, gradient_accumulation_steps=2)
    ),
)
OVERFLOWS = X.copy()
OVERFLOWS[13] = 1e37  # on the last replica of the first batch only
case(
    "overflow on one replica",
    x=OVERFLOWS,
    body=lambda: [layers.Input((8,)), layers.Dense(1)],
    optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01)),
    compile=lambda: {"metrics": []},
)
case(
    "overflow on one replica while accumulating",
    x=OVERFLOWS,
    body=lambda: [layers.Input((8,)), layers.Dense(1)],
    optimizer=lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.01, gradient_accumulation_steps=2)
    ),
    compile=lambda: {"metrics": []},
)
for policy in ("mixed_float16", "mixed_bfloat16"):
    case(
        policy,
        body=lambda policy=policy: [
            layers.Input((8,)),
            layers.Dense(16, "tanh", dtype=policy),
            layers.Dense(1, dtype=policy),
        ],
        optimizer=lambda policy=policy: (
            optimizers.LossScaleOptimizer(optimizers.SGD(0.05))
            if policy == "mixed_float16"
            else optimizers.SGD(0.05)
        ),
        # Gradients are sums of other parts, rounded to 11 and 8 bits.
        rtol=2e-3 if policy == "mixed_float16" else 2e-2,
    )
case(
    "learning-rate schedule",
    optimizer=lambda: optimizers.Adam(
        optimizers.schedules.CosineDecay(1e-2, 12, warmup_steps=3)
    ),
)

# Steps.

for steps in (3, 8):
    case(
        f"steps_per_execution {steps}",
        compile=lambda steps=steps: {"steps_per_execution": steps},
    )
case("run_eagerly", compile=lambda: {"run_eagerly": True}, epochs=1)

# Losses.


def scalar_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def per_sample_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


class Additional(layers.Layer):
    """Adds a loss of the data."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


case("loss that returns a scalar", compile=lambda: {"loss": scalar_loss})
case("loss a sample", compile=lambda: {"loss": per_sample_loss})
for reduction in ("sum", "mean_with_sample_weight"):
    case(
        f"loss {reduction}",
        optimizer=lambda: optimizers.SGD(1e-3),
        compile=lambda reduction=reduction: {
            "loss": keras.losses.MeanSquaredError(reduction=reduction)
        },
        sample_weight=WEIGHTS,
    )
case(
    "regularizers and constraints",
    body=lambda: [
        layers.Input((8,)),
        layers.Dense(
            16,
            "tanh",
            kernel_regularizer="l2",
            activity_regularizer=keras.regularizers.L1(0.01),
            kernel_constraint=keras.constraints.MaxNorm(0.5),
        ),
        Additional(),
        layers.Dense(1, bias_regularizer="l1"),
    ],
)
case("sample_weight", sample_weight=WEIGHTS, compile=lambda: {
    "weighted_metrics": ["mse"],
})  # fmt: skip
case(
    "class_weight",
    body=lambda: [layers.Input((8,)), layers.Dense(3, "softmax")],
    y=LABELS,
    compile=lambda: {
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    },
    class_weight={0: 1.0, 1: 3.0, 2: 0.2},
)
case(
    "ignored classes",
    body=lambda: [layers.Input((5, 4)), layers.Dense(12)],
    x=RNG.normal(size=(SAMPLES, 5, 4)).astype("float32"),
    y=TOKENS,
    compile=lambda: {
        "loss": keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=0
        ),
        "metrics": [],
    },
)


def two_heads() -> keras.Model:
    a, b = layers.Input((8,), name="a"), layers.Input((8,), name="b")
    hidden = layers.Dense(8, "tanh")(layers.concatenate([a, b]))
    outputs = {
        "value": layers.Dense(1, name="value")(hidden),
        "class": layers.Dense(3, "softmax", name="class")(hidden),
    }
    return keras.Model({"a": a, "b": b}, outputs)


case(
    "several inputs, outputs and losses",
    model=two_heads,
    x={"a": X, "b": X[::-1].copy()},
    y={"value": Y, "class": LABELS},
    compile=lambda: {
        "loss": {"value": "mse", "class": "sparse_categorical_crossentropy"},
        "loss_weights": {"value": 0.5, "class": 2.0},
        "metrics": {"class": ["accuracy"], "value": ["mae"]},
    },
)

# Layers.

case(
    "embedding, mask and LSTM",
    body=lambda: [
        layers.Input((5,), dtype="int32"),
        layers.Embedding(12, 6, mask_zero=True),
        layers.LSTM(5, return_sequences=True),
        layers.Dense(1),
    ],
    x=TOKENS,
    y=RNG.normal(size=(SAMPLES, 5, 1)).astype("float32"),
)
case(
    "embedding with sparse gradients and clipping",
    body=lambda: [
        layers.Input((5,), dtype="int32"),
        layers.Embedding(12, 6),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1),
    ],
    x=TOKENS,
    optimizer=lambda: optimizers.Adam(1e-2, clipnorm=0.1),
)
for name, optimizer in {
    "SGD": OPTIMIZERS["SGD"],
    "momentum": OPTIMIZERS["SGD with Nesterov momentum"],
    "RMSprop": lambda: optimizers.RMSprop(1e-2),
    "Adam": OPTIMIZERS["Adam"],
    "Adagrad": OPTIMIZERS["Adagrad"],
}.items():
    # Many rows, so that several threads would write them.
    case(
        f"rows that repeat, {name}",
        body=lambda: [
            layers.Input((64,), dtype="int32"),
            layers.Embedding(500, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ],
        x=np.random.default_rng(1).integers(0, 500, (SAMPLES, 64)),
        optimizer=optimizer,
    )


def attention() -> keras.Model:
    x = layers.Input((5, 4))
    h = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    h = layers.LayerNormalization()(x + h)
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(h)))


case(
    "attention",
    model=attention,
    x=RNG.normal(size=(SAMPLES, 5, 4)).astype("float32"),
    # A key's bias moves all scores of a query alike, which a softmax ignores.
    only_roundings=("key/bias", "key_bias"),
)
case(
    "GRU and bidirectional",
    body=lambda: [
        layers.Input((5, 4)),
        layers.Bidirectional(layers.GRU(3)),
        layers.Dense(1),
    ],
    x=RNG.normal(size=(SAMPLES, 5, 4)).astype("float32"),
)


def convolution() -> list:
    return [
        layers.Input((6, 6, 2)),
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(synchronized=True),
        layers.Activation("relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
    ]


case("convolution and synchronized statistics", convolution, x=IMAGES)
case(
    "last batch of one sample",
    convolution,
    x=IMAGES[:33],
    y=Y[:33],
    epochs=2,
)
case("first batch of one sample", convolution, x=IMAGES[:1], y=Y[:1])


def average(kept: keras.Variable, x: tf.Tensor) -> None:
    kept.assign(kept * 0.9 + keras.ops.mean(x, 0) * 0.1)


case(
    "moving average of a layer",
    body=lambda: [layers.Input((8,)), Keeps(average), layers.Dense(1)],
)


def frozen() -> list:
    hidden = layers.Dense(16, "tanh", trainable=False)
    return [layers.Input((8,)), hidden, layers.Dense(1)]


def lora() -> keras.Model:
    model = keras.Sequential(mlp())
    model.layers[0].enable_lora(2)
    return model


case("frozen layers", frozen)
case("LoRA", model=lora)

# Models with steps of their own.


class OwnStep(keras.Model):
    """The documented custom `train_step`, with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential(mlp())
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"own": self.tracker.result(), "batch_loss": loss}


class Adversarial(keras.Model):
    """Two networks and two optimizers, and no `call`."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(mlp())
        self.critic = keras.Sequential([layers.Input((1,)), layers.Dense(1)])
        self.built = True

    def compile(self, jit_compile=False, **options):
        super().compile(
            jit_compile=jit_compile, optimizer=None, loss=None, metrics=None
        )
        self.first = optimizers.Adam(1e-2)
        self.second = optimizers.Adam(1e-2)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            fake = self.generator(x)
            critic_loss = keras.ops.mean(
                self.critic(fake) - self.critic(y)
            ) + 0.1 * keras.ops.mean(self.critic(y) ** 2)
        gradients = tape.gradient(critic_loss, self.critic.trainable_variables)
        self.first.apply(gradients, self.critic.trainable_variables)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.critic(self.generator(x)) - 1) ** 2)
        gradients = tape.gradient(loss, self.generator.trainable_variables)
        self.second.apply(gradients, self.generator.trainable_variables)
        return {"critic": critic_loss, "generator": loss}


case("own train_step", model=OwnStep, compile=lambda: {"metrics": None})
case("two optimizers and no call", model=Adversarial)

# Metrics, also as callbacks see them at each batch.

case(
    "metrics of counts",
    body=lambda: [layers.Input((8,)), layers.Dense(1, "sigmoid")],
    y=BINARY,
    compile=lambda: {
        "loss": "binary_crossentropy",
        "metrics": [
            keras.metrics.AUC(num_thresholds=20, name="auc"),
            keras.metrics.TruePositives(name="hits"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.F1Score(threshold=0.5, name="f1"),
            keras.metrics.MeanIoU(2, name="iou"),
            "accuracy",
        ],
    },
)
case("validation_data", validation_data=(X[:9], Y[:9]))
case("validation_split", validation_split=0.2)

# Input.


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(index * 16, (index + 1) * 16)
        return X[rows], Y[rows]


def dataset(size: int = 16) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def one_shot():
    for begin in range(0, 48, 16):
        yield X[begin : begin + 16], Y[begin : begin + 16]


case("tf.data", fit=lambda: {"x": dataset()})
case("tf.data of whole batches", fit=lambda: {"x": dataset(15).take(4)})
case("PyDataset", fit=lambda: {"x": Batches()})
case(
    "one-shot generator",
    fit=lambda: {"x": one_shot(), "epochs": 1},
    steps=3,
)
case(
    "generator without end",
    fit=lambda: {
        "x": (batch for _ in range(99) for batch in one_shot()),
        "steps_per_epoch": 5,
    },
)
case(
    "steps_per_epoch", fit=lambda: {"x": dataset().repeat()}, steps_per_epoch=6
)
case("more devices than samples", x=X[:3], y=Y[:3])
case(
    "strings",
    body=lambda: [
        layers.Input((1,), dtype="string"),
        layers.StringLookup(vocabulary=["a", "b"]),
        layers.Embedding(3, 2),
        layers.Flatten(),
        layers.Dense(1),
    ],
    fit=lambda: {
        "x": tf.data.Dataset.from_tensor_slices(
            (np.array([["a"], ["b"], ["?"]] * 7), Y[:21])
        ).batch(8)
    },
)
case(
    "booleans",
    body=lambda: [
        layers.Input((8,), dtype="bool"),
        layers.Lambda(lambda x: keras.ops.cast(x, "float32")),
        layers.Dense(1),
    ],
    x=X > 0,
)
case(
    "ragged",
    body=lambda: [
        layers.Lambda(lambda x: x.to_tensor(shape=(None, 4))),
        layers.Dense(1),
    ],
    fit=lambda: {
        "x": tf.data.Dataset.from_tensor_slices(
            (tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0] * 4] * 5), Y[:20])
        ).batch(8)
    },
)
case(
    "sparse",
    fit=lambda: {
        "x": tf.data.Dataset.from_tensor_slices(
            (tf.sparse.from_dense(np.where(X > 0, X, 0)), Y)
        ).batch(16)
    },
)
