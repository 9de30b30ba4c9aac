"""Variables whose memory a program of XLA has lost, as it got no more."""

import gc
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from keras import layers

import keras_conflux as kc
from keras_conflux._replication import lost_values
from keras_conflux._replication import state

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 70)).astype("float32")
Y = X[:, :3]
SAYS = "Out of memory while trying to allocate 12.51GiB."
LOST = "lost when a device ran out of memory"


def trained(shard, devices=MANY, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((70,)), layers.Dense(70), layers.Dense(3)]
    )
    kc.replicate(model, devices, shard=shard)
    model.compile("adam", "mse", **options)
    train(model)
    return model


def train(model):
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history


def copies_of(model):
    return [
        copy
        for variable in state.variables_of(model)
        for copy in state.copies(variable)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("devices", "shard"),
    [(1, None), (MANY, None), (MANY, "optimizer"), (MANY, "weights")],
)
def test_what_is_lost_is_not_read_and_may_be_set(devices, shard, tmp_path):
    if MANY < 2 and shard:
        pytest.skip("takes several devices")
    model = trained(shard, devices, jit_compile=devices == 1 or ON_GPU)
    weights = model.get_weights()
    moments = [each.numpy() for each in model.optimizer.variables]
    expected = train(model)
    lost_values.empty(copies_of(model))

    with pytest.raises(tf.errors.FailedPreconditionError, match=LOST):
        model.get_weights()
    for use in (
        lambda: model.save(tmp_path / "model.keras"),
        lambda: model.predict(X, verbose=0),
        lambda: train(model),
        model.get_weights,
    ):
        with pytest.raises(tf.errors.OpError, match="variable"):
            use()

    model.set_weights(weights)
    for variable, value in zip(model.optimizer.variables, moments, strict=True):
        variable.assign(value)
    assert train(model)["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "error", "is_lost"),
    [
        ("CPU", tf.errors.ResourceExhaustedError(None, None, SAYS), True),
        ("GPU", tf.errors.ResourceExhaustedError(None, None, SAYS), False),
        ("CPU", tf.errors.ResourceExhaustedError(None, None, "a disk"), False),
        ("CPU", tf.errors.InvalidArgumentError(None, None, SAYS), False),
        ("CPU", ValueError(SAYS), False),
    ],
)
def test_what_a_program_of_xla_loses(kind, error, is_lost, monkeypatch):
    if ON_GPU:
        kind = {"CPU": "GPU", "GPU": "CPU"}[kind]
    monkeypatch.setattr(lost_values, "KIND", kind)
    with kc.replicate(devices=MANY).scope():
        variables = [tf.Variable([1.0, 2.0]) for _ in range(2)]
    written, read = map(state.copies, variables)

    @tf.function
    def step(one, other):
        one.assign_add(other)

    @tf.function
    def program():
        for pair in zip(written, read, strict=True):
            step(*pair)

    lost_values.after(error, program.get_concrete_function())
    for copy in written:
        assert copy.is_initialized() == (not is_lost)
    for copy in read:
        assert copy.is_initialized()
    notes = getattr(error, "__notes__", [])
    assert ["are lost" in note for note in notes] == [True] * is_lost


def test_values_that_are_set_anew_go_with_their_variable():
    variable = tf.Variable([1.0, 2.0])
    lost_values.empty([variable])
    variable.assign([3.0, 4.0])
    lost = variable.handle
    lost_values.empty([variable])
    variable.assign([5.0, 6.0])
    kept = variable.handle
    del variable
    gc.collect()
    # To free what was lost would end the process.
    assert tf.raw_ops.VarIsInitializedOp(resource=lost)
    assert not tf.raw_ops.VarIsInitializedOp(resource=kept)


FULL = """
import sys
import keras
import numpy as np
import tensorflow as tf

limit = tf.config.LogicalDeviceConfiguration(6000)
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.set_logical_device_configuration(gpu, [limit])

import keras_conflux as kc

layers = [keras.layers.Dense(1024, "gelu") for _ in range(24)]
model = keras.Sequential([keras.Input((1024,)), *layers])
kc.replicate(model, shard=sys.argv[1] or None)
model.compile("adam", "mse", jit_compile=True)
model.optimizer.build(model.trainable_variables)
variables = [*model.weights, *model.optimizer.variables]
values = [each.numpy() for each in variables]
x = np.ones([1 << 17, 1024], "float32")
try:
    model.train_on_batch(x, x)
except tf.errors.ResourceExhaustedError as error:
    print(*error.__notes__)
try:
    model.get_weights()
except tf.errors.FailedPreconditionError as error:
    print(error)
for variable, value in zip(variables, values):
    variable.assign(value)
model.reset_metrics()
for _ in range(3):
    loss = model.train_on_batch(x[:256], x[:256])
print("then", np.isfinite(loss))
"""


@pytest.mark.skipif(not ON_GPU, reason="memory of CPU devices has no limit")
@pytest.mark.parametrize("shard", ["", "weights"])
def test_a_process_goes_on_after_gpus_were_full(shard):
    ran = subprocess.run(
        [sys.executable, "-c", FULL, shard],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "are lost" in ran.stdout
    assert LOST in ran.stdout
    assert "then True" in ran.stdout
