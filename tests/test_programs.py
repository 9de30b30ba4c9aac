"""Programs as users write them: replicated, they train what one device does.

Each is small. Those that draw random numbers are in `test_random_draws.py`.
"""

import functools
from contextlib import nullcontext as nothing

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import COUNTS
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from keras import layers
from keras import ops
from models import assert_same_training

import keras_conflux as kc

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 6)).astype("float32")
GLOROT = keras.initializers.GlorotUniform(seed=1)
LABELS = RNG.integers(0, 3, 22)


def batches(*arrays, size=8):
    """Returns batches of 8, 8 and 6 samples."""
    data = arrays[0] if len(arrays) == 1 else arrays
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def mlp(*sizes, name=None):
    """Makes dense layers, always with the same weights."""
    keras.utils.set_random_seed(1)
    body = [layers.Dense(size, "tanh") for size in sizes[1:-1]]
    return keras.Sequential(
        [keras.Input(sizes[:1]), *body, layers.Dense(sizes[-1])], name=name
    )


def sgd():
    return keras.optimizers.SGD(0.05)


class GAN(keras.Model):
    """Its metrics are made in `compile`, after that of Keras."""

    def __init__(self, discriminator=None):
        super().__init__()
        self.generator = mlp(4, 8, 6)
        self.discriminator = discriminator or mlp(6, 8, 1)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real, noise = data
        fake = self.generator(noise)
        samples = ops.concatenate([fake, real], axis=0)
        size = ops.shape(real)[0]
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(samples))
        weights = self.discriminator.trainable_weights
        grads = tape.gradient(d_loss, weights)
        self.d_optimizer.apply_gradients(zip(grads, weights, strict=True))

        with tf.GradientTape() as tape:
            verdict = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((size, 1)), verdict)
        weights = self.generator.trainable_weights
        grads = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def train_gan(model):
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(sgd(), sgd(), loss)
    return model, model.fit(batches(X, X[:, :4]), epochs=2, verbose=0)


GANS = {
    "replicated before compile": lambda: train_gan(kc.replicate(GAN(), MANY)),
    "shares a replicated model": lambda: train_gan(
        GAN(kc.replicate(mlp(6, 8, 1), MANY))
    ),
}


@functools.cache
def gan_of_one_device():
    return train_gan(GAN())


@pytest.mark.long
@several
@pytest.mark.parametrize("how", ["scope", "distribution", *GANS])
def test_metrics_may_read_what_compile_sets_after_keras(how):
    one, one_logs = gan_of_one_device()
    if how in GANS:
        many, many_logs = GANS[how]()
    else:
        names = [f"{each.kind.lower()}:{each.ordinal}" for each in DEVICES]
        parallel = keras.distribution.DataParallel(devices=names[:MANY])
        scopes = {
            "scope": kc.replicate(devices=MANY),
            "distribution": parallel.scope(),
        }
        with scopes[how]:
            many, many_logs = train_gan(GAN())
    assert many.distribute_strategy is kc.replicate(devices=MANY)
    assert_same_training(one, many, one_logs, many_logs)
    kc.assert_in_sync(many)


class VAE(keras.Model):
    """Has losses by sample, a mean of which it trains, and own metrics."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(6, 8, 4), mlp(2, 8, 6)
        self.trackers = {
            name: keras.metrics.Mean(name=name)
            for name in ("loss", "reconstruction", "kl")
        }

    @property
    def metrics(self):
        return list(self.trackers.values())

    def train_step(self, data):
        x, noise = data
        with tf.GradientTape() as tape:
            mean, log_var = ops.split(self.encoder(x), 2, axis=1)
            z = mean + ops.exp(0.5 * log_var) * noise
            reconstruction = ops.mean(
                ops.sum(ops.square(x - self.decoder(z)), axis=1)
            )
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = reconstruction + kl
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(grads, self.trainable_weights, strict=True)
        )
        values = {"loss": loss, "reconstruction": reconstruction, "kl": kl}
        for name, value in values.items():
            self.trackers[name].update_state(value)
        return {name: each.result() for name, each in self.trackers.items()}


def vae():
    model = VAE()
    model.compile(sgd())
    return model, batches(X, X[:, 4:])


class Distiller(keras.Model):
    """A student learns labels, and the softened answers of a teacher."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(6, 4, 3), mlp(6, 8, 3)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        labels = super().compute_loss(x, y, y_pred, sample_weight, training)
        soft = ops.softmax(self.teacher(x, training=False) / 3.0)
        distilled = keras.losses.KLDivergence()(soft, ops.softmax(y_pred / 3.0))
        return 0.3 * labels + 0.7 * distilled * 9.0


