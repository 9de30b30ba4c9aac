"""Trainings put together from parts: losses, gradients, state, metrics, logs.

A loss is a tree of names, such as `("sqrt", ("mean", ("squares",)))`, so that
what a search finds prints as a program.
"""

import keras
import tensorflow as tf
from hypothesis import strategies as st
from keras import layers
from keras import ops

# Of targets and predictions, one number per sample.
LEAVES = {
    "squares": lambda y, p: tf.reduce_sum((y - p) ** 2, -1),
    "unreduced": keras.losses.MeanAbsoluteError(reduction="none"),
    "first": lambda y, p: p[:, 0],
    "product": lambda y, p: tf.reduce_sum(y * tf.tanh(p), -1),
    "entropy": lambda y, p: tf.nn.softmax_cross_entropy_with_logits(
        tf.nn.softmax(y), p
    ),
    "norm": lambda y, p: tf.sqrt(0.1 + tf.reduce_sum(p**2, -1)),
}


def _mask(y):
    return tf.cast(y[:, 0] > 0, y.dtype)


def _count(y):
    return tf.cast(tf.shape(y)[0], y.dtype)


def _contrast(y, p):
    """Compares each prediction with the targets of all samples."""
    left, right = tf.nn.l2_normalize(p + 0.1, 1), tf.nn.l2_normalize(y, 1)
    logits = tf.matmul(left, right, transpose_b=True)
    labels = tf.range(tf.shape(y)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def _distances(y, p):
    """The mean distance of each prediction to all of them."""
    pairs = p[:, None] - p[None]
    return tf.reduce_mean(tf.sqrt(0.1 + tf.reduce_sum(pairs**2, -1)), 1)


MIXED_LEAVES = {"contrast": _contrast, "distances": _distances}

ROWS_OF_ROWS = {
    "masked": lambda y, r: r * _mask(y),
    "chosen": lambda y, r: tf.where(y[:, 1] > 0, r, 0.1),
    "weighted": lambda y, r: r * y[:, 1] ** 2,
    "over count": lambda y, r: r / _count(y),
    "tanh": lambda y, r: tf.tanh(r),
    "less mean": lambda y, r: r - tf.reduce_mean(r),
    "over root": lambda y, r: r / tf.sqrt(1 + tf.reduce_mean(r**2)),
    "softmax": lambda y, r: tf.nn.softmax(tf.tanh(r), 0),
}
SCALARS_OF_ROWS = {
    "mean": lambda y, r: tf.reduce_mean(r),
    "sum": lambda y, r: 0.1 * tf.reduce_sum(r),
    "sum over a constant": lambda y, r: tf.reduce_sum(r) / 16.0,
    "sum over count": lambda y, r: tf.reduce_sum(r) / _count(y),
    "masked mean": lambda y, r: (
        tf.reduce_sum(r * _mask(y)) / (0.5 + tf.reduce_sum(_mask(y)))
    ),
    "no nan mean": lambda y, r: tf.math.divide_no_nan(
        tf.reduce_sum(r * _mask(y)), tf.reduce_sum(_mask(y))
    ),
    "weighted mean": lambda y, r: (
        tf.reduce_sum(r * y[:, 1] ** 2) / (0.1 + tf.reduce_sum(y[:, 1] ** 2))
    ),
    "largest": lambda y, r: tf.reduce_max(r),
    "logsumexp": lambda y, r: tf.reduce_logsumexp(r),
    "variance": lambda y, r: tf.math.reduce_variance(r),
    "dot": lambda y, r: 0.1 * tf.tensordot(r, y[:, 0], 1),
    "keras mean": lambda y, r: ops.mean(r),
    "average": lambda y, r: tf.nn.compute_average_loss(r, global_batch_size=6),
}
SCALARS_OF_SCALARS = {
    "sqrt": lambda a: tf.sqrt(0.1 + a**2),
    "tanh": tf.tanh,
    "exp": lambda a: tf.exp(-(a**2)),
    "constant": tf.stop_gradient,
    "half": lambda a: 0.5 * a,
    "in a function": tf.function(lambda a: 2 * tf.tanh(a)),
}
SCALARS_OF_TWO = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: tf.tanh(a) * b,
    "divide": lambda a, b: a / (1 + b**2),
    "maximum": tf.maximum,
    "choose": lambda a, b: tf.where(a > b, a, 2 * b),
    "cond": lambda a, b: tf.cond(a > b, lambda: a, lambda: 2 * b),
}


