"""A line of code for each row of docs/parity.md, true if the row is.

The lines run on two devices, in the process of the tests.
"""

import functools
import os
import pathlib
import tempfile
import threading
import types
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from models import dense
from models import regression

import keras_conflux as kc
from keras_conflux.tools.cli.run import deal

TWO = DEVICES[:2]
FIRST, LAST = DEVICES[0], TWO[-1]
X, Y = regression(64)
DATASET = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


def two(first, last) -> kc.Replicas:
    """Returns a value for each of two devices."""
    return kc.Replicas([first, last], TWO)


def have(values, *expected) -> bool:
    """Whether replicas have these numbers and lists of numbers."""

    def plain(leaf):
        return np.asarray(leaf).tolist()

    found = [keras.tree.map_structure(plain, kc.to_cpu(x)) for x in values]
    return found == [*expected]


def raises(error, words, call, *args) -> bool:
    """Whether a call raises an error that says something."""
    with pytest.raises(error) as caught:
        call(*args)
    notes = getattr(caught.value, "__notes__", [])
    return words in "\n".join([str(caught.value), *notes])


def on_each(fn, *args) -> kc.Replicas:
    """Returns what a function returns on two devices."""
    return kc.withdevices(fn, devices=TWO)(*args)


# --- models ----------------------------------------------------------------


@functools.cache
def trained() -> types.SimpleNamespace:
    """Returns a model that `fit` has trained on two devices, and one on one."""
    folder = pathlib.Path(tempfile.mkdtemp())
    many, one = kc.replicate(dense("sgd"), TWO), dense("sgd")
    callbacks = [
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.ModelCheckpoint(folder / "best.keras"),
        kc.Throughput(),
        kc.Resume(folder / "resume"),
    ]
    options = {"batch_size": 13, "shuffle": False, "verbose": 0}  # uneven
    logs = many.fit(X, Y, callbacks=callbacks, **options).history
    one.fit(X, Y, **options)
    return types.SimpleNamespace(many=many, one=one, logs=logs, folder=folder)


def are_equal(model, other) -> bool:
    """Whether two models have the same weights, but for rounding."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def apart() -> keras.Model:
    """Returns a model whose weights are 1 on one device and 3 on the other."""
    layers = [keras.Input((1,)), keras.layers.Dense(1)]
    model = kc.replicate(keras.Sequential(layers), TWO)
    for weight in model.weights:
        copies = kc.Replicas.from_distributed(weight.value)
        for copy, number in zip(copies, (1.0, 3.0), strict=True):
            copy.assign(tf.fill(copy.shape, number))
    return model


def are_all(model, number) -> bool:
    """Whether all weights are this number, on all devices."""
    weights = model.get_weights()
    return kc.in_sync(model) and all((x == number).all() for x in weights)


def after(call, model) -> keras.Model:
    """Returns the model that a call has changed."""
    call(model)
    return model


def on_batches() -> bool:
    """Whether single steps train as on one device."""
    many, one = kc.replicate(dense("sgd"), TWO), dense("sgd")
    losses = [m.train_on_batch(X, Y, return_dict=True) for m in (many, one)]
    return np.isclose(losses[0]["loss"], losses[1]["loss"])


def of_a_part() -> bool:
    """Whether a process that brings its own part trains as on one device."""
    model = kc.replicate(dense("sgd"), TWO, data="local")
    part = kc.shard(X), kc.shard(Y)
    model.fit(*part, batch_size=13, shuffle=False, verbose=0)
    return are_equal(model, trained().one)


def in_parts() -> bool:
    """Whether a model on a mesh trains as on one device."""
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], [*TWO])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        model = dense("sgd")
    model.fit(X, Y, batch_size=13, shuffle=False, verbose=0)
    return are_equal(model, trained().one)


def is_resumed() -> bool:
    """Whether a loop's checkpoint gives a model its weights and its state."""
    model, directory = trained().many, trained().folder / "loop"
    kc.save(model, directory, step=3, state="best")
    model.set_weights([0 * weight for weight in model.get_weights()])
    loaded = kc.load(model, directory)
    return are_equal(model, trained().one) and loaded.state == "best"