def distiller():
    model = Distiller()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(sgd(), loss, metrics=["sparse_categorical_accuracy"])
    return model, batches(X, LABELS)


class SemiSupervised(keras.Model):
    """Trains a probe on labels, and an encoder on how alike two views are."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp(6, 8, 4)
        self.probe = keras.Sequential([mlp(4, 3)])

    def compile(self, contrastive_optimizer, probe_optimizer):
        super().compile()
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )
        self.alike = keras.metrics.Mean(name="c_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(
            name="p_acc"
        )

    @property
    def metrics(self):
        return [self.alike, self.probe_accuracy]

    def train_step(self, data):
        x, labels = data
        with tf.GradientTape() as tape:
            first, second = self.encoder(x), self.encoder(x[:, ::-1])
            alike = keras.losses.cosine_similarity(first, second)
            loss = ops.mean(alike)
        weights = self.encoder.trainable_weights
        grads = tape.gradient(loss, weights)
        self.contrastive_optimizer.apply_gradients(
            zip(grads, weights, strict=True)
        )
        self.alike.update_state(loss)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(x, training=False))
            loss = self.probe_loss(labels, logits)
        weights = self.probe.trainable_weights
        grads = tape.gradient(loss, weights)
        self.probe_optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.probe_accuracy.update_state(labels, logits)
        return {each.name: each.result() for each in self.metrics}


def semi_supervised():
    model = SemiSupervised()
    model.compile(sgd(), sgd())
    return model, batches(X, LABELS)


def gan():
    model = GAN()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(sgd(), sgd(), loss)
    return model, batches(X, X[:, :4])


class DDIM(keras.Model):
    """Denoises, and keeps a moving average of its network in a second one."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.normalizer.adapt(X)
        self.network = mlp(7, 8, 6)
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **options):
        super().compile(**options)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def noise_loss(self, network, data):
        x, noise, time = data
        x = self.normalizer(x)
        noisy = ops.cos(time) * x + ops.sin(time) * noise
        guess = network(ops.concatenate([noisy, time], axis=1))
        return self.loss(noise, guess)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.noise_loss(self.network, data)
        weights = self.network.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.noise_loss_tracker.update_state(loss)
        for weight, kept in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            kept.assign(0.9 * kept + 0.1 * weight)
        return {each.name: each.result() for each in self.metrics}

    def test_step(self, data):
        loss = self.noise_loss(self.ema_network, data)
        self.noise_loss_tracker.update_state(loss)
        return {each.name: each.result() for each in self.metrics}


def ddim():
    model = DDIM()
    model.compile(optimizer=sgd(), loss=keras.losses.mean_absolute_error)
    return model, batches(X, X[::-1], X[:, :1])


class Siamese(keras.Model):
    """Its loss is one number per sample, of plain arithmetic."""

    def __init__(self):
        super().__init__()
        self.network = mlp(6, 8, 4)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def triplet_loss(self, data):
        anchor, positive, negative = (self.network(each) for each in data)
        near = ops.sum(ops.square(anchor - positive), axis=-1)
        far = ops.sum(ops.square(anchor - negative), axis=-1)
        # Without this, the last bias would have gradients of rounding.
        small = 0.01 * ops.sum(ops.square(anchor), axis=-1)
        return ops.maximum(near - far + 0.5, 0.0) + small

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.triplet_loss(data)
        weights = self.network.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.triplet_loss(data))
        return {"loss": self.loss_tracker.result()}


def siamese():
    model = Siamese()
    model.compile(keras.optimizers.SGD(0.005))
    return model, batches(X, X[::-1], X * 2)


