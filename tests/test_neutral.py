"""Importing and using the package changes nothing that is not replicated."""

import forked
import keras
import pytest
from conftest import ON_GPU

TRAIN = """
import os, random, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras, numpy as np, tensorflow as tf
if sys.argv[1] == "with":
    from keras_conflux._compat import patching
    patching.begin()
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


CHANGED = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras, tensorflow as tf
from keras.src.backend.tensorflow import distribution_lib

def attributes():
    found = {}
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] in ("keras", "tensorflow"):
            for key, value in [*vars(module).items()]:
                found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update(
                        ((name, key, k), v) for k, v in vars(value).items())
    return {key: value for key, value in found.items()
            if callable(value) or isinstance(value, property)}

before = attributes()
import keras_conflux as kc
imported = attributes()
for key, value in imported.items():
    was = before.get(key)
    ours = getattr(value, "__module__", None) or ""
    if was is not value and (was or ours.startswith("keras_conflux")):
        print(*key)
kc.ReplicatedStrategy(1)
used = attributes()
print(sum(used[key] is not value for key, value in imported.items()))
"""
DOORS = """
keras.distribution set_distribution
keras.src.backend.tensorflow.core remat
keras.src.backend.tensorflow.distribution_lib distribute_tensor
keras.src.backend.tensorflow.distribution_lib get_device_count
keras.src.backend.tensorflow.distribution_lib initialize
keras.src.backend.tensorflow.distribution_lib list_devices
keras.src.backend.tensorflow.distribution_lib num_processes
keras.src.backend.tensorflow.distribution_lib process_id
keras.src.backend.tensorflow.trainer TensorFlowTrainer fit
keras.src.distribution.distribution_lib DataParallel __init__
keras.src.distribution.distribution_lib set_distribution
keras.src.layers.layer Layer rematerialized_call
tensorflow sequence_mask
tensorflow._api.v2.nn compute_average_loss
tensorflow._api.v2.nn scale_regularization_loss
"""


def test_the_import_changes_doors_alone():
    result = forked.run("-c", CHANGED)
    assert result.returncode == 0, result.stderr
    *doors, count = result.stdout.splitlines()
    # The package of the backend's operations has another name in Keras 3.16.
    doors = [door.replace("tensorflow.ops.", "tensorflow.") for door in doors]
    assert sorted(doors) == DOORS.split("\n")[1:-1]
    assert int(count) > 80  # the first use changes the others


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