def is_saved() -> bool:
    """Whether a file has the model of one device."""
    file = trained().folder / "model.keras"
    trained().many.save(file)
    return are_equal(keras.saving.load_model(file), trained().one)


def learning_rate(rate) -> float:
    """Returns the rate of a replicated optimizer to which it is set."""
    optimizer = kc.replicate(keras.optimizers.Adam(), TWO)
    optimizer.learning_rate = rate
    return round(float(optimizer.learning_rate), 6)


def of_strategy_run(number) -> float:
    """Returns a weight that two replicas have updated by one gradient each."""
    with kc.replicate(devices=TWO) as strategy:
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def run():
        strategy.run(lambda: optimizer.apply([tf.constant(number)], [weight]))

    run()
    return float(weight)


def of_first(number) -> float:
    """Returns a weight that one replica has updated, and the others copied."""
    weight = kc.replicate(lambda: keras.Variable(0.0), TWO)
    optimizer = kc.replicate(keras.optimizers.SGD(1.0), TWO)
    optimizer.build([weight])

    def step(gradient):
        gradient = kc.reduce("mean", gradient)
        if kc.replica().index == 0:
            optimizer.apply([gradient], [weight])
        kc.broadcast(weight)
        return tf.identity(weight)

    return float(on_each(step, two(number, number))[1])


def of_metric(first, last) -> float:
    """Returns the mean of what two replicas have counted."""
    metric = kc.replicate(keras.metrics.Mean, TWO)

    def step(x):
        metric.update_state(x)

    on_each(step, two(first, last))
    return float(metric.result())


# --- steps -----------------------------------------------------------------


def where():
    """Returns which replica runs."""
    return kc.replica().index, str(kc.replica().device)


def total(x):
    """Returns the sum over the replicas."""
    return kc.allreduce("sum", x)


def log_sum_exp(x):
    """Reduces by a function that is no collective."""
    return tf.reduce_logsumexp(kc.allgather(x), axis=0)


def scattered(x):
    """Returns a replica's part of the sum, and what the replica before has."""
    this = kc.replica()
    part = tf.split(kc.allreduce("sum", x), this.count)[this.index]
    return part, kc.allgather(x[None])[this.index - 1]


def meanwhile(x):
    """Computes what does not wait for the sum."""
    return kc.allreduce("sum", x), 2 * x


def fail():
    """Fails on all replicas."""
    raise ZeroDivisionError("on purpose")


def without_memory():
    """Fails like an operation that gets no memory."""

    def run():
        raise MemoryError("OOM when allocating tensor with shape[3]")

    return tf.numpy_function(run, [], tf.float32)


def eagerly(call, *args):
    """Returns what a call returns while functions run eagerly."""
    tf.config.run_functions_eagerly(True)
    try:
        return call(*args)
    finally:
        tf.config.run_functions_eagerly(False)


def on_device(device, make):
    """Returns what is made in the scope of a device."""
    with tf.device(device):
        return make()


def chosen(devices) -> tuple[kc.Device, ...]:
    """Returns the devices of a call that names none, in a scope."""
    with kc.replicate(devices=devices):
        return kc.replicate(1.0).devices


def is_skipped() -> bool:
    """Whether a batch is skipped for which there is no memory."""
    step = kc.skip_out_of_memory(without_memory, devices=TWO)
    with pytest.warns(kc.ConfluxWarning, match="no memory"):
        return step() is None and step.skipped == 1


def makes_no_threads() -> bool:
    """Whether Python has as many threads after a second step as before."""
    step = kc.withdevices(where, devices=TWO)
    step()
    before = threading.active_count()
    step()
    return threading.active_count() == before


