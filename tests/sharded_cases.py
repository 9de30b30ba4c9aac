"""Trainings whose optimizer's state, or weights, lie in parts.

`python sharded_cases.py 8` trains all of them on so many CPU devices, of each
process if there are several, and `python sharded_cases.py 8 Adagrad` that one.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import optimizers

import keras_conflux as kc
from keras_conflux._replication import state

TOLERANCE = 5e-5
"""Of the largest entry. Adam magnifies the roundings of gradients that are
summed in another order, with parts as with copies."""

RNG = np.random.default_rng(0)
WIDTH = 65  # the sizes of variables are odd, and no count divides them
X = RNG.normal(size=(22, WIDTH)).astype("float32")
Y = (X[:, :3] * 2).astype("float32")


def model():
    """Variables that are cut, and some that are too small."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.Dense(67, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dense(71, activation="tanh"),
            layers.Dense(71, activation="tanh", name="wide"),
            layers.Dense(3),
        ]
    )


def schedule():
    return optimizers.schedules.CosineDecay(0.02, 10)


def masked():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.05)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def scaled():
    inner = optimizers.RMSprop(0.01, global_clipnorm=0.1)
    return optimizers.LossScaleOptimizer(inner)


def two_in_one(**options):
    adam = optimizers.Adam(0.01, **options)
    momentum = optimizers.SGD(0.05, momentum=0.9)
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(adam, {".*wide/.*": momentum})
    )


OPTIMIZERS = {
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.02),
    "Adam, amsgrad": lambda: optimizers.Adam(schedule(), amsgrad=True),
    "Adam, accumulation": lambda: optimizers.Adam(
        0.01, gradient_accumulation_steps=2, clipvalue=0.01
    ),
    "Adam, averages": lambda: optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "AdamW, a mask": masked,
    "Adamax": lambda: optimizers.Adamax(0.01, weight_decay=0.1),
    "Ftrl": lambda: optimizers.Ftrl(0.01),
    "Lamb": lambda: optimizers.Lamb(0.01, clipnorm=0.05),
    "Lion": lambda: optimizers.Lion(0.001),
    "loss scaling": scaled,
    "Muon": lambda: optimizers.Muon(0.01, weight_decay=0.1),
    "Muon, accumulation": lambda: optimizers.Muon(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.05
    ),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "RMSprop, centered": lambda: optimizers.RMSprop(
        0.01, centered=True, momentum=0.9
    ),
    "SGD": lambda: optimizers.SGD(0.05, clipnorm=0.03),
    "SGD, averages": lambda: optimizers.SGD(
        0.05, momentum=0.9, nesterov=True, use_ema=True
    ),
}
if hasattr(optimizers, "MultiOptimizer"):  # from Keras 3.15 on
    OPTIMIZERS["MultiOptimizer"] = two_in_one
    OPTIMIZERS["MultiOptimizer, accumulation"] = lambda: two_in_one(
        gradient_accumulation_steps=4
    )


def that_update(optimizer):
    """Returns the optimizers inside of one, or itself."""
    if isinstance(optimizer, optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    return getattr(optimizer, "optimizers", [optimizer])


def trained(optimizer, count=None, shard=None, made=model, x=X, y=Y, **options):
    """Trains for two epochs, whose last batch is uneven, or has 2 samples."""
    one = made()
    if count:
        kc.replicate(one, devices=count, shard=shard)
    one.compile(optimizer, "mse", **options)
    history = one.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return one, history.history["loss"]


def assert_equal(found, expected, tolerance=TOLERANCE):
    """Compares trained models, and what their training returned."""
    (one, losses), (other, expected_losses) = found, expected
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    for variable, value in zip(one.variables, other.variables, strict=True):
        close(variable, value, tolerance)
    for mine, its in zip(optimizers_of(one), optimizers_of(other), strict=True):
        for variable, value in zip(mine.variables, its.variables, strict=True):
            close(variable, value, tolerance)
    assert kc.in_sync(one)


def optimizers_of(one):
    """Returns the optimizers of a model, which may have one of its own."""
    of_any_kind = vars(one).values()
    return [x for x in of_any_kind if isinstance(x, optimizers.Optimizer)]


def close(variable, expected, tolerance):
    assert variable.shape == expected.shape, variable.path
    expected = expected.numpy()
    largest = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(
        variable.numpy(),
        expected,
        rtol=tolerance,
        atol=tolerance * max(largest, 1e-3),
        err_msg=variable.path,
    )


def bytes_on_devices(variables):
    """Returns how many bytes variables have on each device.

    TensorFlow keeps integers of 32 bits on the host of GPUs. They count as the
    first GPU's.
    """
    gpus = [each.name for each in tf.config.list_logical_devices("GPU")]
    found = {}
    for variable in variables:
        value = variable.value
        strategy = getattr(value, "distribute_strategy", None)
        copies = (
            strategy.experimental_local_results(value) if strategy else [value]
        )
        for copy in copies:
            size = copy.shape.num_elements() * copy.dtype.size
            device = "/" + copy.device.rpartition("/")[2]
            if gpus and copy.dtype == tf.int32:
                device = gpus[0]
            found[device] = found.get(device, 0) + size
    return list(found.values())


def main() -> None:
    count, *names = sys.argv[1:]
    kc.devices(None if tf.config.list_physical_devices("GPU") else int(count))
    tf.config.experimental.enable_tensor_float_32_execution(False)
    kc.initialize()
    for name, made in OPTIMIZERS.items():
        if names and name not in names:
            continue
        expected = trained(made())
        for shard in ("optimizer", "weights"):
            found = trained(made(), int(count), shard)
            # Each process has what it has accumulated itself.
            owners = state.stateful_objects(found[0])
            state.add_up_accumulated(owners, in_each_process=True)
            assert_equal(found, expected)
            print(name, shard, flush=True)


if __name__ == "__main__":
    main()
