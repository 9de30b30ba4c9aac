"""Programs that run on one device, or on the devices of several processes.

Each returns arrays. `replicate` is given models, and gives them back.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import time
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from addresses import address_outside
from keras import layers
from models import COMPILED
from models import assert_same_outcome
from models import assert_same_training
from models import dense
from models import outcome
from models import regression

import keras_conflux as kc
from keras_conflux._compat import patching
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux._fit.input import epoch_iterator
from keras_conflux._fit.input import execution_plan
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.step_groups import StepGroups
from keras_conflux._fit.input.steps_per_execution import StepsPerExecution
from keras_conflux._replication import model_options
from keras_conflux._replication import synchronization

X, Y = regression(61)
WEIGHTS = np.random.default_rng(1).uniform(0.2, 2, 61).astype("float32")


def fitted(model, x=X, y=Y, **options):
    """Trains, evaluates and predicts, and returns all that it leaves."""
    options = {"batch_size": 16, "epochs": 2, "shuffle": False} | options
    history = model.fit(x, y, verbose=0, **options)
    shown = model.evaluate(X[:37], Y[:37], batch_size=16, verbose=0)
    found = outcome(model, history) | {"evaluated": np.ravel(shown)}
    for samples in (35, 1):
        predicted = model.predict(X[:samples], batch_size=16, verbose=0)
        found[f"predicted {samples}"] = predicted
    return found


def trained(model, x=X, y=Y, **options):
    """Trains; does as `fitted` does only if all tests are asked for."""
    if os.environ.get("CONFLUX_ALL_TESTS") == "1":
        return fitted(model, x, y, **options)
    options = {"batch_size": 16, "epochs": 2, "shuffle": False} | options
    return outcome(model, model.fit(x, y, verbose=0, **options))


def clipped(replicate):
    model = dense(keras.optimizers.Adam(0.01, global_clipnorm=0.1))
    return fitted(replicate(model))


def accumulated(replicate):
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)
    # Whole updates, as each process keeps its part of what is accumulated.
    return trained(replicate(dense(optimizer)), epochs=3)


def weighted(replicate):
    model = replicate(dense(keras.optimizers.SGD(0.01, momentum=0.9)))
    return trained(model, sample_weight=WEIGHTS, validation_data=(X[:9], Y[:9]))


def of_fewer_samples_than_processes(replicate):
    return fitted(replicate(dense()), X[:17], Y[:17])


def shuffled(replicate):
    return trained(replicate(dense()), shuffle=True)


def reshuffled(replicate):
    patching.begin()  # for plain Keras
    model = replicate(dense())
    model_options.choose(model, None, True, None)
    with epoch_iterator.reshuffling(True):  # on plain Keras, too
        return trained(model, shuffle=True)


def normalized(replicate):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", jit_compile=COMPILED)
    return fitted(replicate(model))


def from_generator(replicate):
    def batches():
        for begin in range(0, 61, 16):
            yield X[begin : begin + 16], Y[begin : begin + 16]

    model = replicate(dense())
    history = model.fit(batches(), steps_per_epoch=4, verbose=0)
    return outcome(model, history)


def with_unequal_weights(replicate):
    model = dense()
    if kc.process_index():
        model.set_weights([w + 1 for w in model.get_weights()])
    return trained(replicate(model))


class Contrastive(keras.Model):
    """Compares all samples with all, and returns values of many kinds."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [layers.Input((8,)), layers.Dense(6, "tanh"), layers.Dense(4)]
        )
        self.seen = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            rows = keras.ops.normalize(self(x), -1)
            logits = keras.ops.matmul(rows, keras.ops.transpose(rows))
            labels = keras.ops.arange(keras.ops.shape(x)[0])
            loss = keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels, 5 * logits, from_logits=True
                )
            )
        weights = self.encoder.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return {
            "loss": loss,
            "sum": keras.ops.sum(y),
            "largest": keras.ops.max(x),
            "mean": keras.ops.mean(y),
        }


def own_step(replicate):
    keras.utils.set_random_seed(1)
    model = Contrastive()
    model.compile("sgd", jit_compile=COMPILED)
    replicate(model)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    return outcome(model, model.fit(data, epochs=2, verbose=0))


def eagerly(replicate):
    keras.utils.set_random_seed(1)
    inner = [layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(1)]
    first = layers.Dense(6, use_bias=False)
    model = keras.Sequential([layers.Input((8,)), first, *inner])
    model.compile(
        "adam",
        lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)),
        metrics=[lambda y, p: np.abs(np.asarray(y) - np.asarray(p))],
        run_eagerly=True,
    )
    replicate(model)
    return fitted(model)