LINES: dict[str, Callable[[], object]] = {
    # Replication
    "replicate any tree, on all devices by default": lambda: have(
        kc.replicate({"w": (2.0, None)}), *[{"w": (2.0, None)}] * len(DEVICES)
    ),
    "choose devices": lambda: kc.replicate(2.0, [LAST]).devices == (LAST,),
    "a function per replica that makes its value, so that replicas share no "
    "memory": lambda: (
        (copies := kc.replicate(tf.Variable(1.0), TWO))[0].assign(2.0) == 2
        and copies[1] == 1
    ),
    "a container with length, iteration, index, devices and a short repr": (
        lambda: (
            (*(it := two(1, 2)), len(it), it[1], it.devices, str(it))
            == (1, 2, 2, 2, TWO, f"Replicas of 1, 2 on {', '.join(TWO)}")
        )
    ),
    "index by device": lambda: two(1, 2)[LAST] == 2,
    "optimizer state per device": lambda: (
        kc.devices_of(trained().many.optimizer) == TWO
    ),
    "a tree of zeros shaped like a model, for buffers": lambda: have(
        kc.replicate([tf.zeros_like(x) for x in apart().weights], TWO),
        *[[[[0]], [0]]] * 2,
    ),
    # Running on each device
    "run `f((i, device))` on each device, with results in order": lambda: have(
        on_each(where), (0, FIRST.encode()), (1, LAST.encode())
    ),
    "run replicas one after another (`async=false`)": lambda: have(
        eagerly(on_each, total, two(1.0, 2.0)), 3, 3
    ),
    "one OS thread per device": makes_no_threads,
    "a scope that selects one device, also a CPU": lambda: (
        kc.device_of(on_device(LAST, lambda: tf.random.uniform([]))) == LAST
    ),
    "a whole training loop; single steps": lambda: (
        are_equal(trained().many, trained().one) and on_batches()
    ),
    "skip a batch when a device is out of memory": is_skipped,
    "the same in `fit`, or around a whole step": lambda: raises(
        ValueError, "collective", kc.skip_out_of_memory(total), two(1.0, 2.0)
    ),
    "errors of a worker are raised": lambda: raises(
        ZeroDivisionError, f"replica 0 ({FIRST})", on_each, fail
    ),
    # Collectives
    "all-reduce arrays of one process": lambda: have(
        kc.allreduce("sum", np.ones(2), np.ones(2)), [2, 2], [2, 2]
    ),
    "all-reduce trees, and models in place": lambda: (
        have(kc.allreduce("sum", {"w": 1.0}, {"w": 2.0}), {"w": 3}, {"w": 3})
        and are_all(after(lambda m: kc.allreduce("mean", m), apart()), 2)
    ),
    "all-reduce the buffer of this replica": lambda: have(
        on_each(total, two(1.0, 2.0)), 3, 3
    ),
    "`+`, `*`, max, min, avg": lambda: (
        [
            float(kc.allreduce(op, 2.0, 5.0)[1])
            for op in ("+", "*", "max", "min", "avg")
        ]
        == [7, 10, 5, 2, 3.5]
    ),
    "reduce by any function": lambda: np.allclose(
        on_each(log_sum_exp, two(0.0, 1.0))[1], np.log(1 + np.e)
    ),
    "an error if shapes differ": lambda: raises(
        kc.ReplicaMismatchError,
        "['w']",
        lambda: kc.allreduce("sum", {"w": np.ones(2)}, {"w": np.ones(3)}),
    ),
    "reduce to a root": lambda: have(kc.reduce("sum", 1.0, 2.0, root=1), 1, 3),
    "the mean on one replica only": lambda: have(
        kc.reduce("mean", 1.0, 3.0), 2, 3
    ),
    "the mean of gradients on the host": lambda: (
        on_device("CPU:0", lambda: tf.add_n([*kc.replicate(2.0, TWO)]) / 2) == 2
    ),
    "broadcast from a root": lambda: have(kc.broadcast(1.0, 2.0, root=1), 2, 2),
    "synchronize a tree from a root": lambda: are_all(
        after(lambda model: kc.synchronize(model, root=1), apart()), 3
    ),
    "a wrapper for models of any type": lambda: (
        kc.devices_of(kc.replicate(keras.Sequential([apart()]), TWO)) == TWO
    ),
    "numbers are returned, other leaves are left alone": lambda: (
        have(kc.allreduce("sum", (1, None), (2, None)), (3, None), (3, None))
        and raises(TypeError, "['w']", kc.allreduce, "sum", *[{"w": "a"}] * 2)
    ),
    "`nothing` leaves": lambda: (
        kc.allreduce("mean", [None, 1.0], [None, 3.0])[1][0] is None
    ),
    "collectives without NCCL that free memory early": lambda: have(
        kc.allreduce("sum", two(1.0, 2.0)), 3, 3
    ),
    "all-gather": lambda: have(
        kc.allgather(np.ones(1), np.zeros(2)), [1, 0, 0], [1, 0, 0]
    ),
    "reduce-scatter, send and receive": lambda: have(
        on_each(scattered, two(tf.range(2), tf.range(2) + 5)),
        ([5], [5, 6]),
        ([7], [0, 1]),
    ),
    "several calls as a group": lambda: have(
        kc.allreduce("sum", (1.0, [2]), (3.0, [4])), (4, [6]), (4, [6])
    ),
    "non-blocking calls that return requests": lambda: have(
        on_each(meanwhile, two(1.0, 2.0)), (3, 2), (3, 4)
    ),
    "buffers on different devices are moved": lambda: have(
        kc.allreduce("sum", *kc.to_device([1.0, 2.0], LAST)), 3, 3
    ),
    "arrays that are not on GPUs": lambda: (
        kc.device_of(kc.allreduce("sum", np.ones(2), np.ones(2))[1]) == LAST
    ),
    "buckets, and overlap with the backward pass": lambda: have(
        kc.allreduce("sum", *[[np.ones(2)] * 9] * 2)[1], *[[2, 2]] * 9
    ),
    # Optimizers
    "the mean of gradients inside the optimizer": lambda: are_equal(
        trained().many, trained().one
    ),
    "the sum of gradients inside the optimizer": lambda: (
        of_strategy_run(1.5) == -3
    ),
    "the state of the wrapped optimizer, and adjusting it": lambda: (
        learning_rate(0.25) == 0.25
    ),
    "synchronize the optimizer's state, or average it": lambda: (
        kc.allreduce("mean", trained().many.optimizer)
        is kc.synchronize(trained().many.optimizer)
        is None
    ),
    "update one copy, then broadcast it": lambda: of_first(2.0) == -2,
    "handle gradients of unused parameters": lambda: (
        on_each(lambda x: kc.allreduce("mean", [None, x]), 1.0)[1][0] is None
    ),
    # Data
    "contiguous parts of ceil(N / W) samples for W workers, as a container": (
        lambda: (
            [[*kc.shard([*"abcd"], i, 3)] for i in range(3)]
            == [["a", "b"], ["c", "d"], []]
        )
    ),
    "parts padded to equal length": lambda: (
        [*kc.shard([*"abc"], 1, 2, pad=True)] == ["c", "a"]
    ),
    "one part of a batch per device": lambda: (
        have(kc.split(np.arange(3), TWO), [0, 1], [2])
        and [len(x) for x, _ in kc.distribute(DATASET, TWO)] == [2] * 4
    ),
    "random minibatches, image readers, preprocessing": lambda: (
        next(iter(DATASET.unbatch().shuffle(64).repeat().batch(4)))[0].shape
        == (4, 8)
    ),
    "an iterator that moves batches ahead of use and frees them": lambda: all(
        kc.device_of(batch) == LAST for batch in kc.prefetch(DATASET, LAST)
    ),
    "a catalogue of data sets": lambda: tf.io.gfile.exists(__file__),
    # Devices
    "move a tree to a device or the CPU": lambda: (
        kc.device_of(there := kc.to_device({"w": np.ones(2)}, LAST)) == LAST
        and isinstance(kc.to_cpu(there)["w"], np.ndarray)
    ),
    "choose a device by number; fall back to the CPU, or raise without a "
    "GPU": lambda: (
        kc.devices([1]) == (LAST,)
        and raises(kc.DeviceError, "99", kc.devices, 99)
    ),
    "remember the chosen device": lambda: chosen([LAST]) == (LAST,),
    "`CUDA_VISIBLE_DEVICES`": lambda: (
        os.environ.get("CUDA_VISIBLE_DEVICES") != "-1"
        or {device.kind for device in kc.list_devices()} == {"CPU"}
    ),
    "the device of a tree; an error if its leaves are on several": lambda: (
        raises(kc.DeviceError, LAST, kc.device_of, [*kc.replicate(1.0, TWO)])
    ),
    "name and memory of a device; memory growth": lambda: (
        len(LAST.name) > 0 and (LAST.memory is None or LAST.memory > 0)
    ),
    "make a device the current one": lambda: (
        on_device(LAST, lambda: kc.device_of(tf.zeros([]) + 1.0)) == LAST
    ),
    "choose the float type when values are moved": lambda: (
        kc.to_device(np.ones(2, "float16"), LAST).dtype == tf.float16
    ),
    "a preferred backend; AMD, Metal, oneAPI": lambda: (
        {device.kind for device in kc.list_devices()} <= {"GPU", "CPU"}
    ),
    "one GPU per rank, in turn or from a list": lambda: (
        deal(["0", "1", "2", "3"], 2, None) == ["0,1", "2,3"]
    ),
    # Processes and hosts
    "initialize, rank, workers": lambda: (
        (kc.initialize(), kc.process_index(), kc.process_count())
        == (None, 0, 1)
    ),
    "MPI and NCCL backends, GPU-aware MPI": lambda: have(
        kc.allreduce("sum", *kc.replicate(np.ones(2), TWO)), [2, 2], [2, 2]
    ),
    "each worker trains on its own part of the data": of_a_part,
    "an error for an unsuitable launcher": lambda: raises(
        kc.ClusterError, "index", kc.initialize, ["a:1", "b:1"]
    ),
    "exchange gradients through channels to a main process": lambda: have(
        kc.reduce("mean", [1.0, 2.0], [3.0, 4.0]), [2, 3], [3, 4]
    ),
    "shard a model over a mesh": in_parts,
    # Logging
    "print with time and rank, in rank order": lambda: (
        [*zip(two(1, 2).devices, two(1, 2), strict=True)]
        == [(FIRST, 1), (LAST, 2)]
    ),
    "only rank 0 writes": lambda: kc.process_index() == 0,
    "a periodic loss and top-k accuracy, any logger": lambda: (
        "loss" in (trained().folder / "log.csv").read_text()
    ),
    "the same with MLflow, Weights & Biases, TensorBoard; how fast training "
    "is": lambda: trained().logs["samples_per_second"][0] > 0,
    "an average over workers": lambda: of_metric(1.0, 3.0) == 2,
    # Saving
    "move to the CPU, then save": is_saved,
    "periodic checkpoints, the best model, resuming": lambda: (
        (trained().folder / "best.keras").exists() and is_resumed()
    ),
    # Diagnostics
    "check that all replicas are equal": lambda: (
        not kc.in_sync(apart())
        and raises(
            kc.ReplicaMismatchError,
            "replica 1",
            kc.assert_in_sync,
            two(1.0, 2.0),
        )
    ),
    "check for NaN": lambda: raises(
        FloatingPointError,
        "['w']",
        kc.assert_finite,
        {"w": np.nan},
    ),
    "statistics of a tree": lambda: (
        kc.statistics({"w": np.array([1.0, 3.0])})[0].mean == 2
    ),
    "top-k accuracy, showing predictions": lambda: (
        have(keras.ops.top_k(np.array([1.0, 3.0, 2.0]), 2), [3, 2], [1, 2])
        and trained().many.predict(X, verbose=0).shape == (64, 1)
    ),
    "a warning if there is only one worker": lambda: (
        have(kc.replicate(1.0, [FIRST]), 1) and len(kc.devices()) > 1
    ),
    "an error before initialization": lambda: raises(
        kc.StrategyError, "withdevices", kc.replica
    ),
    "library versions": lambda: (
        len(kc.__version__) > 0
        and "is_cuda_build" in tf.sysconfig.get_build_info()
    ),
}
