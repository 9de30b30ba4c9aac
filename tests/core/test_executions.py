"""The engine under `fit`: many steps a call, XLA, batches drawn ahead."""

import contextlib
import functools
import queue
import signal
import threading
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from models import assert_same_training
from models import dense
from models import regression
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.python.eager.context import Context

import keras_conflux as kc
from keras_conflux._cluster import failures
from keras_conflux._common import waiting
from keras_conflux._communication.communicator import Communicator
from keras_conflux._communication.tree_collectives import ReplicaCollectives
from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.execution import step_executor
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux._fit.input import epoch_iterator
from keras_conflux._fit.input.batch_sharder import BatchSharder
from keras_conflux._fit.input.calls import Epoch
from keras_conflux._fit.input.calls import KerasCall
from keras_conflux._fit.input.calls import needs_every_batch
from keras_conflux._fit.input.device_batches import StackedBatch
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.step_groups import EndOfData
from keras_conflux._fit.input.step_groups import StepGroups
from keras_conflux._fit.input.steps_per_execution import INPUT_MEMORY_FRACTION
from keras_conflux._fit.input.steps_per_execution import NO_DEADLINE
from keras_conflux._fit.input.steps_per_execution import StepsPerExecution
from keras_conflux._replication.watchdog import StepWatchdog

BATCHES = 42
X, Y = regression(8 * (BATCHES - 1) + 5)  # the last batch is smaller
FIT = dict(batch_size=8, shuffle=False, verbose=0)
COMPILED = [1, MANY] if ON_GPU else [1]


def compiled(count=1):
    return kc.replicate(dense("adam", jit_compile=True), count)


@pytest.fixture
def calls(monkeypatch):
    """How many steps each call of an XLA program has run."""
    seen = []
    original = XlaProgram.__call__

    def call(self, stack, limit):
        seen.append(stack.steps)
        return original(self, stack, limit)

    monkeypatch.setattr(XlaProgram, "__call__", call)
    return seen


@pytest.mark.parametrize("count", COMPILED)
def test_many_steps_a_call_change_nothing(count, calls, monkeypatch):
    # How fast calls grow is otherwise up to how fast this machine is.
    monkeypatch.setattr(StepsPerExecution, "budget", lambda *_: NO_DEADLINE)
    one, many = dense("adam"), compiled(count)
    options = dict(epochs=3, validation_data=(X, Y), **FIT)
    expected, got = one.fit(X, Y, **options), many.fit(X, Y, **options)
    assert_same_training(one, many, expected, got)
    assert int(many.optimizer.iterations) == 3 * BATCHES
    assert max(calls) > 8
    np.testing.assert_allclose(
        many.predict(X, batch_size=16, verbose=0),
        one.predict(X, batch_size=16, verbose=0),
        atol=1e-5,
    )


class EveryBatch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.losses.append(float(logs["loss"]))


def test_a_callback_that_wants_every_batch_gets_it(calls):
    expected, got = EveryBatch(), EveryBatch()
    dense("adam").fit(X, Y, callbacks=[expected], **FIT)
    compiled().fit(X, Y, callbacks=[got], **FIT)
    assert got.batches == list(range(BATCHES))
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
    assert set(calls) == {1}


def test_a_wrapper_in_place_of_fit_gets_what_was_given():
    def wrapper(model, x, **others):
        return x, others

    own = EveryBatch()
    call = KerasCall("fit", wrapper, dense("sgd"), X, Y, callbacks=[own])
    assert call.name == "fit"
    assert call.callbacks == [own]
    assert call.arguments["epochs"] == 1
    x, others = call.run()
    assert x is X
    assert others.keys() == {"y", "callbacks"}