def _dice(y, p):
    both = tf.reduce_sum(y * y) + tf.reduce_sum(p * p)
    return 1 - 2 * tf.reduce_sum(y * p) / (0.1 + both)


def _moments(y, p):
    """How far the means and the products of predictions are from targets'."""
    means = tf.reduce_mean(p, 0) - tf.reduce_mean(y, 0)
    products = (tf.transpose(p) @ p - tf.transpose(y) @ y) / _count(y)
    return tf.reduce_sum(means**2) + 0.1 * tf.reduce_sum(products**2)


SCALAR_LEAVES = {"dice": _dice, "moments": _moments}


def named(names):
    return st.sampled_from(sorted(names)).map(lambda name: (name,))


def of_rows(mixed=True):
    """Draws an expression with one number per sample."""
    leaves = named([*LEAVES, *(MIXED_LEAVES if mixed else ())])
    return leaves | st.tuples(st.sampled_from(sorted(ROWS_OF_ROWS)), leaves)


def of_scalars():
    """Draws an expression that is one number."""
    leaves = named(SCALAR_LEAVES) | st.tuples(
        st.sampled_from(sorted(SCALARS_OF_ROWS)), of_rows()
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.tuples(st.sampled_from(sorted(SCALARS_OF_SCALARS)), inner)
            | st.tuples(st.sampled_from(sorted(SCALARS_OF_TWO)), inner, inner)
        ),
        max_leaves=3,
    )


def value(tree, y, p):
    """Computes an expression of targets and predictions."""
    name, *parts = tree
    for leaves in (LEAVES, MIXED_LEAVES, SCALAR_LEAVES):
        if not parts and name in leaves:
            return leaves[name](y, p)
    values = [value(part, y, p) for part in parts]
    if len(parts) == 2:
        return SCALARS_OF_TWO[name](*values)
    if values[0].shape.rank == 0:
        return SCALARS_OF_SCALARS[name](*values)
    return (ROWS_OF_ROWS | SCALARS_OF_ROWS)[name](y, *values)


# What a step does to gradients before it applies them.
CHANGES = {
    "none": lambda grads, loss: grads,
    "clipped": lambda grads, loss: tf.clip_by_global_norm(grads, 0.05)[0],
    "clipped values": lambda grads, loss: [
        tf.clip_by_value(each, -0.02, 0.02) for each in grads
    ],
    "normalized": lambda grads, loss: [
        each / (tf.norm(each) + 0.1) for each in grads
    ],
    "centralized": lambda grads, loss: [
        each - tf.reduce_mean(each) for each in grads
    ],
    "by the loss": lambda grads, loss: [
        each * tf.tanh(tf.reduce_mean(loss)) for each in grads
    ],
}


# What a layer keeps of its data in training, in `kept` and `steps`.
def _sum(layer, x):
    layer.kept.assign_add(0.01 * ops.sum(x, 0))


def _sum_by_assign(layer, x):
    layer.kept.assign(layer.kept + 0.01 * ops.sum(x, 0))


def _mean(layer, x):
    layer.kept.assign(ops.mean(x, 0))


def _moving(layer, x):
    layer.kept.assign(0.9 * layer.kept + 0.1 * ops.mean(x, 0))


def _moving_by_add(layer, x):
    layer.kept.assign_add(0.1 * (ops.mean(x, 0) - layer.kept))


def _moving_deviation(layer, x):
    layer.kept.assign(0.9 * layer.kept + 0.1 * ops.sqrt(0.1 + ops.var(x, 0)))


def _moving_sub(layer, x):
    layer.kept.assign_sub(0.1 * (layer.kept - ops.sum(x, 0) / 8))