class Captioning(keras.Model):
    """Takes a step per caption, of a masked mean of an unreduced loss."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(20, kernel_initializer=GLOROT),
                layers.Reshape((4, 5)),
            ]
        )
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.acc_tracker = keras.metrics.Mean(name="acc")

    @property
    def metrics(self):
        return [self.loss_tracker, self.acc_tracker]

    def loss_and_accuracy(self, images, words):
        logits = self.network(images)
        mask = ops.cast(ops.not_equal(words, 0), "float32")
        loss = self.loss(words, logits) * mask
        loss = ops.sum(loss) / ops.sum(mask)
        right = ops.equal(words, ops.cast(ops.argmax(logits, -1), words.dtype))
        right = ops.cast(right, "float32") * mask
        return loss, ops.sum(right) / ops.sum(mask)

    def train_step(self, data):
        images, captions = data
        total, accuracy = 0.0, 0.0
        for index in range(2):
            with tf.GradientTape() as tape:
                loss, acc = self.loss_and_accuracy(images, captions[:, index])
            weights = self.network.trainable_weights
            grads = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(grads, weights, strict=True))
            total, accuracy = total + loss, accuracy + acc / 2
        self.loss_tracker.update_state(total)
        self.acc_tracker.update_state(accuracy)
        return {each.name: each.result() for each in self.metrics}


def captioning():
    model = Captioning()
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )
    model.compile(keras.optimizers.SGD(0.05), loss=loss)
    # Of equal lengths: what a replica divides by is then its samples' part.
    captions = np.random.default_rng(1).integers(1, 5, (22, 2, 4))
    return model, batches(X, captions)


class CTCEndpoint(layers.Layer):
    """Adds its own loss: one number per sample."""

    def call(self, labels, predictions):
        size = ops.shape(labels)[0]
        steps = ops.full((size,), predictions.shape[1], "int32")
        lengths = ops.full((size,), labels.shape[1], "int32")
        self.add_loss(
            ops.ctc_loss(labels, predictions, lengths, steps, mask_index=0)
        )
        return predictions


def captcha():
    keras.utils.set_random_seed(1)
    images = keras.Input((6,), name="image")
    labels = keras.Input((3,), dtype="int32", name="label")
    y = layers.Dense(40, kernel_initializer=GLOROT)(images)
    y = layers.Reshape((8, 5))(y)
    model = keras.Model([images, labels], CTCEndpoint()(labels, y))
    model.compile(keras.optimizers.SGD(0.002))
    words = np.random.default_rng(1).integers(1, 5, (22, 3))
    return model, batches({"image": X, "label": words.astype("int32")})


class TwoViews(keras.Model):
    """Returns the projections of both views, joined, and compares all."""

    def __init__(self, apart):
        super().__init__()
        self.encoder, self.apart = mlp(6, 8, 4), apart

    def call(self, views):
        return ops.concatenate([self.encoder(view) for view in views], 0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            both = ops.normalize(self(data), -1)
            if self.apart:
                one, other = tf.split(both, 2)
                logits = ops.matmul(one, ops.transpose(other))
                labels = ops.arange(ops.shape(one)[0])
            else:
                logits = ops.matmul(both, ops.transpose(both))
                size = ops.shape(both)[0]
                logits -= 9 * ops.eye(size)
                labels = (ops.arange(size) + size // 2) % size
            loss = ops.mean(
                ops.sparse_categorical_crossentropy(labels, logits, True)
            )
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def two_views(apart):
    model = TwoViews(apart)
    model.compile(sgd())
    return model, batches(X, X + 0.1 * X[::-1])


class Flow(keras.Model):
    """Sets its scales from the first batch, and then trains them."""

    def __init__(self):
        super().__init__()
        self.coupling = mlp(3, 8, 6)
        self.shift = self.add_weight(shape=(6,), initializer="zeros")
        self.log_scale = self.add_weight(shape=(6,), initializer="zeros")
        self.is_set = self.add_weight(
            shape=(), initializer="zeros", dtype="bool", trainable=False
        )

    def loss_of(self, x):
        x = (x - self.shift) * ops.exp(-self.log_scale)
        one, other = x[:, :3], x[:, 3:]
        scale, shift = ops.split(self.coupling(one), 2, 1)
        other = other * ops.exp(ops.tanh(scale)) + shift
        squares = ops.sum(one**2, 1) + ops.sum(other**2, 1)
        volume = ops.sum(ops.tanh(scale), 1) - ops.sum(self.log_scale)
        return ops.mean(squares / 2 - volume)

    def train_step(self, x):
        for kept, first in (
            (self.shift, ops.mean(x, 0)),
            (self.log_scale, ops.log(ops.std(x, 0))),
        ):
            kept.assign(ops.where(self.is_set, kept, first))
        self.is_set.assign(True)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def flow():
    model = Flow()
    model.compile(keras.optimizers.SGD(0.01))
    return model, batches(2 * X + 1)


class TextAndImage(keras.Model):
    """Keeps its temperature in bounds, and takes two steps per batch."""

    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(6, 8, 4), mlp(6, 4)
        self.temperature = self.add_weight(shape=(), initializer="ones")

    def train_step(self, data):
        for _ in range(2):
            self.temperature.assign(ops.clip(self.temperature, 0.0, 4.6))
            with tf.GradientTape() as tape:
                image = ops.normalize(self.image(data[0]), -1)
                text = ops.normalize(self.text(data[1]), -1)
                logits = ops.matmul(image, ops.transpose(text))
                logits = 3.0 * logits * self.temperature
                labels = ops.arange(ops.shape(logits)[0])
                loss = ops.mean(
                    ops.sparse_categorical_crossentropy(labels, logits, True)
                )
            weights = self.trainable_weights
            grads = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def text_and_image():
    model = TextAndImage()
    model.compile(keras.optimizers.SGD(0.2))
    return model, batches(X, X[:, ::-1])


class MaskedWords(keras.Model):
    """Has a head that only its step calls, on the words that are masked."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.words = layers.Embedding(9, 8)
        self.mixed, self.head = layers.Dense(8, "tanh"), layers.Dense(9)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="acc")

    @property
    def metrics(self):
        return [self.accuracy]

    def call(self, words):
        each = self.words(words)
        return self.mixed(each + ops.mean(each, 1, keepdims=True))

    def train_step(self, data):
        words, mask, labels = data
        with tf.GradientTape() as tape:
            hidden = tf.boolean_mask(self(words, training=True), mask)
            labels, logits = tf.boolean_mask(labels, mask), self.head(hidden)
            loss = ops.mean(
                ops.sparse_categorical_crossentropy(labels, logits, True)
            )
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        self.accuracy.update_state(labels, logits)
        return {"loss": loss, "acc": self.accuracy.result()}


