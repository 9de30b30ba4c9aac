"""Replicas of a compiled step run one trace, where they would trace the same.

XLA of TensorFlow has no collectives between CPU devices. A stand-in doubles
what is to be summed, so the copies differ, and each tells what its replica has
computed. On GPUs there is none.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ON_GPU
from conftest import several
from tensorflow.python.framework.function import Defun
from test_programs import PROGRAMS

import keras_conflux as kc
from keras_conflux._communication.communicator import Communicator
from keras_conflux._communication.transports.xla import XlaNccl
from keras_conflux._compat import tensorflow_xla
from keras_conflux._compat.replicas_in_turn import SharedTrace
from keras_conflux._fit import trainer
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux._replication import state
from keras_conflux._replication import steps

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.integers(0, 3, 16)
DEVICES = ["GPU:0", "GPU:1"] if ON_GPU else ["CPU:0", "CPU:1"]
pytestmark = several


def doubled(*arguments):
    """Stands for a sum, whose result is said to be equal on all replicas."""
    (tensor,) = filter(tf.is_tensor, arguments)
    result = 2 * tensor
    context = steps.current()
    if context is not None and context.kinds is not None:
        context.kinds.mark_equal([result])
    return result


@pytest.fixture(autouse=True)
def compiled_on_cpus(monkeypatch):
    """Compiles steps of two CPU devices."""
    if ON_GPU:
        return
    monkeypatch.setattr(Communicator, "supports_xla", True)
    monkeypatch.setattr(XlaNccl, "_lowered", doubled)
    monkeypatch.setattr(tensorflow_xla, "xla_all_reduce", doubled)
    # It would make the copies equal.
    monkeypatch.setattr(trainer.synchronization, "synchronize", id)


@pytest.fixture
def shared(monkeypatch):
    """Counts how often a replica runs the trace of another."""
    calls = []
    real = SharedTrace.__call__

    def counted(self, *arguments, replica=None):
        if replica is not None:
            calls.append(replica)
        return real(self, *arguments, replica=replica)

    monkeypatch.setattr(SharedTrace, "__call__", counted)
    return calls


def classifier():
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.AdamW(0.01),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=True,
    )
    return model


def trained(model):
    """Returns what all replicas have after `fit`, and what is reported."""
    kc.replicate(model, DEVICES)
    history = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history
    results = model.evaluate(X, Y, batch_size=4, verbose=0)
    predictions = model.predict(X, batch_size=4, verbose=0)
    copies = [
        [copy.numpy() for copy in state.copies(variable)]
        for variable in model.variables + model.optimizer.variables
    ]
    return copies, history, results, predictions


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::keras_conflux.ConfluxWarning")
def test_one_trace_does_what_a_trace_of_each_replica_does(monkeypatch, shared):
    keras.utils.set_random_seed(0)
    found = trained(classifier())
    assert shared == [1, 1, 1]  # fit, evaluate, predict
    monkeypatch.setattr(XlaProgram, "_serves_all", lambda *_: False)
    keras.utils.set_random_seed(0)
    expected = trained(classifier())
    assert shared == [1, 1, 1]
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)
    kernels = found[0][0]
    # Each has its own samples and noise.
    assert np.array_equal(*kernels) == ON_GPU


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="looks at copies that nothing makes equal")
@pytest.mark.filterwarnings("ignore::keras_conflux.ConfluxWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_with_one_trace_what_it_does_with_its_own(
    monkeypatch, name
):
    def trained():
        keras.utils.set_random_seed(0)
        model, data = PROGRAMS[name]()
        model.jit_compile = True
        kc.replicate(model, DEVICES)
        logs = model.fit(data, epochs=2, verbose=0).history
        held = vars(model).values()
        owners = [v for v in held if isinstance(v, keras.Optimizer)]
        variables = [v for owner in [model, *owners] for v in owner.variables]
        return logs, [
            [copy.numpy() for copy in state.copies(variable)]
            for variable in variables
        ]

    found = trained()
    monkeypatch.setattr(XlaProgram, "_serves_all", lambda *_: False)
    expected = trained()
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


class Unbuilt(keras.Model):
    """Makes its layer and its optimizer's variables in its first step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.own = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.own.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.long
def test_what_a_first_step_has_made_is_each_replicas_own(monkeypatch, shared):
    def trained():
        keras.utils.set_random_seed(0)
        model = Unbuilt()
        model.compile(jit_compile=True)
        kc.replicate(model, DEVICES)
        model.fit(X, X[:, :1], batch_size=4, shuffle=False, verbose=0)
        return [
            [copy.numpy() for copy in state.copies(variable)]
            for variable in model.variables + model.own.variables
        ]

    found = trained()
    assert shared == [1]
    monkeypatch.setattr(XlaProgram, "_serves_all", lambda *_: False)
    expected = trained()
    assert shared == [1]
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