def _codebook(layer, x):
    chosen = ops.one_hot(ops.argmax(x[:, :6], -1), 6)
    sums = ops.transpose(x) @ chosen
    counts = 1 + ops.sum(chosen, 0)
    layer.kept.assign(0.9 * layer.kept + 0.1 * ops.mean(sums / counts, -1))


def _largest(layer, x):
    layer.kept.assign(ops.maximum(layer.kept, ops.max(x, 0)))


def _last(layer, x):
    layer.kept.assign(x[-1])


def _counted(layer, x):
    layer.steps.assign(layer.steps + ops.shape(x)[0])


def _counted_by_add(layer, x):
    layer.steps.assign_add(ops.shape(x)[0])
    layer.kept.assign_add(0 * layer.kept + 0.1)


def _counted_positives(layer, x):
    layer.steps.assign_add(ops.sum(ops.cast(x[:, 0] > 0, "int32")))


def _added_and_reset(layer, x):
    layer.steps.assign_add(1)
    layer.kept.assign_add(0.01 * ops.sum(x, 0))
    reset = ops.equal(layer.steps % 2, 0)
    layer.kept.assign(ops.where(reset, 0.0, layer.kept.value))


def _by_cond(layer, x):
    layer.steps.assign_add(1)
    total = ops.mean(x, 0)
    layer.kept.assign(
        tf.cond(layer.steps.value > 1, lambda: total, lambda: 0 * total)
    )


KEPT = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        _sum,
        _sum_by_assign,
        _mean,
        _moving,
        _moving_by_add,
        _moving_deviation,
        _moving_sub,
        _codebook,
        _largest,
        _last,
        _counted,
        _counted_by_add,
        _counted_positives,
        _added_and_reset,
        _by_cond,
    )
}


class Keeping(layers.Layer):
    """Keeps something of its data, and may return data that depends on it."""

    def __init__(self, update, is_used):
        super().__init__()
        self.update, self.is_used = update, is_used

    def build(self, shape):
        self.kept = self.add_weight(
            shape=shape[1:], initializer="ones", trainable=False
        )
        self.steps = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.update(self, x)
        return x + 0.1 * ops.tanh(self.kept) if self.is_used else x


class OfMeans(keras.metrics.Metric):
    """The mean over batches of a mean over the batch."""

    def __init__(self):
        super().__init__(name="of_means")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.batches = self.add_weight(initializer="zeros", name="batches")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.mean((y - p) ** 2))
        self.batches.assign_add(1)

    def result(self):
        return self.total / self.batches


class Largest(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_weight(initializer="zeros", name="largest")

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max((y - p) ** 2)))

    def result(self):
        return ops.sqrt(self.largest)


class RootOfSums(keras.metrics.Metric):
    """The root of a ratio of what is summed over samples."""

    def __init__(self):
        super().__init__(name="root")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.size = self.add_weight(initializer="zeros", name="size")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign(self.total + ops.sum((y - p) ** 2))
        self.size.assign_add(ops.cast(ops.shape(y)[0], "float32"))

    def result(self):
        return ops.sqrt(self.total / self.size)


METRICS = {
    "mae": lambda: "mae",
    "rmse": keras.metrics.RootMeanSquaredError,
    "r2": lambda: keras.metrics.R2Score(class_aggregation="uniform_average"),
    "cosine": keras.metrics.CosineSimilarity,
    "of means": OfMeans,
    "largest": Largest,
    "root": RootOfSums,
}
LOSSES = {
    "mse": lambda: "mse",
    "huber": lambda: "huber",
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "unreduced": lambda: keras.losses.MeanSquaredError(reduction=None),
    "weighted": lambda: keras.losses.MeanSquaredError(
        reduction="mean_with_sample_weight"
    ),
    "cosine": keras.losses.CosineSimilarity,
    "log cosh": keras.losses.LogCosh,
}