def masked_words():
    model = MaskedWords()
    model.compile(keras.optimizers.SGD(0.5))
    rng = np.random.default_rng(1)
    words = rng.integers(0, 9, (2, 22, 5))
    return model, batches(words[0], rng.random((22, 5)) < 0.4, words[1])


class TwoTowers(keras.Model):
    """Ranks the items of the batch for each user, by ids that are strings."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        users, items = (
            [f"{kind}{i}" for i in range(9)] for kind in ("user", "item")
        )
        self.user = keras.Sequential(
            [layers.StringLookup(vocabulary=users), layers.Embedding(10, 4)]
        )
        self.item = keras.Sequential(
            [layers.StringLookup(vocabulary=items), layers.Embedding(10, 4)]
        )
        self.top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")

    def call(self, ids):
        return self.user(ids["user"]), self.item(ids["item"])

    def train_step(self, ids):
        with tf.GradientTape() as tape:
            users, items = self(ids, training=True)
            scores = ops.matmul(users, ops.transpose(items))
            own = tf.range(tf.shape(scores)[0])
            same = tf.equal(ids["item"][:, None], ids["item"][None])
            hits = tf.cast(same, "float32") - tf.eye(tf.shape(scores)[0])
            scores -= 1e9 * hits
            loss = ops.mean(
                ops.sparse_categorical_crossentropy(own, scores, True)
            )
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.top.update_state(own, scores)
        return {"loss": loss, "top": self.top.result()}


def two_towers():
    model = TwoTowers()
    model.compile(keras.optimizers.SGD(1.0))
    rng = np.random.default_rng(1)
    users, items = rng.integers(0, 9, (2, 22))
    ids = {
        "user": np.array([f"user{i}" for i in users]),
        "item": np.array([f"item{i}" for i in items]),
    }
    return model, batches(ids)


def multibox(labels, outputs):
    """Takes the hardest of all boxes of the batch, three for each object."""
    classes = tf.cast(labels[..., 0], "int32")
    errors = tf.nn.sparse_softmax_cross_entropy_with_logits(
        classes, outputs[..., :3]
    )
    objects = tf.cast(classes > 0, "float32")
    count = tf.reduce_sum(objects)
    wanted = tf.minimum(3 * count, tf.reduce_sum(1 - objects))
    others = tf.reshape(errors * (1 - objects), [-1])
    hardest = tf.math.top_k(others, tf.cast(wanted, "int32")).values
    apart = tf.reduce_sum(tf.abs(labels[..., 1:] - outputs[..., 3:]), -1)
    total = tf.reduce_sum(objects * (errors + apart))
    return (total + tf.reduce_sum(hardest)) / tf.maximum(count, 1.0)


def detector():
    body = mlp(6, 8, 5 * 4)
    model = keras.Sequential([keras.Input((6,)), body, layers.Reshape((5, 4))])
    model.compile(sgd(), multibox)
    rng = np.random.default_rng(1)
    classes = rng.integers(0, 3, (22, 5, 1)) * (rng.random((22, 5, 1)) < 0.3)
    boxes = rng.normal(size=(22, 5, 1))
    return model, batches(X, np.concatenate([classes, boxes], -1))


class ClippedPolicy(keras.Model):
    """Updates only while the policy is near the one that has acted (PPO)."""

    def __init__(self):
        super().__init__()
        self.policy, self.value = mlp(6, 8, 3), mlp(6, 4, 1)

    def train_step(self, data):
        states, actions, rewards, before = data
        with tf.GradientTape() as tape:
            values = self.value(states)[:, 0]
            gains = rewards - tf.stop_gradient(values)
            gains -= tf.reduce_mean(gains)
            gains /= tf.math.reduce_std(gains) + 1e-8
            each = tf.nn.log_softmax(self.policy(states))
            chosen = tf.reduce_sum(each * tf.one_hot(actions, 3), 1)
            ratio = tf.exp(chosen - before)
            clipped = tf.clip_by_value(ratio, 0.8, 1.2)
            loss = tf.reduce_mean((rewards - values) ** 2) - tf.reduce_mean(
                tf.minimum(ratio * gains, clipped * gains)
            )
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        gone = tf.reduce_mean(before - chosen)
        tf.cond(
            gone < 0.1,
            lambda: self.optimizer.apply(gradients, weights),
            lambda: None,
        )
        return {"loss": loss, "gone": gone}


def clipped_policy():
    model = ClippedPolicy()
    model.compile(sgd())
    model.optimizer.build(model.trainable_weights)
    rng = np.random.default_rng(2)
    rewards = rng.normal(size=22).astype("float32")
    before = np.float32(-1 + 0.6 * rng.normal(size=22))
    return model, batches(X, LABELS, rewards, before)


class PrivateSteps(keras.Model):
    """Clips the gradient of each sample, and adds noise to their mean."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 1)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((self.body(x) - y) ** 2, 1)
        each = tape.jacobian(errors, [weight.value for weight in weights])
        size = tf.shape(x)[0]
        norms = tf.sqrt(
            sum(tf.reduce_sum(tf.reshape(g, [size, -1]) ** 2, 1) for g in each)
        )
        scales = tf.minimum(1.0, 1.0 / norms)
        seed = tf.stack([tf.cast(self.optimizer.iterations, "int32"), 1])
        gradients = [
            tf.einsum("b,b...->...", scales, g) / tf.cast(size, "float32")
            + 0.1 * tf.random.stateless_normal(weight.shape, seed)
            for g, weight in zip(each, weights, strict=True)
        ]
        self.optimizer.apply(gradients, weights)
        return {"loss": tf.reduce_mean(errors), "norm": tf.reduce_max(norms)}


