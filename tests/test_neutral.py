"""Importing the package changes nothing for what is not replicated."""

import forked
import keras
import pytest
from conftest import ON_GPU

TRAIN = """
import os, random, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras, numpy as np, tensorflow as tf
if sys.argv[1] == "with":
    import keras_conflux
stock = sys.argv[2] == "mirrored"
if stock:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2)
    scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope
else:
    import contextlib
    scope = contextlib.nullcontext
x = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
y = x[:, :1] * 2
fit = dict(batch_size=16, epochs=2, shuffle=False, verbose=0)

def train(optimizer, **options):
    keras.utils.set_random_seed(1)
    with scope():
        model = keras.Sequential([
            keras.Input((8,)), keras.layers.Dense(8, "tanh"),
            keras.layers.BatchNormalization(synchronized=stock),
            keras.layers.Dropout(0.3), keras.layers.Dense(1)])
        options = {"loss": "mse", "metrics": ["mae"], **options}
        model.compile(optimizer(), jit_compile=False, **options)
    history = model.fit(x, y, validation_data=(x, y), **fit).history
    predicted = model.predict(x, verbose=0)
    for array in (*model.get_weights(), predicted, *history.values()):
        print(np.asarray(array).tobytes().hex())
    if not stock:  # there `validation_data` is evaluated, and tracing is slow
        print(model.evaluate(x, y, verbose=0), int(model.optimizer.iterations))

if not stock:  # what draws from Python's generator, and when
    random.seed(3)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    print(random.random(), float(keras.random.normal(())), random.random())
train(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1, use_ema=True))
train(lambda: keras.optimizers.SGD(0.01),
      loss=keras.losses.MeanSquaredError(reduction="sum"))
train(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
if not stock:
    train(lambda: keras.optimizers.Adam(1e-2))
    train(lambda: keras.optimizers.Adam(gradient_accumulation_steps=2))
    train(lambda: keras.optimizers.Adam(), steps_per_execution=2)
    train(lambda: keras.optimizers.Adam(), run_eagerly=True)
"""


def train(imported: str, how: str) -> str:
    result = forked.run("-c", TRAIN, imported, how)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(ON_GPU, reason="GPUs sum in any order")
@pytest.mark.parametrize(
    "how", ["single", pytest.param("mirrored", marks=pytest.mark.long)]
)
def test_training_is_the_same_bit_by_bit(how):
    without = train("without", how)
    assert len(without) > 1000
    assert train("with", how) == without


class Momentum(keras.optimizers.Optimizer):
    """Names its variables by position, as Keras allows."""

    def build(self, variables):
        super().build(variables)
        self.speeds = [
            self.add_variable_from_reference(variable, "speed")
            for variable in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        speed = self.speeds[self._get_variable_index(variable)]
        self.assign(speed, 0.9 * speed - learning_rate * gradient)
        self.assign_add(variable, speed)


def test_an_optimizer_may_name_variables_by_position():
    optimizer = Momentum(0.1)
    optimizer.build([keras.Variable(1.0)])
    (speed,) = optimizer.speeds
    assert speed.name.endswith("speed")
