"""`kc.memory` tells what a model takes on each device, before it takes it."""

import functools
import gc
import re
import types

import keras
import numpy as np
import pytest
import sharded_cases as cases
import step_memory
import tensorflow as tf
from conftest import COUNTS
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import RUN_LONG_TESTS
from conftest import several
from keras import layers
from keras import optimizers
from sharded_cases import bytes_on_devices

import keras_conflux as kc

SEVERAL = [count for count in COUNTS if count > 1]
SHARDS = (None, "optimizer", "weights")
OPTIMIZERS = cases.OPTIMIZERS | {
    "a schedule without state": lambda: optimizers.SGD(cases.schedule()),
    "another dtype": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(gradient_accumulation_steps=2, use_ema=True)
    ),
}

IN_CI = ("Adafactor", "Adam, accumulation", "loss scaling", "Muon")


def compiled(optimizer, policy="float32"):
    keras.config.set_dtype_policy(policy)
    try:
        model = cases.model()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(optimizer, "mse")
    return model


def assert_exact(found, model):
    """Compares what was told with what each device holds."""
    weights = bytes_on_devices(model.variables)
    held = bytes_on_devices(model.optimizer.variables)
    assert weights == [found.weights] * found.devices
    # A few numbers are on the first device alone until a step needs them.
    assert max(held) == found.optimizer
    assert found.variables == found.weights + found.optimizer


@pytest.mark.sampled(1)
@several
@pytest.mark.parametrize("name", OPTIMIZERS if RUN_LONG_TESTS else IN_CI)
def test_variables_are_known_before_there_are_any(name):
    """For each choice of `shard`, on one of the numbers of devices."""
    for index, shard in enumerate(SHARDS):
        count = SEVERAL[(index + [*OPTIMIZERS].index(name)) % len(SEVERAL)]
        model = compiled(OPTIMIZERS[name]())
        before = kc.memory(model, devices=count)
        assert before.shard is None
        assert not model.optimizer.built
        kc.replicate(model, count, shard=shard)
        model.optimizer.build(model.trainable_variables)
        after = kc.memory(model)
        assert (after.devices, after.shard) == (count, shard)
        assert after == before.with_shard(shard)
        assert_exact(after, model)


@several
@pytest.mark.long
def test_of_a_trained_model():
    """In mixed precision, with what a first step makes."""
    model = compiled(optimizers.AdamW(), "mixed_float16")
    before = kc.memory(model, devices=MANY).with_shard("weights")
    kc.replicate(model, MANY, shard="weights")
    model.fit(cases.X, cases.Y, batch_size=22, verbose=0)
    assert_exact(kc.memory(model), model)
    assert kc.memory(model) == before
    kc.unreplicate(model)
    assert kc.memory(model).shard is None
    assert kc.memory(model, devices=MANY).with_shard("weights") == before


def test_what_it_says():
    model = compiled("adam")
    found = kc.memory(model, devices=2)
    numbers = 4 * model.count_params()
    assert found.weights == numbers
    # Two slots for each weight, the count of updates and the learning rate.
    assert found.optimizer == 2 * numbers + 12
    assert found.step is None
    assert str(found).splitlines() == [
        "kB on each of 2 devices  weights  optimizer  step",
        "shard=None                  58.8        118     ?",
        'shard="optimizer"           58.8       61.1     ?',
        'shard="weights"             30.5       61.1     ?',
    ]
    assert "devices=2" in repr(found)
    assert str(kc.memory(model, devices=1)).startswith("kB on one device")
    with pytest.raises(ValueError, match=r"Received: 'state'$"):
        found.with_shard("state")