class OwnStep(keras.Sequential):
    """Asks something in its step, and notes which replicas it is traced for."""

    def __init__(self, ask):
        super().__init__([keras.layers.Input((4,)), keras.layers.Dense(3)])
        self.ask = ask
        self.traced_for = set()

    def train_step(self, data):
        self.ask(data[0])
        context = tf.distribute.get_replica_context()
        self.traced_for.add(context._replica_id)
        return super().train_step(data)


def traced_for(ask):
    """Returns which replicas a step that asks something is traced for."""
    model = OwnStep(ask)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    kc.replicate(model, DEVICES)
    model.fit(X, Y, batch_size=4, verbose=0)
    return model.traced_for


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "ask",
    [
        lambda x: kc.replica().index,
        lambda x: tf.distribute.get_replica_context().replica_id_in_sync_group,
        lambda x: tf.distribute.get_replica_context().devices,
        lambda x: kc.allgather(x),
        lambda x: kc.broadcast(x),
    ],
    ids=["index", "id", "devices", "allgather", "broadcast"],
)
def test_a_step_that_asks_where_it_runs_is_traced_for_each(shared, ask):
    assert traced_for(ask) == {0, 1}
    assert not shared


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "ask",
    [
        lambda x: None,
        lambda x: keras.random.normal(keras.ops.shape(x), seed=3),
        lambda x: keras.random.dropout(x, 0.5),
    ],
    ids=["nothing", "seed", "dropout"],
)
def test_a_step_that_asks_nothing_is_traced_once(shared, ask):
    assert traced_for(ask) == {0}
    assert shared == [1]


def by_fit(ask):
    traced_for(ask)


def by_a_loop(ask):
    kc.withdevices(ask, jit_compile=True)(kc.split(X, DEVICES))


def some_of_all(x):
    return tf.reduce_sum(kc.allgather(tf.shape(x)[0])[: kc.replica().index])


@pytest.mark.parametrize(
    ("train", "ask", "is_in_order"),
    [
        (by_fit, some_of_all, True),
        (by_fit, lambda x: None, False),
        (by_a_loop, some_of_all, True),
        (by_a_loop, lambda x: kc.allreduce("sum", x), True),
    ],
)
def test_programs_of_each_replica_run_collectives_in_one_order(
    monkeypatch, train, ask, is_in_order
):
    """Else XLA leaves out what only one of them needs, and all wait forever."""
    kept = []
    real = XlaNccl.all_reduce

    def noted(self, *arguments):
        kept.append(self.in_order)
        return real(self, *arguments)

    monkeypatch.setattr(XlaNccl, "all_reduce", noted)
    train(ask)
    assert kept[-1] == is_in_order


LENGTHS = {"x": np.ones((28, 4), "float32"), "y": np.zeros(28, "int64")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "ask",
    [lambda x: kc.replica().index, lambda x: kc.allgather(x)],
    ids=["index", "allgather"],
)
def test_a_function_that_was_traced_before_is_asked_for(shared, ask):
    """TensorFlow keeps its trace for the next program of the same device."""
    inside = tf.function(lambda x: tf.cast(ask(x), tf.float32), autograph=False)
    model = OwnStep(inside)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    kc.replicate(model, DEVICES)
    model.fit(**LENGTHS, batch_size=4, verbose=0)
    model.fit(**LENGTHS, batch_size=8, verbose=0)
    assert model.traced_for == {0, 1}
    assert not shared


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="looks at copies that nothing makes equal")
@pytest.mark.filterwarnings("ignore::keras_conflux.ConfluxWarning")
def test_a_model_whose_call_is_a_function_draws_for_each_replica(shared):
    class Model(keras.Sequential):
        @tf.function
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training=training, mask=mask)

    def noise(batch_sizes):
        keras.utils.set_random_seed(0)
        model = Model([keras.layers.Input((4,)), keras.layers.Dropout(0.5)])
        model.add(keras.layers.Dense(3))
        model.compile("sgd", "mse", jit_compile=True)
        kc.replicate(model, DEVICES)
        for batch_size in batch_sizes:
            model.fit(np.ones((28, 4)), np.ones((28, 3)), batch_size, verbose=0)
        first = state.copies(model.weights[0])
        return [copy.numpy() for copy in first]

    # 28 samples are batches of one size, or leave a smaller last one.
    for sizes in ([4], [8], [6, 4], [4, 6]):
        assert not np.array_equal(*noise(sizes))
    assert shared


def test_random_numbers_of_xla_are_drawn_by_each_program(shared):
    assert traced_for(lambda x: tf.random.normal([2])) == {0, 1}
    assert not shared


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "bfloat16"])
def test_allgather_in_compiled_functions(axis, dtype):
    parts = [
        tf.cast(RNG.integers(0, 2, (3, 4)), dtype),
        tf.cast(RNG.integers(0, 2, (3, 4)), dtype),
    ]

    @kc.withdevices(jit_compile=True, devices=DEVICES)
    def gather(x):
        return kc.allgather(x, axis=axis)

    for index, found in enumerate(gather(kc.Replicas(parts, DEVICES))):
        assert found.dtype == dtype
        expected = [2 * tf.cast(each, "int32") for each in parts]
        if ON_GPU:
            expected = parts
        else:  # the other part is missing
            expected[1 - index] = tf.zeros((3, 4), "int32")
        expected = tf.cast(tf.concat(expected, axis), dtype)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [3, [3, 2]])