def single_batches(replicate):
    model = replicate(dense())
    logs = [
        model.train_on_batch(X[i : i + 16], Y[i : i + 16])
        for i in range(0, 61, 16)
    ]
    model.reset_metrics()
    logs.append(model.test_on_batch(X[:9], Y[:9]))
    results = [float(value) for value in model.get_metrics_result().values()]
    predicted = model.predict_on_batch(X[:9])
    found = {"logs": np.ravel(logs), "results": np.ravel(results)}
    return outcome(model) | found | {"predicted": predicted}


def own_loop(replicate):
    model = replicate(dense())
    optimizer = replicate(keras.optimizers.Adam(0.01))

    def step(x, y, samples):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum((model(x) - y) ** 2)
        weights = model.trainable_variables
        gradients = tape.gradient(total, weights)
        gradients = [gradient / samples for gradient in gradients]
        if replicate is kc.replicate:
            gradients = kc.allreduce("sum", gradients)
            total = kc.allreduce("sum", total)
        optimizer.apply(gradients, weights)
        return total

    losses = []
    for i in range(0, 61, 16):
        x, y = X[i : i + 16], Y[i : i + 16]
        if replicate is kc.replicate:
            parts = kc.split((x, y))
            losses.append(kc.withdevices(step)(*parts, float(len(x)))[0])
        else:
            losses.append(step(x, y, float(len(x))))
    return outcome(model) | {"losses": np.array([float(x) for x in losses])}


def strategy_of(replicate):
    """Returns a strategy, or the one of TensorFlow's that does nothing."""
    is_ours = replicate is kc.replicate
    return kc.replicate() if is_ours else tf.distribute.get_strategy()