def test_what_nobody_can_tell():
    plain = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    assert kc.memory(plain).optimizer is None

    class Closed(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError

    model = compiled(Closed(momentum=0.9))
    found = kc.memory(model)
    assert found.optimizer is None
    assert found.variables == found.weights
    assert "?" in str(found)
    model.optimizer.build(model.trainable_variables)
    assert kc.memory(model, devices=1).optimizer > found.weights
    model.other = optimizers.Adam()  # what it trains is not known yet
    assert kc.memory(model).optimizer is None


@pytest.mark.parametrize("made", [[], [layers.Dense(2)]])
def test_a_model_that_is_not_built(made):
    model = keras.Sequential(made)
    with pytest.raises(ValueError, match=r"Call `model.build\(shape\)`"):
        kc.memory(model)


class Block(layers.Layer):
    """Makes much of little."""

    def __init__(self):
        super().__init__()
        self.inside = layers.Dense(256)
        self.normalization = layers.BatchNormalization()
        self.dropout = layers.Dropout(0.1)
        self.outside = layers.Dense(32)

    def build(self, shape):
        self.inside.build(shape)
        self.normalization.build((None, 256))
        self.outside.build((None, 256))

    def call(self, x, training=False):
        y = self.normalization(self.inside(x), training=training)
        y = self.dropout(keras.ops.gelu(y), training=training)
        return x + self.outside(y)


def blocks():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((32,)), *[Block() for _ in range(4)], layers.Dense(4)]
    )
    model.compile("adam", "mse")
    return model


SAMPLES = 1 << 15
"""So many that they need more than the kernels of a GPU, whose workspaces have
some MB. Nothing runs, so more take no longer."""


@pytest.fixture(scope="module")
def steps():
    """What a step needs without recomputation and with it."""
    batch = tf.TensorSpec([2 * SAMPLES, 32]), tf.TensorSpec([2 * SAMPLES, 4])
    plain = blocks()
    with keras.RematScope("full"):
        again = blocks()
    return [kc.memory(each, batch, devices=2).step for each in (plain, again)]


@pytest.mark.long
def test_a_step_is_that_which_one_device_compiles(steps):
    """The whole step of Keras needs what was told, and its update is small."""
    model = blocks()
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda *data: model.train_step(data), jit_compile=True)
    given = tf.ones([SAMPLES, 32]), tf.ones([SAMPLES, 4])
    proto = step.experimental_get_compiler_ir(*given)(
        "optimized_hlo_proto_serialized"
    )
    hlo = pytest.importorskip("tensorflow.compiler.xla.service.hlo_pb2")
    assignment = hlo.HloProto.FromString(proto).buffer_assignment
    whole = sum(
        each.size
        for each in assignment.buffer_allocations
        if not each.is_entry_computation_parameter
    )
    assert steps[0] == pytest.approx(whole, rel=0.1)


@pytest.mark.long
def test_a_step_that_recomputes(steps):
    plain, again = steps
    assert again < 0.6 * plain


@several
@pytest.mark.skipif(not ON_GPU, reason="CPU devices do not count memory")
def test_gpus_need_in_a_step_what_was_told():
    width = 2048
    told = step_memory.told(width)
    x = np.ones([2 * step_memory.samples(width), width], "float32")

    peaks = [
        peak_of_step(functools.partial(on_two, width, *way), x)
        for way in step_memory.WAYS
    ]
    step_memory.assert_as_told(peaks, told)


def on_two(width, shard, mode):
    model = step_memory.blocks(width, mode)
    model.steps_per_execution = 2  # room for 2 batches, in place of 16
    return kc.replicate(model, devices=2, shard=shard)


def peak_of_step(make, x):
    """Returns the most that a model takes of a GPU in a step, and before it."""
    gc.collect()
    before = tf.config.experimental.get_memory_info(DEVICES[0])["current"]
    model = make()
    for _ in range(2):  # XLA tunes the first step, which takes memory as well
        tf.config.experimental.reset_memory_stats(DEVICES[0])
        model.fit(x, x, batch_size=len(x), verbose=0)
    peak = tf.config.experimental.get_memory_info(DEVICES[0])["peak"]
    return peak - before


def test_the_peak_of_a_step_is_not_that_of_its_tuning(monkeypatch):
    memory = {"current": 5, "peak": 100}
    takes = iter([900, 30])

    def fits(*data, **options):
        peak = memory["current"] + next(takes)
        memory["peak"] = max(memory["peak"], peak)

    def make():
        memory["current"] += 20
        return types.SimpleNamespace(fit=fits)

    def reset(device):
        memory["peak"] = memory["current"]

    experimental = tf.config.experimental
    monkeypatch.setattr(experimental, "get_memory_info", lambda _: {**memory})
    monkeypatch.setattr(experimental, "reset_memory_stats", reset)
    assert peak_of_step(make, [1]) == 50