def private_steps():
    model = PrivateSteps()
    # XLA draws other noise than the graph that runs the first step.
    model.compile(sgd(), jit_compile=False)
    return model, batches(X, X[:, :1] * X[:, 1:2])


class FastWeights(keras.Model):
    """Learns weights from which one step learns each of many tasks (MAML)."""

    def __init__(self):
        super().__init__()
        self.body = mlp(1, 6, 1)

    def train_step(self, data):
        x, y, new_x, new_y = data
        weights = self.trainable_weights

        def predict(w, x):
            hidden = tf.tanh(x @ w[0] + w[1][:, None])
            return hidden @ w[2] + w[3][:, None]

        with tf.GradientTape() as tape:
            fast = [
                tf.tile(w[None], [tf.shape(x)[0]] + [1] * len(w.shape))
                for w in weights
            ]
            with tf.GradientTape() as inner:
                inner.watch(fast)
                loss = tf.reduce_sum(
                    tf.reduce_mean((predict(fast, x) - y) ** 2, [1, 2])
                )
            steps = inner.gradient(loss, fast)
            fast = [w - 0.1 * g for w, g in zip(fast, steps, strict=True)]
            loss = tf.reduce_mean((predict(fast, new_x) - new_y) ** 2)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def fast_weights():
    model = FastWeights()
    model.compile(sgd())
    data = np.random.default_rng(1).normal(size=(4, 22, 3, 1))
    return model, batches(*data.astype("float32"))


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 8, 3)

    def call(self, x):
        return self.body(x)