def tutorial(replicate):
    """The loop of TensorFlow's tutorials."""
    strategy = strategy_of(replicate)
    with strategy.scope():
        model = dense()
        optimizer = keras.optimizers.Adam(0.01)
        error = keras.metrics.MeanAbsoluteError()

    def step(x, y):
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            losses = tf.reduce_sum((predicted - y) ** 2, 1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        error.update_state(y, predicted)
        return loss

    @tf.function
    def run(batch):
        losses = strategy.run(step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    @tf.function
    def run_all(batches):
        for batch in batches:
            strategy.run(step, args=batch)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    batches = strategy.experimental_distribute_dataset(data)
    losses = [float(run(batch)) for batch in batches]
    errors = [float(error.result())]
    error.reset_state()
    run_all(batches)
    errors.append(float(error.result()))
    found = {"losses": np.array(losses), "errors": np.array(errors)}
    return outcome(model) | found


def adversarial(replicate):
    """A generator and a discriminator, each with an optimizer."""
    strategy = strategy_of(replicate)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        generator = keras.Sequential(
            [layers.Input((3,)), layers.Dense(8, "tanh")]
        )
        discriminator = keras.Sequential(
            [layers.Input((8,)), layers.Dense(4, "tanh"), layers.Dense(1)]
        )
        optimizers = [keras.optimizers.Adam(0.01) for _ in range(2)]
        mean = keras.metrics.Mean()

    def cross_entropy(ones, logits):
        losses = tf.nn.sigmoid_cross_entropy_with_logits(
            tf.fill(tf.shape(logits), ones), logits
        )
        return tf.nn.compute_average_loss(losses[:, 0], global_batch_size=16)

    def step(noise, x):
        with tf.GradientTape(persistent=True) as tape:
            generated = discriminator(generator(noise))
            fooled = cross_entropy(1.0, generated)
            told = cross_entropy(1.0, discriminator(x))
            told += cross_entropy(0.0, generated)
        for model, optimizer, loss in zip(
            (generator, discriminator), optimizers, (fooled, told), strict=True
        ):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        mean.update_state(generated)

    @tf.function
    def run(batch):
        strategy.run(step, args=batch)

    noise = np.random.default_rng(2).normal(size=(61, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((noise, X)).batch(16)
    for batch in strategy.experimental_distribute_dataset(data):
        run(batch)
    weights = [*generator.get_weights(), *discriminator.get_weights()]
    found = {f"weight {i}": weight for i, weight in enumerate(weights)}
    return found | {"mean": np.array(float(mean.result()))}


def counted(replicate):
    """Metrics that a loop with `withdevices`, `fit` and a loss update."""
    seen = keras.metrics.Mean()

    def loss(y, p):
        errors = keras.ops.square(y - p)
        seen.update_state(errors)
        return errors * (1 + 0.01 * seen.result())

    model = replicate(dense(loss=loss, steps_per_execution=2))
    mean = replicate(keras.metrics.Mean())
    found = []

    def step(x):
        mean.update_state(model(x))

    for i in range(0, 61, 16):
        if replicate is kc.replicate:
            kc.withdevices(step)(kc.split(X[i : i + 16]))
        else:
            step(X[i : i + 16])
        found.append(float(mean.result()))
    mean.reset_state()
    found.append(float(mean.result()))
    result = trained(model) | {"means": np.array(found)}
    return result | {"seen": seen.result().numpy()}


def under_a_distribution(replicate):
    if replicate is not kc.replicate:
        return fitted(dense())
    with keras.distribution.DataParallel().scope():
        return fitted(dense())


def with_random_numbers(replicate):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Dropout(0.3),
            keras.layers.Dense(7),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", jit_compile=COMPILED)
    return fitted(replicate(model))


def wide(optimizer):
    """Makes a model of which devices may keep a part of a kernel."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(80, "tanh"),
            layers.Dropout(0.2),
            layers.Dense(60),
            layers.Dense(1),
        ]
    )
    options = {"metrics": ["mae"], "jit_compile": COMPILED}
    model.compile(optimizer, "mse", **options)
    return model


def _in_parts(replicate, shard, optimizer):
    model = wide(optimizer)
    if replicate is kc.replicate:
        kc.replicate(model, shard=shard)
    return fitted(model)


def optimizer_in_parts(replicate):
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True)
    return _in_parts(replicate, "optimizer", optimizer)


def weights_in_parts(replicate):
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    return _in_parts(replicate, "weights", optimizer)


def in_turns(replicate):
    model = wide(keras.optimizers.SGD(0.05, global_clipnorm=0.1))
    if replicate is kc.replicate:
        kc.replicate(model, microbatches=3)
    return fitted(model)


CASES = {
    case.__name__: case
    for case in (
        clipped,
        accumulated,
        of_fewer_samples_than_processes,
        normalized,
        own_step,
        eagerly,
        with_random_numbers,
        tutorial,
        adversarial,
        counted,
        optimizer_in_parts,
        weights_in_parts,
        in_turns,
    )
}
MORE_CASES = {
    case.__name__: case
    for case in (
        weighted,
        shuffled,
        from_generator,
        reshuffled,
        single_batches,
        own_loop,
        under_a_distribution,
        with_unequal_weights,
    )
}


# What follows runs in processes only.


def in_sync_sees_other_processes(directory):
    model = kc.replicate(dense())
    model.fit(X[:16], Y[:16], verbose=0)
    assert kc.in_sync(model)
    if kc.process_index() == 1:
        bias = model.layers[-1].bias
        bias.assign(bias + 1)
    assert not kc.in_sync(model)
    kc.synchronize(model, root=0)
    kc.assert_in_sync(model)
    with kc.replicate().scope():
        average = tf.Variable(1.0)
    average.values[-1].assign(kc.process_index())
    assert not kc.in_sync([average])
    kc.synchronize([average], root=0)
    kc.assert_in_sync([average])


def collectives_mean_all_replicas(directory):
    @kc.withdevices
    def reduce():
        this = kc.replica()
        mine = tf.constant(float(this.index + 1))
        last = this.count - 1
        found = {op: kc.allreduce(op, mine) for op in OPS}
        found["last"] = kc.broadcast(mine, root=last)
        found["reduced"] = kc.reduce("sum", mine, root=last)
        found["rows"] = kc.allgather(tf.fill([this.index + 1], mine))
        shapes = 3 * [(2, 3), (3, 2), (6,)]  # whose keys take turns
        for shape in shapes:
            kc.allreduce("sum", tf.fill(shape, mine))
        return found

    results = reduce()
    count = kc.process_count() * len(results)
    numbers = np.arange(1, count + 1, dtype="float32")
    for position, found in enumerate(results):
        rank = kc.process_index() * len(results) + position
        assert found["sum"] == numbers.sum()
        assert found["mean"] == numbers.mean()
        assert found["product"] == numbers.prod()
        assert found["min"] == 1
        assert found["max"] == count
        assert found["last"] == count
        is_root = rank == count - 1
        assert found["reduced"] == (numbers.sum() if is_root else rank + 1)
        rows = np.repeat(numbers, range(1, count + 1))
        np.testing.assert_array_equal(found["rows"], rows)


OPS = ("sum", "mean", "product", "min", "max")


def number_of_replica():
    """What each replica has: 1, 2 and so on, over all processes."""
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32) + 1


def strategies_reduce_all_replicas(directory):
    strategy = kc.replicate()
    here, count = len(strategy.devices), strategy.num_replicas_in_sync
    assert count == here * kc.process_count()
    total = count * (count + 1) / 2
    first = kc.process_index() * here

    def local(value):
        found = strategy.experimental_local_results(value)
        return [np.asarray(each).tolist() for each in found]

    numbers = strategy.run(number_of_replica)
    assert local(numbers) == [first + i + 1 for i in range(here)]
    made = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(context.replica_id_in_sync_group + 1.0)
    )
    assert local(made) == local(numbers)
    with strategy.scope():
        variable = tf.Variable(0.0)
    extended = strategy.extended
    pairs = [(numbers, variable), (numbers, numbers)]

    def reduced():
        sums = extended.batch_reduce_to("SUM", pairs)
        sums.append(extended.reduce_to("SUM", numbers, destinations=variable))
        found = [
            strategy.reduce(op, numbers, axis=None) for op in ("SUM", "MEAN")
        ]
        return found, [*map(strategy.experimental_local_results, sums)]

    for run in (reduced, tf.function(reduced)):
        (found, mean), sums = run()
        assert (float(found), float(mean)) == (total, total / count)
        assert np.asarray(sums).tolist() == [[total] * here] * 3
    rows = strategy.run(
        lambda: tf.fill([tf.cast(number_of_replica(), tf.int32)], 1.0)
    )
    assert len(strategy.gather(rows, axis=0)) == total
    means = strategy.run(lambda: tf.range(number_of_replica()))
    largest = strategy.reduce("SUM", means, axis=0)
    assert float(largest) == sum(i * (i + 1) / 2 for i in range(count))
    process = tf.constant(float(kc.process_index()))
    mean = strategy.reduce("MEAN", process, axis=None)
    assert float(mean) == (kc.process_count() - 1) / 2
    reduced = kc.allreduce("max", numbers)
    assert float(reduced[0]) == count

    with pytest.raises(NotImplementedError, match="Debug in one process"):
        strategy.run(lambda: kc.allreduce("sum", 1.0))


def strategies_sum_variables(directory):
    strategy = kc.replicate()
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        summed = tf.Variable(
            1.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        first = tf.Variable(
            0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )

    @tf.function
    def count_all(times):
        for _ in tf.range(times):
            strategy.run(lambda: summed.assign_add(1.0))

    def add():
        summed.assign_add(1.0)
        first.assign(number_of_replica())

    assert float(summed.read_value()) == 1
    tf.function(lambda: strategy.run(add))()
    assert float(summed.read_value()) == 1 + count
    copies = strategy.experimental_local_results(first)
    assert [float(copy) for copy in copies] == [1.0] * len(copies)
    count_all(3)
    assert float(summed.read_value()) == 1 + 4 * count
    mine = str(directory / f"sum-{kc.process_index()}")
    saved = tf.train.Checkpoint(summed=summed).write(mine)
    if kc.process_index() == 0:  # reading needs no other process
        assert float(summed.read_value()) == 1 + 4 * count
    summed.assign(7.0)
    count_all(1)
    assert float(summed.read_value()) == 7 + count
    tf.train.Checkpoint(summed=summed).read(saved)
    assert float(summed.read_value()) == 1 + 4 * count
    count_all(1)
    assert float(summed.read_value()) == 1 + 5 * count
    with pytest.raises(NotImplementedError, match="add up nothing"):
        strategy.run(lambda: summed.assign_add(1.0))


def strategies_read_data(directory):
    strategy = kc.replicate()
    here, count = len(strategy.devices), strategy.num_replicas_in_sync

    def rows(batches):
        found = strategy.experimental_local_results
        return [[np.asarray(x).tolist() for x in found(b)] for b in batches]

    data = tf.data.Dataset.range(9).batch(8)  # the last one has a single row
    batches = strategy.experimental_distribute_dataset(data)
    first = kc.process_index() * here
    expected = [
        kc.shard(batch, count=1, index=0) for batch in data.as_numpy_iterator()
    ]
    parts = [np.array_split(batch, count) for batch in expected]
    parts = [
        [part.tolist() for part in each[first : first + here]] for each in parts
    ]
    assert rows(batches) == parts
    seen = []

    def own(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(8 * count)
        index = context.input_pipeline_id
        return (
            tf.data.Dataset.range(16 * here * (index + 1)).batch(size).take(2)
        )

    batches = strategy.distribute_datasets_from_function(own)
    assert len(rows(batches)) == 2 // here or here > 2
    (context,) = seen
    assert context.num_input_pipelines == kc.process_count()
    assert context.input_pipeline_id == kc.process_index()
    assert context.num_replicas_in_sync == count
    with pytest.raises(kc.ReplicaMismatchError, match=r"take\(3\)"):
        strategy.distribute_datasets_from_function(
            lambda _: tf.data.Dataset.range(3 + kc.process_index())
        )
    policies = tf.data.experimental.AutoShardPolicy

    def distributed(policy, data):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        data = data.with_options(options)
        return strategy.experimental_distribute_dataset(data)

    # Each process has all of its own data, in parts of the usual size.
    data = tf.data.Dataset.range(2 * count).map(lambda i: i + first)
    parts = rows(distributed(policies.OFF, data.batch(2 * count)))
    every = first + np.arange(2 * count).reshape(-1, here, 2)
    assert parts == every.tolist()
    for policy in (policies.FILE, policies.HINT):
        with pytest.raises(NotImplementedError, match="from_function"):
            distributed(policy, data)


def files_are_written_once(directory):
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)
    model = kc.replicate(dense(optimizer))
    mine = directory / f"of-{kc.process_index()}"
    model.fit(
        X,
        Y,
        batch_size=16,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[
            keras.callbacks.CSVLogger(mine.with_suffix(".csv")),
            keras.callbacks.ModelCheckpoint(mine.with_suffix(".keras")),
            keras.callbacks.BackupAndRestore(mine.with_suffix(".backup")),
        ],
    )
    model.save(mine.with_suffix(".saved.keras"))
    model.save_weights(mine.with_suffix(".weights.h5"))
    model.export(mine.with_suffix(".exported"), verbose=False)
    keras.saving.save_model(model, mine.with_suffix(".1.keras"))
    keras.models.save_model(model, mine.with_suffix(".2.keras"))
    keras.saving.save_weights(model, mine.with_suffix(".3.weights.h5"))
    kc.barrier()
    found = sorted(path.name for path in directory.glob("of-*"))
    expected = ["1.keras", "2.keras", "3.weights.h5", "csv", "exported"]
    expected += ["keras", "saved.keras", "weights.h5"]
    assert found == [f"of-0.{name}" for name in expected], found
    # Two of three gradients have been accumulated, by all replicas.
    loaded = keras.saving.load_model(directory / "of-0.saved.keras")
    alone = dense(keras.optimizers.SGD(0.01, gradient_accumulation_steps=3))
    alone.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    assert_same_training(alone, loaded)
    # Training goes on from there, on all processes and on one device.
    loaded = kc.replicate(loaded)
    model.load_weights(directory / "of-0.weights.h5")
    for each in (model, loaded, alone):
        each.fit(X, Y, batch_size=16, epochs=1, verbose=0, shuffle=False)
        kc.unreplicate(each)
    assert_same_training(alone, loaded)
    assert_same_training(alone, model)


def whole_state(model):
    found = [*model.weights, *model.optimizer.variables]
    return [x.numpy() for x in found if x.dtype == "float32"]


def parts_are_saved_whole(directory):
    """All processes read a weight together, or the first one for a file."""

    def made(shard="weights"):
        model = wide(keras.optimizers.Adam(0.01))
        if shard is not None:
            kc.replicate(model, shard=shard)
        model.optimizer.build(model.trainable_variables)
        return model

    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model = made()
    resume = kc.Resume(directory / "resumed")
    model.fit(X, Y, epochs=2, callbacks=[resume], **options)
    state = whole_state(model)
    value = model.layers[2].kernel.value
    assert {x.shape for x in value.values} == {(4800 // value.layout.count,)}
    model.save(directory / "parts.keras")
    kc.save(model, directory / "saved", step=1)
    one = made(shard=None)
    (saved,) = kc.checkpoints(directory / "saved")
    one.load_weights(saved.path / checkpoint_files.WEIGHTS)
    found = keras.models.load_model(directory / "parts.keras")
    others = [one, found]
    for shard in ("weights", "optimizer"):
        others.append(made(shard))
        others[-1].layers[2].kernel.assign(np.ones([80, 60]))
        kc.load(others[-1], directory / "saved")
    for other in others:
        assert len(state) == len(whole_state(other))
        for a, b in zip(state, whole_state(other), strict=True):
            np.testing.assert_array_equal(a, b)
    again = made("optimizer")
    resume = kc.Resume(directory / "resumed")
    again.fit(X, Y, epochs=3, callbacks=[resume], **options)
    model.fit(X, Y, epochs=3, initial_epoch=2, **options)
    for a, b in zip(whole_state(model), whole_state(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    kc.unreplicate(model)
    assert model.layers[2].kernel.shape == (80, 60)


class Made(layers.Layer):
    """Has a layer that Keras cannot see before it asks for shapes."""

    def build(self, shape):
        self.inner = layers.Dense(600)
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


class Late(keras.metrics.Metric):
    """Makes its weight where a step updates it."""

    total = None

    def update_state(self, values):
        if self.total is None:
            self.total = self.add_weight((), "ones", name="total")
        self.total.assign_add(tf.reduce_sum(tf.abs(values)))

    def result(self):
        return self.total


class Steps(keras.Sequential):
    def train_step(self, data):
        self.late.update_state(data[0])
        return super().train_step(data) | {"late": self.late.result()}


def what_steps_make_is_saved(directory):
    """Layers and metrics that Keras makes while a trace, or shapes, ask."""

    def made(strategy=None):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = Steps([layers.Input((8,)), Made(), layers.Dense(1)])
            model.late = Late(name="late")
        model.compile("sgd", "mse", jit_compile=COMPILED)
        return model

    alone = made()
    expected = fitted(alone)
    for shard in (None, "weights"):
        model = made(kc.replicate(shard=shard))
        resume = kc.Resume(directory / f"made-{shard}", every=2)
        assert_same_outcome(expected, fitted(model, callbacks=[resume]))
        kc.unreplicate(model)


def the_same_rows_in_all_processes_are_named(directory):
    model = kc.replicate(dense(), data="local")
    with pytest.warns(kc.ConfluxWarning, match="bring the same rows"):
        model.fit(X, Y, batch_size=16, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        model.fit(kc.shard(X), kc.shard(Y), batch_size=16, verbose=0)
        model.predict(X, verbose=0)


def a_model_without_replicas_is_named(directory):
    model = dense()
    with pytest.warns(kc.ConfluxWarning, match="a model of its own"):
        model.train_on_batch(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        model.fit(X, Y, verbose=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        model.save(directory / f"of-{kc.process_index()}.keras")
    told = [str(x.message) for x in caught if "write the same" in str(x)]
    assert len(told) == min(kc.process_index(), 1)
    kc.replicate(model)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X))
    gradients = tape.gradient(loss, model.trainable_variables)
    with pytest.warns(kc.ConfluxWarning, match="one device computes"):
        model.optimizer.apply(gradients, model.trainable_variables)
    kc.assert_in_sync(model)


def means_over_samples_are_not_warned_of(directory):
    """Replicas of a process may have as many, and others fewer."""
    mean = kc.withdevices(
        lambda x: kc.allreduce("mean", tf.reduce_mean(x), weight=len(x))
    )
    here = len(kc.split(X))
    x = X[: 4 * here * kc.process_count() + here]
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        found = mean(kc.split(x))
    np.testing.assert_allclose(found[0], x.mean(), rtol=1e-5)


def loops_are_saved(directory):
    model = kc.replicate(dense())
    np.random.seed(kc.process_index())
    kc.save(model, directory / "loop", step=1)
    expected = np.random.random(3)
    np.random.seed(9)
    kc.load(model, directory / "loop")
    np.testing.assert_array_equal(np.random.random(3), expected)
    with pytest.raises(ValueError, match="another model"):
        kc.save(dense(), directory / "loop", step=2)
    kc.save(model, directory / "loop", step=2)


def lists_of_callbacks_write_once(directory):
    model = kc.replicate(dense())
    log = directory / f"listed-{kc.process_index()}.csv"
    epochs = []
    begun = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch)
    )
    callbacks = keras.callbacks.CallbackList(
        [keras.callbacks.CSVLogger(log), begun],
        add_history=True,
        model=model,
    )
    fitted(model, epochs=2, callbacks=callbacks)
    kc.barrier()
    assert [each.name for each in directory.glob("listed-*")] == [
        "listed-0.csv"
    ]
    assert epochs == [0, 1]
    before = [each for each in callbacks.callbacks if each is begun]
    fitted(model, epochs=1, callbacks=callbacks)
    assert [each for each in callbacks.callbacks if each is begun] == before


def throughput_is_that_of_the_slowest(directory):
    def wait(*_, **__):
        time.sleep(0.1 * kc.process_index())

    model = kc.replicate(dense())
    history = model.fit(
        X,
        Y,
        batch_size=16,
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(on_train_batch_end=wait),
            kc.Throughput(),
        ],
    ).history
    found = np.array([history[key] for key in sorted(history)])
    np.save(directory / f"speed-{kc.process_index()}.npy", found)
    kc.barrier()
    for index in range(kc.process_count()):
        other = np.load(directory / f"speed-{index}.npy")
        assert other.tobytes() == found.tobytes()
    assert history["step_ms"][1] > 100 * (kc.process_count() - 1)


def executions_have_one_length(directory):
    """Where processes measure different times."""
    of_fit, note = ExecutionPlan.of_fit, StepsPerExecution.note_execution
    next_batches = StepGroups._next_batches
    lengths = []

    def choosing(*arguments):  # on CPUs no plan does
        return dataclasses.replace(of_fit(*arguments), chooses_steps=True)

    def slower(self, steps, seconds):
        lengths.append(steps)
        # Process 1 would run four steps at most, the others many. After the
        # last execution of an epoch, it would run one.
        seconds = (3.0 if len(lengths) == 10 else 0.9) * steps
        note(self, steps, seconds if kc.process_index() == 1 else 1e-3)

    def late(*arguments):  # after the execution that it is to follow
        time.sleep(0.05)
        return next_batches(*arguments)

    with (
        mock.patch.object(ExecutionPlan, "of_fit", choosing),
        mock.patch.object(StepsPerExecution, "note_execution", slower),
        mock.patch.object(StepGroups, "_next_batches", late),
    ):
        many = kc.replicate(dense())
        options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
        got = outcome(many, many.fit(X, Y, **options))
    one = dense()
    expected = outcome(one, one.fit(X, Y, **options))
    assert_same_outcome(expected, got)
    assert lengths == [1, 1, 1, *[4] * 8, 1, *[4] * 6, 2], lengths


def processes_do_without_xla_together(directory):
    """Where XLA cannot compile a model."""
    cannot = tf.errors.InvalidArgumentError(
        None, None, "Detected unsupported operations when trying to compile"
    )
    # So that 2, 3 and 4 replicas have equal parts, which XLA compiles.
    options = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    one = dense()
    expected = outcome(one, one.fit(X, Y, **options))
    with (
        # On CPUs, nothing with several replicas is compiled.
        mock.patch.object(execution_plan, "compiles", return_value=True),
        mock.patch.object(XlaProgram, "__call__", side_effect=cannot),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        many = kc.replicate(dense())
        got = outcome(many, many.fit(X, Y, **options))
    assert_same_outcome(expected, got)
    told = [w for w in caught if "XLA cannot compile" in str(w.message)]
    assert len(told) == 1, caught


def parts_of_data(directory):
    mine = kc.shard(X, kc.process_index(), kc.process_count())
    np.testing.assert_array_equal(kc.shard(X), mine)
    assert len(mine) < len(X)


def trainings_are_resumed(directory):
    """By the files of the first process, whichever one gets the signal."""

    def trained(epochs, stops_at=None):
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
        model = kc.replicate(dense(optimizer))
        mine = directory / f"resumed-{kc.process_index()}"
        log = keras.callbacks.CSVLogger(directory / "resumed.csv")
        callbacks = [log, kc.Resume(mine, every="1h")]
        if stops_at is not None and kc.process_index() == 1:
            callbacks.append(Stopped(stops_at))
        else:
            callbacks.append(Stopped(None))
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, epochs=epochs, callbacks=callbacks, **options)
        return outcome(model, history)

    def slow(descriptor, fsync=os.fsync):
        time.sleep(0.1)
        fsync(descriptor)

    def saved():
        found = kc.checkpoints(directory / "resumed-0")
        return [(each.epoch, each.step) for each in found]

    for stops_at in (1, 3, 99):  # the last one is after all steps
        try:
            with mock.patch("os.fsync", slow):
                trained(3, stops_at)
        except SystemExit as stopped:
            assert stopped.code == 143  # noqa: PT017
        else:
            raise AssertionError
        # No process ends before all is written: a launcher would end others.
        seen = saved()
        kc.barrier()
        time.sleep(0.2)
        assert seen == saved()
        kc.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        got = trained(3)
    alone = dense(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3))
    history = alone.fit(X, Y, epochs=3, batch_size=16, shuffle=False, verbose=0)
    assert_same_outcome(got, outcome(alone, history))
    assert [each.name for each in directory.glob("resumed-*")] == ["resumed-0"]
    if kc.process_index() == 0:
        assert len((directory / "resumed.csv").read_text().split()) == 1 + 3


def parts_are_resumed(directory):
    """Each process draws its own part again, which may have ended before."""
    index = kc.process_index()

    def trained(*callbacks, data="local"):
        model = dense(keras.optimizers.Adam(0.01))
        np.random.seed(index)
        kc.replicate(model, data=data)
        options = {"epochs": 3, "verbose": 0, "callbacks": [*callbacks]}
        history = model.fit(Noisy(batches=4 + 2 * index), **options)
        return outcome(model, history)

    resume = kc.Resume(directory / f"parts-{index}", every="1h")
    expected = trained()
    # The part of the first process has 4 batches, and that of the last one 6 or
    # more. The third stop is in the epoch after.
    for stops_at, steps in ((1, 2), (2, 5), (3, 9)):
        try:
            trained(resume, Stopped(stops_at if index == 1 else None))
        except SystemExit as stopped:
            assert stopped.code == 143  # noqa: PT017
        else:
            raise AssertionError
        if index == 0:
            newest = kc.checkpoints(resume.directory)[0]
            assert newest.step == steps
    got = trained(resume, Stopped(None))
    assert resume.resumed_at == divmod(9, 2 + 2 * kc.process_count())
    assert_same_outcome(expected, got)
    if not tf.config.list_physical_devices("GPU"):  # some sum in any order
        # Names of layers count the models before.
        for (name, found), value in zip(
            got.items(), expected.values(), strict=True
        ):
            assert found.tobytes() == value.tobytes(), name
    try:
        trained(resume, Stopped(None), data="global")
    except ValueError as error:
        assert 'Without `data="local"`' in str(error)  # noqa: PT017
    else:
        raise AssertionError


class Noisy(keras.utils.PyDataset):
    """Batches of samples with noise from NumPy's own generator."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return self.batches

    def __getitem__(self, position):
        rows = slice(5 * position, 5 * position + 4 + position % 2)
        x = X[rows]
        noise = np.random.normal(size=x.shape).astype("float32")
        return x + noise, Y[rows]


class Stopped(keras.callbacks.Callback):
    """Sends its process a signal in a step of the call."""

    def __init__(self, step):
        super().__init__()
        self._steps = step

    def on_train_batch_end(self, batch, logs=None):
        if self._steps == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._steps is not None:
            self._steps -= 1

    def on_train_end(self, logs=None):
        if self._steps:
            os.kill(os.getpid(), signal.SIGTERM)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


def plain_variables_are_warned_of(directory):
    """Of a `tf.Variable` each process has one, and its replicas share it."""
    for sets_samples in (False, True):
        mine = tf.Variable(0.5, trainable=False)
        model = dense()
        model.add(Adds(mine, sets_samples))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kc.replicate(model).fit(X, Y, batch_size=16, verbose=0)
        told = any("`tf.Variable`" in str(each.message) for each in caught)
        assert told == (sets_samples or len(kc.devices()) > 1)

        def step(x, mine=mine, counts=not sets_samples):
            mine.assign_add(1 if counts else tf.reduce_mean(x))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kc.withdevices(step)(kc.split(X[:16]))
        told = any("of which a process has one" in str(x) for x in caught)
        assert told == (sets_samples or len(kc.devices()) > 1)


def weights_travel_in_parts(directory):
    """Each process begins with others, of sizes that parts do not divide."""
    layers = [keras.layers.Dense(units, name=f"d{units}") for units in (1, 7)]
    for layer in layers:
        layer.build((None, 11))
        start = 100 * kc.process_index()
        for variable in layer.weights:
            count = np.prod(variable.shape)
            numbers = np.arange(start, start + count, dtype="float32")
            variable.assign(numbers.reshape(variable.shape))
    kc.replicate(layers)
    before, synchronization.BYTES_AT_ONCE = synchronization.BYTES_AT_ONCE, 96
    try:
        kc.synchronize(layers, root=0)
    finally:
        synchronization.BYTES_AT_ONCE = before
    for layer in layers:
        for variable in layer.weights:
            expected = np.arange(np.prod(variable.shape))
            np.testing.assert_array_equal(np.ravel(variable), expected)
    kc.assert_in_sync(layers)


def sigterm_ends_them(directory):
    """Unless a training with `kc.Resume` runs."""
    told = pathlib.Path("/proc/self/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", told)[1], 16)
    assert not caught & 1 << (signal.SIGTERM - 1)


def ports_are_closed_to_other_hosts(directory):
    address = address_outside()
    task = json.loads(os.environ["TF_CONFIG"])
    index = kc.process_index()
    port = int(task["cluster"]["worker"][index].rpartition(":")[2])
    socket.create_connection(("localhost", port), 10).close()
    if address is not None:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), 10)


class Adds(keras.layers.Layer):
    """Adds one, or its samples, to a `tf.Variable`."""

    def __init__(self, mine, samples):
        super().__init__()
        self.mine = mine
        self.samples = samples

    def call(self, x):
        self.mine.assign_add(tf.reduce_sum(x) if self.samples else 1.0)
        return x


def collectives_keep_no_memory(directory):
    def resident_kilobytes():
        return 4 * int(pathlib.Path("/proc/self/statm").read_text().split()[1])

    for _ in range(300):
        kc.barrier()
    before = resident_kilobytes()
    for _ in range(3000):
        kc.barrier()
    # Each key that TensorFlow has not seen before takes 1 kB.
    assert resident_kilobytes() - before < 1000


MORE_CHECKS = {
    check.__name__: check
    for check in (collectives_keep_no_memory, parts_are_resumed)
}
CHECKS = {
    check.__name__: check
    for check in (
        in_sync_sees_other_processes,
        collectives_mean_all_replicas,
        strategies_reduce_all_replicas,
        strategies_sum_variables,
        strategies_read_data,
        files_are_written_once,
        parts_are_saved_whole,
        means_over_samples_are_not_warned_of,
        loops_are_saved,
        lists_of_callbacks_write_once,
        throughput_is_that_of_the_slowest,
        executions_have_one_length,
        processes_do_without_xla_together,
        parts_of_data,
        trainings_are_resumed,
        plain_variables_are_warned_of,
        the_same_rows_in_all_processes_are_named,
        a_model_without_replicas_is_named,
        what_steps_make_is_saved,
        sigterm_ends_them,
        ports_are_closed_to_other_hosts,
        weights_travel_in_parts,
    )
}