def test_the_progress_bar_ends_at_the_last_batch(capsys):
    compiled().fit(X, Y, **{**FIT, "verbose": 1})
    shown = capsys.readouterr().out
    assert f"{BATCHES}/{BATCHES}" in shown
    numbers = [part.split("/")[0] for part in shown.split("m") if "/42" in part]
    assert all(int(number.strip()) <= BATCHES for number in numbers)


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.ProgbarLogger(), False),
        (keras.callbacks.ModelCheckpoint("x.keras"), False),
        (keras.callbacks.ModelCheckpoint("x.keras", save_freq=2), True),
        (keras.callbacks.TensorBoard(), False),
        (keras.callbacks.TensorBoard(update_freq=2), True),
        (keras.callbacks.TerminateOnNaN(), True),
        (keras.callbacks.LambdaCallback(on_epoch_end=print), False),
        (keras.callbacks.LambdaCallback(on_train_batch_end=print), True),
        (EveryBatch(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_callbacks_want_every_batch(callback, expected):
    assert needs_every_batch(callback) is expected


@pytest.mark.long
def test_training_that_is_stopped_before_an_epoch_ends_after_a_step():
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    for model in (dense(), compiled()):
        model.fit(X, Y, epochs=3, callbacks=[Stop()], **FIT)
        assert int(model.optimizer.iterations) == BATCHES + 1


def test_the_users_steps_per_execution_is_kept(calls):
    one, many = (
        dense("adam", steps_per_execution=5),
        kc.replicate(dense("adam", steps_per_execution=5, jit_compile=True), 1),
    )
    assert_same_training(one, many, one.fit(X, Y, **FIT), many.fit(X, Y, **FIT))
    assert calls == [5] * 8 + [1]


@pytest.mark.long
def test_steps_per_execution_that_does_not_divide_the_epoch():
    one = dense("adam", steps_per_execution=4)
    many = kc.replicate(dense("adam", steps_per_execution=4), MANY)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    options = dict(steps_per_epoch=10, epochs=2, verbose=0)
    expected = one.fit(dataset, **options)
    assert_same_training(one, many, expected, many.fit(dataset, **options))
    assert int(many.optimizer.iterations) == int(one.optimizer.iterations) == 24


@pytest.mark.long
def test_a_smaller_last_batch_is_compiled_after_a_number_of_steps(monkeypatch):
    """And not after a time, which another process does not measure."""
    sizes = []
    original = XlaProgram.__call__

    def call(self, stack, limit):
        sizes.append(stack.sizes[0])
        return original(self, stack, limit)

    monkeypatch.setattr(XlaProgram, "__call__", call)
    monkeypatch.setattr(step_executor, "STEPS_AS_GRAPH", 3)
    model = compiled()
    found = []
    for _ in range(5):
        model.fit(X, Y, **FIT)
        found.append({*sizes})
        sizes.clear()
    assert found == [{8}] * 3 + [{8, 5}] * 2


def test_what_xla_cannot_compile_runs_without(calls):
    class Logged(keras.layers.Layer):
        def call(self, x):
            y = tf.numpy_function(np.tanh, [x], tf.float32)
            return x + tf.stop_gradient(tf.ensure_shape(y, x.shape))

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.layers.Input((8,)), Logged(), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", jit_compile=False)
        return model

    one, many = build(), build()
    many.jit_compile = True
    kc.replicate(many, 1)
    expected = one.fit(X, Y, **FIT)
    message = "XLA cannot compile.*PyFunc"
    with pytest.warns(kc.ConfluxWarning, match=message) as seen:
        got = many.fit(X, Y, **FIT)
    (warning,) = [w for w in seen if "XLA" in str(w.message)]
    assert warning.filename == __file__
    assert_same_training(one, many, expected, got)


def test_what_a_first_step_builds(calls):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.own = keras.optimizers.Adam(1e-2)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.dense(x) - y) ** 2)
                loss = self.own.scale_loss(loss)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.own.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    def build():
        keras.utils.set_random_seed(1)
        model = Own()
        model.compile(jit_compile=False)
        return model

    one, many = build(), build()
    many.jit_compile = True
    kc.replicate(many, COMPILED[-1])
    for model in (one, many):
        model.fit(X, Y, **FIT)
    assert sum(calls) == BATCHES - 2
    for expected, got in zip(one.weights, many.weights, strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=1e-5)


def test_jit_compile_false_means_it(calls):
    kc.replicate(dense("adam", jit_compile=False), 1).fit(X, Y, **FIT)
    assert not calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jit_compile", [True, False])
def test_only_what_xla_does_not_compile_is_optimized(jit_compile, monkeypatch):
    seen = []
    original = Context.call_function

    def call(self, name, *arguments):
        if b"all_replicas" in name or b"packed" in name:
            given = self.function_call_options.config_proto_serialized
            rewrites = ConfigProto.FromString(given).graph_options
            seen.append(not rewrites.rewrite_options.disable_meta_optimizer)
        return original(self, name, *arguments)

    monkeypatch.setattr(Context, "call_function", call)
    model = kc.replicate(dense("adam", jit_compile=jit_compile), 1)
    model.fit(X[:32], Y[:32], **FIT)
    assert set(seen) == {not jit_compile}