@pytest.mark.long
@several
def test_a_step_changes_nothing():
    """Not of a model in parts, with several outputs and metrics."""
    keras.utils.set_random_seed(0)
    given = layers.Input((32,))
    hidden = layers.Dropout(0.5)(layers.Dense(200)(given))
    model = keras.Model(
        given, {n: layers.Dense(2, name=n)(hidden) for n in "ab"}
    )
    kc.replicate(model, MANY, shard="weights")
    model.compile("adam", "mse", metrics={"a": "mae"})
    data = np.ones([30, 32]), {n: np.ones([30, 2]) for n in "ab"}
    before = [np.array(each.numpy()) for each in model.variables]
    metrics = len(model.metrics_variables)
    found = kc.memory(model, data).with_shard(None)
    assert found.step > 4 * model.count_params()  # the gradients
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert len(model.metrics_variables) == metrics
    assert not model.optimizer.built
    model.fit(*data, batch_size=30, verbose=0)
    assert kc.memory(model, data).step is None  # with parts, XLA decides


def test_steps_that_are_not_known():
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    given = layers.Input((4,))
    model = Own(given, layers.Dense(1)(given))
    x, y = np.ones([8, 4]), np.ones([8, 1])
    with pytest.raises(ValueError, match="a model that is not compiled"):
        kc.memory(model, (x, y))
    model.compile("sgd", "mse")
    found = kc.memory(model, (x, y), devices=2)
    assert found.step is None
    said = "?: Own has its own `train_step`; only Keras' is measured."
    for each in (found, found.with_shard("weights")):
        assert str(each).splitlines()[-1] == said
    assert "?:" not in str(kc.memory(model))
    with pytest.raises(TypeError, match=r"`batch` is .* Received: .* is a int"):
        kc.memory(model, (x, 3))


def test_a_step_that_xla_cannot_compile_says_so():
    def called(x):
        found = tf.numpy_function(lambda x: x, [x], tf.float32)
        return tf.ensure_shape(found, x.shape)

    given = layers.Input((4,))
    output = layers.Dense(1)(layers.Lambda(called)(given))
    model = keras.Model(given, output)
    model.compile("sgd", "mse")
    found = kc.memory(model, (np.ones([8, 4]), np.ones([8, 1])))
    assert found.step is None
    assert str(found).endswith("\n?: XLA cannot compile the step.")


def test_a_step_is_measured_beside_a_test_step_of_the_users_own():
    class Own(keras.Model):
        def test_step(self, data):
            return super().test_step(data)

    given = layers.Input((4,))
    model = Own(given, layers.Dense(1)(given))
    model.compile("sgd", "mse")
    found = kc.memory(model, (np.ones([8, 4]), np.ones([8, 1])))
    assert found.step > 0
    assert found.unknown is None


def test_a_loss_without_targets_is_refused():
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    for batch in (np.ones([8, 4]), (np.ones([8, 4]), None)):
        with pytest.raises(ValueError, match=r"as in `\(x, y\)`"):
            kc.memory(model, batch)


class Huge(layers.Layer):
    """Gets no memory in a step that is told so."""

    says = ""

    def call(self, x):
        if self.says:
            raise tf.errors.ResourceExhaustedError(None, None, self.says)
        return x


GIVEN = np.ones([4, 32], "float32")


def huge(kind=keras.Model, **options):
    given = layers.Input((32,))
    hidden = layers.Dense(32)(layers.Dense(200)(given))
    model = kind(given, Huge(name="huge")(hidden))
    kc.replicate(model, 2, **options)
    model.compile("adam", "mse")
    return model


def said_of(model, says="OOM", call="train_on_batch"):
    """Returns the note of an error, without the ends of its lines."""
    model.get_layer("huge").says = says
    data = (GIVEN,) if "predict" in call else (GIVEN, GIVEN)
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
        getattr(model, call)(*data)
    (note,) = [x for x in raised.value.__notes__ if "no memory for" in x]
    return " ".join(note.split())


@functools.cache
def assert_accepted(options, advised):
    """Types what is advised, with what the model has in place of the dots."""
    given = dict(options) | eval(f"dict({advised})")
    huge(**given).train_on_batch(GIVEN, GIVEN)


@several
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_what_is_not_advised_is_refused(shard):
    with pytest.raises(NotImplementedError, match="do not work together"):
        huge(shard=shard, microbatches=2)