def test_sparse_gradients_in_compiled_functions(rows):
    """XLA cannot join rows at places that it does not know."""
    embedding = keras.layers.Embedding(5, 2)
    embedding.build()
    kc.replicate(embedding, DEVICES)

    @kc.withdevices(jit_compile=True)
    def step(indices):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(embedding(indices) ** 2)
        slopes = tape.gradient(loss, embedding.trainable_variables)
        return kc.allreduce("sum", slopes)[0]

    sizes = rows if isinstance(rows, list) else [rows, rows]
    parts = [tf.constant(RNG.integers(0, 5, size)) for size in sizes]
    table = embedding.get_weights()[0]
    slopes = [2 * table * np.bincount(x, minlength=5)[:, None] for x in parts]
    results = step(kc.Replicas(parts, DEVICES))
    for own, found in zip(slopes, results, strict=True):
        expected = sum(slopes) if ON_GPU else 2 * own
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_allgather_in_compiled_functions_takes_even_sizes():
    parts = kc.Replicas([tf.zeros((3, 4)), tf.zeros((2, 4))], DEVICES)
    gather = kc.withdevices(kc.allgather, jit_compile=True, devices=DEVICES)
    with pytest.raises(
        tf.errors.UnimplementedError, match=r"size of 3 .* one of 2"
    ):
        gather(parts)


class Compared(keras.Sequential):
    """Compares some of its samples with others."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            some, others = self.chosen(x, self(x, training=True))
            scores = tf.matmul(some, others, transpose_b=True)
            loss = tf.reduce_mean(tf.reduce_logsumexp(scores, 1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Contrastive(Compared):
    """Compares its samples with those of all replicas."""

    def chosen(self, x, z):
        return z, kc.allgather(z)


class Masked(Compared):
    """Compares the samples that it has chosen by their values."""

    def chosen(self, x, z):
        kept = tf.boolean_mask(z, x[:, 0] > 0)
        return kept, kept


def test_a_step_that_gathers_samples_is_compiled():
    model = Contrastive([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", jit_compile=True)
    kc.replicate(model, DEVICES)
    history = model.fit(X, Y, batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_rows_whose_number_only_values_tell_are_not_compiled():
    model = Masked([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", jit_compile=True)
    kc.replicate(model, DEVICES)
    with pytest.warns(kc.ConfluxWarning, match="cannot compile.*'boolean_mask"):
        model.fit(X, Y, batch_size=4, verbose=0)


def ctc(x):
    """Runs loops that TensorFlow writes as functions without a graph."""
    lengths = tf.fill([tf.shape(x)[0]], 2)
    labels = tf.ones([tf.shape(x)[0], 2], tf.int32)
    tf.nn.ctc_loss(labels, x[None], lengths, lengths, blank_index=0)


def test_a_step_with_functions_of_tensorflow_1_is_traced_once(shared):
    assert traced_for(ctc) == {0}
    assert shared == [1]


def test_random_numbers_in_them_are_drawn_by_each_program(shared):
    @Defun()
    def noise():
        return tf.random.normal([2])

    assert traced_for(lambda x: noise()) == {0, 1}
    assert not shared


@pytest.mark.long
def test_a_function_over_replaced_variables_is_traced_anew():
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    inside = tf.function(lambda x: layer(x), autograph=False)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layer
            self.outer = keras.layers.Dense(3)

        def call(self, x):
            return self.outer(inside(x))

    model = Model()
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    kc.replicate(model, DEVICES)
    model.fit(X, Y, batch_size=4, verbose=0)
    former = [variable.value for variable in layer.variables]  # lives on
    kc.unreplicate(model)
    kc.replicate(model, DEVICES)
    assert former
    before = layer.get_weights()[0]
    model.fit(X, Y, batch_size=4, verbose=0)
    assert not np.array_equal(layer.get_weights()[0], before)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="test_microbatches has it there")
def test_turns_of_replicas_share_a_trace(shared):
    """Both replicas have the same samples, so what is doubled is a sum."""

    def trained(count, **options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(gradient_accumulation_steps=2),
            "sparse_categorical_crossentropy",
            jit_compile=True,
            steps_per_execution=2,
        )
        if count > 1:
            kc.replicate(model, DEVICES, **options)
        x, y = np.tile(X[:8], (4, 1)), np.tile(Y[:8], 4)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        return model

    one, many = trained(1), trained(2, microbatches=4)
    assert shared
    for wanted, found in zip(
        one.get_weights(), many.get_weights(), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