def on_first_device(gradients):
    """Multiplies gradients on one device, whichever replica has them."""
    factor = 1 / (1 + tf.linalg.global_norm(gradients))
    with tf.device("CPU:0"):
        return [each * factor for each in gradients]


class OnFirstDevice(keras.Model):
    """Trains with the gradients of `on_first_device`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
        weights = self.trainable_variables
        gradients = on_first_device(tape.gradient(loss, weights))
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@several
def test_copies_are_equal_wherever_a_step_multiplies():
    """Grappler would multiply in another order where all is on one device."""
    model = OnFirstDevice()
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.3), jit_compile=False)
    kc.replicate(model, MANY).fit(X[:48], Y[:48], 8, verbose=0)
    kc.assert_in_sync(model)


@several
def test_copies_are_equal_wherever_a_loop_multiplies():
    model, optimizer = OnFirstDevice(), keras.optimizers.SGD(0.3)
    model(X[:1])
    optimizer.build(model.trainable_variables)
    kc.replicate(model, MANY)
    kc.replicate(optimizer, MANY)

    @kc.withdevices
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        gradients = kc.allreduce("mean", gradients, weight=len(x))
        optimizer.apply(on_first_device(gradients), weights)

    for begin in range(0, 48, 8):
        x, y = X[begin : begin + 8], Y[begin : begin + 8]
        step(*kc.split((x, y), devices=MANY))
    kc.assert_in_sync(model)


def test_an_endless_generator():
    def generate():
        for begin in range(0, 10**9, 8):
            yield X[begin % 320 :][:8], Y[begin % 320 :][:8]

    one, many = dense("adam"), compiled()
    options = dict(steps_per_epoch=17, epochs=3, verbose=0)
    expected = one.fit(generate(), **options)
    assert_same_training(one, many, expected, many.fit(generate(), **options))
    assert int(many.optimizer.iterations) == 3 * 17


@several
def test_gradients_have_the_shapes_of_their_variables(monkeypatch):
    shapes = []
    original = ReplicaCollectives._reduce_leaves

    def reduce(self, op, tree, leaves, weight):
        shapes.extend(leaf.shape for leaf in leaves)
        return original(self, op, tree, leaves, weight)

    monkeypatch.setattr(ReplicaCollectives, "_reduce_leaves", reduce)
    model = keras.Sequential([keras.Input((3, 4)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    kc.replicate(model, MANY)
    # TensorFlow does not know that of a Dense layer of such inputs.
    x = np.ones((8, 3, 4), "float32")
    model.fit(x, x[..., :2], batch_size=8, verbose=0)
    assert (4, 2) in shapes
    assert all(shape.is_fully_defined() for shape in shapes)


def test_no_data_at_all(count):
    expected = dense().fit(X[:0], Y[:0], verbose=0).history
    assert kc.replicate(dense(), count).fit(X[:0], Y[:0]).history == expected


def test_less_data_than_was_asked_for(count):
    options = dict(steps_per_epoch=9, epochs=2, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices((X[:45], Y[:45])).batch(8)
    one, many = dense(), kc.replicate(dense(), count)
    expected = one.fit(dataset, **options)
    assert_same_training(one, many, expected, many.fit(dataset, **options))


def test_an_error_in_the_data_comes_after_the_good_batches():
    def generate():
        for _ in range(5):
            yield X[:8], Y[:8]
        raise OSError("the disk is gone")

    model = compiled()
    with pytest.raises(Exception, match="the disk is gone"):
        model.fit(generate(), steps_per_epoch=9, verbose=0)
    assert int(model.optimizer.iterations) == 5
    model.fit(X, Y, **FIT)
    assert int(model.optimizer.iterations) == 5 + BATCHES


def test_a_reason_is_what_the_compiler_says():
    """TensorFlow wraps it, most of all where there are several replicas."""
    text = """Graph execution error:
Detected at node while defined at (most recent call last):
<stack traces unavailable>
3 root error(s) found.
  (0) INVALID_ARGUMENT:  Input 1 to {{node Sum}} must be a constant.