@pytest.mark.sampled(1)
@several
@pytest.mark.parametrize(
    ("shard", "microbatches"),
    [(None, 1), (None, 2), ("optimizer", 1), ("weights", 1)],
)
def test_an_error_says_what_would_need_less(shard, microbatches):
    options = {"shard": shard, "microbatches": microbatches}
    model = huge(**options)
    said = said_of(model)
    found = kc.memory(model)
    taken = f"{found.variables / 1e3:.3g} kB"  # on GPUs, of how much
    assert re.search(rf"Variables take {taken}( of \S+ GB)? on each of 2", said)
    for other in ("optimizer", "weights"):
        saved = found.variables - found.with_shard(other).variables
        row = f'replicate(..., shard="{other}")'
        assert (row in said) == (saved > 0 and microbatches == 1)
        assert row not in said or f"{row} saves {saved / 1e3:.3g} kB" in said
    for way in ("memory(model, batch)", "keras.RematScope", "half of the"):
        assert way in said
    assert "saves at most" not in said
    lines = re.findall(r"replicate\(\.\.\., (.*?)\)", said)
    turns = f"microbatches={2 * microbatches}"
    assert (turns in lines) == (not shard)
    for line in lines:
        assert_accepted(tuple(options.items()), line)


XLA_SAYS = """Out of memory while trying to allocate 24576 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:  172.00KiB
              constant allocation:         0B
        maybe_live_out allocation:         0B
     preallocated temp allocation:  {}
                 total allocation:    3.00MiB
"""


@several
def test_what_xla_says_of_a_step_tells_how_much_is_saved_at_most():
    """Turns save half of it, of which sums of gradients take their part."""
    model = huge()
    gradients = 4 * model.count_params()  # 53 kB
    said = said_of(model, XLA_SAYS.format("2.00MiB"))
    saved = (2**20 - gradients) / 1e3
    assert "a step needs 2.1 MB besides, says XLA" in said
    assert f"microbatches=2) saves at most {saved:.3g} kB" in said
    assert "RematScope saves at most 2.1 MB" in said
    assert "half of the batch saves at most 1.05 MB" in said
    said = said_of(model, XLA_SAYS.format("51.00KiB"))
    assert "a step needs 52.2 kB besides" in said
    assert "microbatches" not in said  # the sums would take more
    assert "shard=" in said
    several_turns = huge(microbatches=2)
    saved = (2**21 - gradients) / 2e6
    said = said_of(several_turns, XLA_SAYS.format("2.00MiB"))
    assert f"microbatches=4) saves at most {saved:.3g} MB" in said


@several
def test_a_step_that_is_not_known_is_not_told_to_be_asked_for():
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    said = said_of(huge(Own))
    assert "`keras_conflux.memory(model)` tells the first before" in said
    assert "memory(model, batch)" not in said


@several
@pytest.mark.parametrize("eager", [False, True])
def test_what_keeps_no_activations_is_not_told_to_save_them(eager):
    model = huge()
    model.compile("adam", "mse", run_eagerly=eager)
    call = "train_on_batch" if eager else "predict_on_batch"
    said = said_of(model, call=call)
    assert "shard=" in said
    assert "half of the batch" in said
    assert "microbatches" not in said
    assert "RematScope" not in said


@several
def test_optimizers_that_cannot_update_parts_are_not_told_to():
    class Own(keras.optimizers.Adam):
        def update_step(self, *args):
            super().update_step(*args)

    model = huge()
    model.compile(Own(), "mse")
    said = said_of(model)
    assert "shard=" not in said
    assert "microbatches=2" in said
    parts = huge(shard="optimizer")
    parts.compile(Own(), "mse")
    with pytest.raises(NotImplementedError, match="conflux_elementwise"):
        parts.train_on_batch(GIVEN, GIVEN)


def test_an_error_of_a_function_of_the_users():
    @kc.withdevices(devices=1)
    def run(x):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
        run(1.0)
    note = raised.value.__notes__[0]
    assert "`keras_conflux.memory(model, batch)` tells" in note
    assert "keras.RematScope" in note
    assert "microbatches" not in note


@several
def test_other_errors_have_no_note():
    model = huge()
    with pytest.raises(ValueError, match="incompatible") as raised:
        model.fit(np.ones([4, 3]), np.ones([4, 3]), verbose=0)
    notes = getattr(raised.value, "__notes__", [])
    assert not any("RematScope" in note for note in notes)