class MixUp(Classifier):
    """Mixes samples with others of the batch, and labels, which get one-hot."""

    def train_step(self, data):
        x, y, share = data
        share, y = share[:, None], tf.one_hot(y, 3)
        x = share * x + (1 - share) * tf.reverse(x, [0])
        y = share * y + (1 - share) * y[::-1]
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, outputs)


def mix_up():
    model = MixUp()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(sgd(), loss, metrics=["accuracy"])
    share = np.random.default_rng(1).random(22).astype("float32")
    return model, batches(X, LABELS, share)


class SharpnessAware(Classifier):
    """Takes the gradient where the loss is highest nearby (SAM)."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        steps = [0.2 * gradient / norm for gradient in gradients]
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            highest = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(highest, weights)
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_sub(step)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, "norm": norm}


def sharpness_aware():
    model = SharpnessAware()
    model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(True))
    return model, batches(X, LABELS)


class Prototypes(keras.Model):
    """Shares the samples of a batch out evenly among prototypes (SwAV)."""

    def __init__(self):
        super().__init__()
        self.body = mlp(6, 8, 4)
        self.prototypes = layers.Dense(3, use_bias=False)
        self.prototypes.build((None, 4))

    def scores(self, x):
        return self.prototypes(tf.nn.l2_normalize(self.body(x), -1))

    def shares(self, scores):
        shares = tf.transpose(tf.exp(scores / 0.3))
        for _ in range(3):
            shares /= tf.reduce_sum(shares, 1, keepdims=True)
            shares /= tf.reduce_sum(shares, 0, keepdims=True)
        return tf.stop_gradient(tf.transpose(shares))

    def train_step(self, data):
        one, other = data
        kernel = self.prototypes.kernel
        kernel.assign(tf.nn.l2_normalize(kernel, 0))
        with tf.GradientTape() as tape:
            first, second = self.scores(one), self.scores(other)
            losses = tf.nn.softmax_cross_entropy_with_logits(
                self.shares(first), second / 0.1
            ) + tf.nn.softmax_cross_entropy_with_logits(
                self.shares(second), first / 0.1
            )
            loss = tf.reduce_mean(losses)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def prototypes():
    model = Prototypes()
    model.compile(sgd())
    return model, batches(X, X + 0.1 * X[::-1])


class HeadOfLoss(keras.Model):
    """Has a head that only `compute_loss` calls."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(6, 8, 4), layers.Dense(3)

    def call(self, x):
        return self.body(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        logits = self.head(y_pred)
        return ops.mean(ops.sparse_categorical_crossentropy(y, logits, True))


def head_of_loss():
    model = HeadOfLoss()
    model.compile(keras.optimizers.Adam(0.02))
    return model, batches(X, LABELS)


class AdaptiveAugmentation(keras.Model):
    """Shows a probability that it keeps, and moves by what it is right in."""

    def __init__(self):
        super().__init__()
        self.net = mlp(6, 8, 1)
        self.probability = self.add_weight(name="p", trainable=False)
        self.p_metric = keras.metrics.Mean(name="p")
        self.sum_metric = keras.metrics.Sum(name="sum")
        self.last = self.add_weight(name="last", trainable=False)

    @property
    def metrics(self):
        return [self.p_metric, self.sum_metric]

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        p = self.probability
        moved = p + 0.1 * ops.mean(ops.sign(self(x) - y)) + 0.02
        p.assign(ops.clip(moved, 0.0, 1.0))
        self.p_metric.update_state(p)
        self.sum_metric.update_state(p, sample_weight=p)
        tf.cond(tf.reduce_mean(x) < 0.1, self.keep, lambda: 0)
        return {"loss": loss, **self.get_metrics_result()}

    def keep(self):
        self.last.assign(self.probability)
        return 0


def adaptive_augmentation():
    model = AdaptiveAugmentation()
    model.compile(sgd())
    return model, batches(X, X[:, :1])


PROGRAMS = {
    "a metric of a weight": adaptive_augmentation,
    "a head that compute_loss calls": head_of_loss,
    "two towers of strings": two_towers,
    "detector with hard negatives": detector,
    "clipped policy gradient": clipped_policy,
    "private gradients": private_steps,
    "fast weights of tasks": fast_weights,
    "mixed samples": mix_up,
    "sharpness-aware steps": sharpness_aware,
    "prototypes shared evenly": prototypes,
    "flow with scales of the first batch": flow,
    "text and image with a clipped temperature": text_and_image,
    "masked words": masked_words,
    "GAN": gan,
    "two views": lambda: two_views(False),
    "two views apart": lambda: two_views(True),
    "VAE": vae,
    "distillation": distiller,
    "semi-supervised": semi_supervised,
    "DDIM with an EMA network": ddim,
    "siamese network": siamese,
    "image captioning": captioning,
    "CTC endpoint": captcha,
}

HAVE_TEST_STEPS = (
    "distillation",
    "DDIM with an EMA network",
    "siamese network",
    "CTC endpoint",
)


NOT_COMPILED = ("detector with hard negatives", "masked words")
"""The programs of which XLA cannot compile what several replicas do: both take
a number of rows that only their values tell."""


class Failing(MaskedWords):
    """Fails after it has made weights."""

    def train_step(self, data):
        super().train_step(data)
        raise RuntimeError("not yet")


class CalledGAN(GAN):
    """Can be called, and so be built before its first step."""

    def call(self, x):
        return self.discriminator(x)


@pytest.mark.long
@several
def test_an_optimizer_that_no_step_uses_has_no_variables():
    model = CalledGAN()
    model.compile(sgd(), sgd(), keras.losses.BinaryCrossentropy(True))
    kc.replicate(model, MANY)
    model.fit(gan()[1], verbose=0)
    assert not model.optimizer.built
    assert model.d_optimizer.built


@several
def test_a_step_that_fails_where_it_makes_weights_says_why():
    model = kc.replicate(Failing(), MANY)
    model.compile(sgd())
    with pytest.raises(RuntimeError, match="not yet"):
        model.fit(masked_words()[1], verbose=0)


def runs():
    """Returns programs and numbers of replicas. Each runs on one in CI."""
    for position, name in enumerate(PROGRAMS):
        for count in [c for c in COUNTS if c in (2, 3)]:
            is_long = not ON_GPU and (position + count) % 2
            marks = pytest.mark.long if is_long else ()
            yield pytest.param(name, count, marks=marks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "count"), [*runs()])
def test_a_program_trains_what_one_device_does(name, count):
    one, data = PROGRAMS[name]()
    one_logs = one.fit(data, epochs=2, verbose=0)
    many, data = PROGRAMS[name]()
    kc.replicate(many, count)
    warns = ON_GPU and name in NOT_COMPILED
    told = "XLA cannot compile" if warns else None
    with pytest.warns(kc.ConfluxWarning, match=told) if warns else nothing():
        many_logs = many.fit(data, epochs=2, verbose=0)
    assert_same_training(one, many, one_logs, many_logs)
    kc.assert_in_sync(many)
    if name in HAVE_TEST_STEPS:
        np.testing.assert_allclose(
            many.evaluate(data, verbose=0),
            one.evaluate(data, verbose=0),
            rtol=1e-5,
        )