\t [[{{node Sum}}]]
\ttf2xla conversion failed while converting while_body_12[]. Run with
  (1) INVALID_ARGUMENT:  Input 1 to {{node Sum}} must be a constant."""
    error = tf.errors.InvalidArgumentError(None, None, text)
    assert error_texts.reason_of(error) == "Input 1 to  must be a constant."


@pytest.mark.parametrize(
    ("kind", "text", "is_so"),
    [
        (tf.errors.InvalidArgumentError, "compile-time constant", True),
        (tf.errors.InvalidArgumentError, "shapes differ", False),
        (
            tf.errors.InternalError,
            "RET_CHECK failure (external/xla/xla/service/hlo_verifier.cc:1459)",
            True,
        ),
        (tf.errors.InternalError, "NCCL: unhandled CUDA error in XLA", False),
    ],
)
def test_errors_of_xlas_compiler(kind, text, is_so):
    assert error_texts.is_of_compiler(kind(None, None, text)) == is_so


def test_an_interrupt_leaves_the_model_usable():
    def interrupt(epoch, logs=None):
        raise KeyboardInterrupt

    model = compiled()
    stop = keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, callbacks=[stop], **FIT)
    model.fit(X, Y, **FIT)
    assert int(model.optimizer.iterations) == 2 * BATCHES


@pytest.mark.long
def test_a_nan_leaves_the_process_usable():
    model = compiled()
    history = model.fit(X * np.nan, Y, **FIT)
    assert np.isnan(history.history["loss"][0])
    one, many = dense("adam"), compiled()
    assert_same_training(one, many, one.fit(X, Y, **FIT), many.fit(X, Y, **FIT))


@pytest.mark.long
@several
@pytest.mark.filterwarnings("ignore:.*which the step returns")
def test_a_step_that_does_not_end_says_who_waits(monkeypatch):
    go_on = threading.Event()
    waited = threading.Event()
    steps = []

    class Stuck(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            if kc.replica().index == 1:
                wait = tf.numpy_function(self.wait, [], tf.float32)
                logs["waited"] = tf.ensure_shape(wait, ())
            else:
                logs["waited"] = tf.constant(0.0)
            return logs

        def wait(self):
            steps.append(1)
            if len(steps) == 3:
                go_on.wait(60)
                waited.set()
            return np.float32(1)

    model = Stuck([keras.layers.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, 2)
    monkeypatch.setenv("CONFLUX_STEP_TIMEOUT", "5")
    try:
        with pytest.raises(kc.StepTimeoutError, match="replica 1 ") as error:
            model.fit(X[:24], Y[:24], **FIT)
        assert "replica 0" not in str(error.value)
    finally:
        go_on.set()
    assert waited.wait(30)
    time.sleep(1)
    monkeypatch.delenv("CONFLUX_STEP_TIMEOUT")
    model.fit(X[:8], Y[:8], **FIT)


@pytest.mark.usefixtures("interruptible")
@several
def test_a_second_interrupt_ends_the_wait():
    ended = threading.Event()
    watch = StepWatchdog(kc.devices(2), "some step")
    message = r"interrupted twice.*replica 0 .*, 1 "
    with pytest.raises(KeyboardInterrupt, match=message):
        watch.call(interrupting(ended, times=2))
    ended.set()
    assert watch.call(lambda: 1) == 1


@pytest.mark.usefixtures("interruptible")
@several
def test_an_interrupted_call_comes_to_its_end():
    ended = threading.Event()
    watch = StepWatchdog(kc.devices(2), "some step")
    done = []
    with pytest.raises(KeyboardInterrupt):
        watch.call(interrupting(ended, times=1, then=lambda: done.append(1)))
    assert done == [1]


@pytest.mark.usefixtures("interruptible")
@several
def test_a_process_that_dies_after_an_interrupt_ends_the_wait(monkeypatch):
    ended, interrupted = threading.Event(), threading.Event()
    died = tf.errors.UnavailableError(None, None, "process 1 has died")

    def failure_of_any(count):
        return died if interrupted.is_set() else None

    def program():
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        interrupted.set()
        ended.wait(10)

    monkeypatch.setattr(failures, "process_count", lambda: 2)
    monkeypatch.setattr(failures, "_PERIOD", 0.1)
    monkeypatch.setattr(
        failures.tensorflow_processes, "failure_of_any", failure_of_any
    )
    watch = StepWatchdog(kc.devices(2), "some step")
    with pytest.raises((type(died), KeyboardInterrupt)) as raised:
        watch.call(program)
    ended.set()
    assert raised.value is died


def interrupting(ended, times, then=lambda: None):
    """Returns a program that interrupts whoever waits for it, as Ctrl-C."""

    def program():
        for _ in range(times):
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.wait(10 if times > 1 else 0.2)
        then()

    return program


@pytest.mark.parametrize("limit", ["inf", "1e300"])
@several
def test_a_time_limit_of_any_size(limit, monkeypatch):
    monkeypatch.setenv("CONFLUX_STEP_TIMEOUT", limit)
    assert StepWatchdog(kc.devices(2), "some step").call(lambda: 1) == 1


def test_long_batches_make_short_calls(monkeypatch):
    """What a call may hold is counted, not guessed from the first batch."""
    rows = [np.ones((8, 4 * length), "float32") for length in (1, 1, 9, 9, 9)]
    room = 20 * rows[0].nbytes
    monkeypatch.setattr(
        tensorflow_internals,
        "memory_of",
        lambda _: room / INPUT_MEMORY_FRACTION,
    )
    strategy = kc.replicate(devices=1)
    plan = ExecutionPlan(strategy, compiled=True, chooses_steps=True)
    groups = StepGroups(plan, 1)
    groups._steps.next = 8
    source = iter(rows)
    counts = [groups._draw(source, 8, NO_DEADLINE).count for _ in range(2)]
    assert counts == [4, 1]  # 1 + 1 + 9 + 9 of 20; one more has no room


def test_an_epoch_does_not_wait_for_the_end_of_its_iterator():
    dropped = queue.Queue()

    class Source:
        def __next__(self):
            return X[:8], Y[:8]

        def __del__(self):
            dropped.put(threading.current_thread())

    def steps():
        source = Source()
        for position in range(6):
            yield position, position, source

    strategy = kc.replicate(devices=1)
    plan = ExecutionPlan(strategy, compiled=True, chooses_steps=True)
    list(StepGroups(plan, 1).of_epoch(Epoch(steps()), 6))
    assert dropped.get(timeout=60) is not threading.current_thread()


def test_no_source_is_held_by_training_that_failed():
    dropped = threading.Event()

    def generate():
        try:
            while True:
                yield X[:8], Y[:8]
        finally:
            dropped.set()

    def fail(batch, logs=None):
        raise RuntimeError

    spec = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    model = kc.replicate(dense("sgd"), MANY)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    # The error keeps the frames of `fit`, and what they hold.
    with pytest.raises(RuntimeError) as _error:
        model.fit(data, callbacks=[callback], verbose=0)
    assert dropped.wait(30)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["stops", "raises"])
def test_training_ends_while_its_data_block(how):
    go_on = threading.Event()

    def generate():
        for _ in range(5):
            yield X[:8], Y[:8]
        go_on.wait(300)

    def end(batch, logs=None):
        if batch == 3 and how == "raises":
            raise RuntimeError("of the user")
        model.stop_training = batch == 3

    spec = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    model = kc.replicate(dense("sgd"), MANY)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    ended = threading.Event()

    def train():
        with contextlib.suppress(RuntimeError):
            model.fit(data, callbacks=[callback], verbose=0)
        ended.set()

    thread = threading.Thread(target=train)
    thread.start()
    in_time = ended.wait(200)
    go_on.set()
    thread.join()
    assert in_time


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_wait_for_data():
    go_on = threading.Event()
    interrupted_at = []

    def generate():
        for _ in range(2):  # training is a batch behind
            yield X[:8], Y[:8]
        go_on.wait(60)

    def interrupt():
        interrupted_at.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def trained(batch, logs=None):
        threading.Timer(0.5, interrupt).start()

    model = kc.replicate(dense("sgd"), MANY)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=trained)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(generate(), callbacks=[callback], verbose=0)
        assert time.monotonic() - interrupted_at[0] < 20
    finally:
        go_on.set()
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)


def test_a_source_is_free_when_training_has_stopped():
    def slow():
        for _ in range(20):
            time.sleep(0.05)
            yield X[:8], Y[:8]

    shared = slow()
    spec = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(lambda: shared, output_signature=spec)

    def stop(batch, logs=None):
        model.stop_training = batch == 2

    model = kc.replicate(dense("sgd"), MANY)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(data, callbacks=[callback], verbose=0)
    x, _ = next(shared)
    assert x.shape == (8, 8)


def test_stacks_and_single_batches(count):
    strategy = kc.replicate(devices=count)
    sizes = [2 * count, 2 * count, 2 * count + 1, count]
    drawn = [(np.arange(3 * n).reshape(n, 3), None) for n in sizes]
    pieces = BatchSharder(strategy, stacks=True)(drawn)
    even = [piece.steps for piece in pieces if isinstance(piece, StackedBatch)]
    assert even == ([2, 1, 1] if count == 1 else [2, 1])
    batches = [
        batch
        for piece in pieces
        for batch in (piece if isinstance(piece, StackedBatch) else [piece])
    ]
    for (x, _), batch in zip(drawn, batches, strict=True):
        assert sum(batch.sizes) == len(x)
        parts = [shard[0] for shard in batch.shards]
        np.testing.assert_array_equal(np.concatenate(parts), x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_withdevices_through_xla(count, jit_compile):
    x, y = kc.split((X[:24], Y[:24]), count)
    one, many = dense("adam"), kc.replicate(dense("adam"), count)

    @kc.withdevices(jit_compile=jit_compile)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((many(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, many.trainable_variables)
        gradients = kc.allreduce("mean", gradients)
        many.optimizer.apply(gradients, many.trainable_variables)
        return loss

    for _ in range(3):
        one.train_on_batch(X[:24], Y[:24])
        losses = step(x, y)
    assert len(losses) == count
    assert_same_training(one, many)
    kc.assert_in_sync(many)


@pytest.mark.filterwarnings("ignore:.*no `allreduce` has touched")
def test_an_optimizer_may_be_built_in_a_program_of_xla(count, monkeypatch):
    # On CPU devices XLA compiles what exchanges nothing.
    monkeypatch.setattr(Communicator, "supports_xla", True)
    model = kc.replicate(dense("adam"), count)
    assert not model.optimizer.built
    traced = []

    @kc.withdevices(devices=count, jit_compile=True)
    def step():
        traced.append(kc.replica().index)
        trained = model.trainable_variables
        model.optimizer.apply([tf.ones_like(v) for v in trained], trained)

    step()
    step()
    # A program that makes variables is traced again, as by `tf.function`.
    assert traced == 2 * list(range(count))
    assert int(model.optimizer.iterations) == 2
    kc.assert_in_sync(model)


def test_a_thread_is_kept_unless_its_execution_hangs(monkeypatch):
    monkeypatch.setattr(waiting, "_idle", [])
    threads = []

    def note() -> None:
        threads.append(threading.current_thread())

    for _ in range(2):
        assert waiting.run_in_daemon(note).wait(10)
    assert threads[0] is threads[1]
    assert threads[0].daemon

    hangs = threading.Event()
    hanging = waiting.run_in_daemon(hangs.wait)
    assert waiting.run_in_daemon(note).wait(10)
    assert threads[2] is not threads[0]
    assert not hanging.is_set()
    hangs.set()
    assert hanging.wait(10)


def test_a_kept_thread_keeps_no_batch():
    batch = tf.random.uniform([8])
    there = weakref.ref(batch)
    assert waiting.run_in_daemon(functools.partial(tf.identity, batch)).wait(10)
    del batch
    until = time.monotonic() + 30
    while there() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert there() is None


@pytest.mark.parametrize("ends", ["at its number", "with its data", "early"])
def test_the_end_of_an_epoch_is_told_once(ends):
    closed, told = [], []

    def end():
        told.append(True)

    def draw():
        try:
            yield 0, 0, "batches"
            yield 1, 3, "batches"
            if ends == "with its data":
                raise EndOfData
        finally:
            closed.append(True)

    strategy = kc.replicate(devices=1)
    plan = ExecutionPlan(strategy, compiled=True, at_epoch_end=end)
    drawing = draw()  # which the plan holds as well
    followed = epoch_iterator._followed(drawing, plan)
    if ends == "early":  # as Keras drops one
        next(followed)
        del followed
    elif ends == "with its data":
        with pytest.raises(EndOfData):
            list(followed)
    else:
        assert len(list(followed)) == 2
    assert closed == [True]
    assert told == ([] if ends == "early" else [True])