class Drawn(keras.Model):
    """A small model, and a step of one of several forms.

    Args:
        run: What was drawn.
    """

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.keeping = [
            Keeping(KEPT[name], is_used) for name, is_used in run["kept"]
        ]
        self.hidden = layers.Dense(4, "tanh")
        self.dense = layers.Dense(3)
        self.mean = keras.metrics.Mean(name="mean")
        self.weighted = keras.metrics.Mean(name="weighted")
        self.each = keras.metrics.Mean(name="each")

    def build(self, shape):
        for layer in self.keeping:
            layer.build(shape)
        self.hidden.build(shape)
        self.dense.build((None, 4))
        if self.run["change"] == "accumulated":
            self.sums = [
                self.add_weight(shape=v.shape, initializer="zeros")
                for v in self.trained
            ]
            for each in self.sums:
                each.trainable = False
            self.steps = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False
            )

    @property
    def trained(self):
        return [*self.hidden.trainable_weights, *self.dense.trainable_weights]

    def call(self, x, training=False):
        for layer in self.keeping:
            x = layer(x, training=training)
        z = self.hidden(x)
        if self.run["dropout"] is not None:
            z = keras.random.dropout(z, 0.3, seed=self.run["dropout"])
        p = self.dense(z)
        for tree in self.run["added"]:
            self.add_loss(0.3 * value(tree, x[:, :3], p))
        return p

    def compute_loss(self, x=None, y=None, y_pred=None, *rest, **options):
        if self.run["form"] != "compute_loss":
            return super().compute_loss(x, y, y_pred, *rest, **options)
        return value(self.run["loss"], y, y_pred) + sum(self.losses)


class DrawnStep(Drawn):
    """A model with a step of its own."""

    @property
    def metrics(self):
        return [self.mean, self.weighted, self.each]

    def train_step(self, data):
        x, y = data[:2]
        if self.run["optimizers"] == "two in turn":
            self.loss_and_apply(x, y, self.hidden.trainable_weights, self.first)
            loss, p, grads = self.loss_and_apply(
                x, y, self.dense.trainable_weights, self.optimizer
            )
        else:
            loss, p, grads = self.loss_and_apply(x, y, self.trained, None)
        self.mean.update_state(loss)
        self.weighted.update_state(loss, sample_weight=tf.shape(x)[0])
        self.each.update_state(
            LEAVES["squares"](y, p), sample_weight=x[:, 0] ** 2
        )
        logs = {
            "loss": self.mean.result(),
            "weighted": self.weighted.result(),
            "each": 100 * self.each.result(),
            "norm": tf.linalg.global_norm(grads),
            # Of a program that XLA compiles a log is one number.
            "of the batch": tf.reduce_sum(loss)
            if self.run["compiled_by_xla"]
            else loss,
        }
        for position, tree in enumerate(self.run["logs"]):
            logs[f"log {position}"] = value(tree, y, p)
        return logs

    def loss_and_apply(self, x, y, variables, optimizer):
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = value(self.run["loss"], y, p) + sum(self.losses)
        grads = [
            tf.zeros(variable.shape) if gradient is None else gradient
            for gradient, variable in zip(
                tape.gradient(loss, variables), variables, strict=True
            )
        ]
        if self.run["change"] == "accumulated" and optimizer is None:
            self.accumulate(grads, variables)
            return loss, p, grads
        change = CHANGES.get(self.run["change"], CHANGES["none"])
        self.apply(change(list(grads), loss), variables, optimizer)
        return loss, p, grads

    def apply(self, grads, variables, optimizer):
        if optimizer is None and self.run["optimizers"] == "two":
            self.first.apply(grads[:2], variables[:2])
            self.optimizer.apply(grads[2:], variables[2:])
        else:
            (optimizer or self.optimizer).apply(grads, variables)

    def accumulate(self, grads, variables):
        for kept, gradient in zip(self.sums, grads, strict=True):
            kept.assign_add(gradient)
        self.steps.assign_add(1)

        def update():
            self.apply([kept / 2 for kept in self.sums], variables, None)
            for kept in self.sums:
                kept.assign(ops.zeros_like(kept))
            return 0

        tf.cond(tf.equal(self.steps.value % 2, 0), update, lambda: 0)
