"""Public functions refuse arguments that make no sense, and say what to pass.

The table has a row for each argument of a public function that could be of the
wrong type, empty, negative or not a number.
"""

import pathlib
import traceback

import keras
import numpy as np
import pytest

import keras_conflux as kc

PACKAGE = pathlib.Path(kc.__file__).parent
NAN, INF = float("nan"), float("inf")
THING = object()
NO_NUMBERS = ("x", "", [], {}, b"1", THING)
NO_COUNTS = (*NO_NUMBERS, None, -1, NAN, 2.5, INF, True)
NO_SECONDS = (*NO_NUMBERS, None, -1, 0, NAN, True)
NO_DATA = (3, 2.5, None, "", THING)
NO_DIRECTORIES = (5, None, "", b"x", NAN, [], THING)
NO_DEVICES = (-1, 2.5, NAN, "", "x", [""], [None], {}, [-1], THING)
NO_MODELS = (None, "", 3, NAN, THING)
NO_FUNCTIONS = ("", 3, NAN, [], THING)
NO_SIGNALS = (
    *("SIGTERM", 5, None, (15,), ("",), ("sigterm",), ("signal",)),
    *(("SIGKILL",), ("SIGSTOP",), ("SIG_DFL",), ("SIG_BLOCK",)),
)
X = np.ones((4, 3), "float32")


@pytest.fixture(scope="module")
def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    made.optimizer.build(made.trainable_variables)
    return kc.replicate(made, devices=1)


def nothing():
    return 1


# What is called, and with which values instead of an argument; `model` is a
# model, and `new` a directory.
CALLS = {
    "Resume(directory)": (lambda v, **_: kc.Resume(v), NO_DIRECTORIES),
    "Resume(every)": (
        lambda v, new, **_: kc.Resume(new, every=v),
        (*NO_COUNTS, 0, "10", "m", "-1s", "1d"),
    ),
    "Resume(keep)": (
        lambda v, new, **_: kc.Resume(new, keep=v),
        (*NO_COUNTS, 0, "2"),
    ),
    "Resume(signals)": (
        lambda v, new, **_: kc.Resume(new, signals=v),
        NO_SIGNALS,
    ),
    "save(model)": (lambda v, new, **_: kc.save(v, new, step=1), NO_MODELS),
    "save(directory)": (
        lambda v, model, **_: kc.save(model, v, step=1),
        NO_DIRECTORIES,
    ),
    "save(step)": (
        lambda v, model, new, **_: kc.save(model, new, step=v),
        NO_COUNTS,
    ),
    "save(keep)": (
        lambda v, model, new, **_: kc.save(model, new, step=1, keep=v),
        (*NO_COUNTS, 0),
    ),
    "load(model)": (lambda v, new, **_: kc.load(v, new), NO_MODELS),
    "load(directory)": (
        lambda v, model, **_: kc.load(model, v),
        NO_DIRECTORIES,
    ),
    "checkpoints": (lambda v, **_: kc.checkpoints(v), NO_DIRECTORIES),
    "distribute(dataset)": (lambda v, **_: kc.distribute(v), NO_DATA),
    "distribute(devices)": (lambda v, **_: kc.distribute([X], v), NO_DEVICES),
    "distribute(ahead)": (
        lambda v, **_: kc.distribute([X], ahead=v),
        NO_COUNTS,
    ),
    "prefetch(batches)": (lambda v, **_: kc.prefetch(v, 0), NO_DATA),
    "prefetch(device)": (
        lambda v, **_: kc.prefetch([X], v),
        (None, -1, 2.5, NAN, "", "x", [], THING),
    ),
    "prefetch(ahead)": (
        lambda v, **_: kc.prefetch([X], 0, ahead=v),
        (*NO_COUNTS, 0),
    ),
    "split(batch)": (lambda v, **_: kc.split(v), (3, 2.5, "")),
    "split(devices)": (lambda v, **_: kc.split(X, v), NO_DEVICES),
    "shard(samples)": (lambda v, **_: kc.shard(v), (3, None, "", THING)),
    "shard(index)": (
        lambda v, **_: kc.shard(X, v, 2),
        (*(v for v in NO_COUNTS if v is not None), 2),
    ),
    "shard(count)": (
        lambda v, **_: kc.shard(X, 0, v),
        (*(v for v in NO_COUNTS if v is not None), 0),
    ),
    "devices": (lambda v, **_: kc.devices(v), NO_DEVICES),
    "claim": (lambda v, **_: kc.claim(v), NO_DEVICES),
    "replicate(model)": (lambda v, **_: kc.replicate(v), ("", "x", 3)),
    "replicate(devices)": (
        lambda v, model, **_: kc.replicate(model, devices=v),
        NO_DEVICES,
    ),
    "replicate(data)": (
        lambda v, model, **_: kc.replicate(model, data=v),
        ("", "x", 3, NAN),
    ),
    "replicate(microbatches)": (
        lambda v, model, **_: kc.replicate(model, microbatches=v),
        (*(v for v in NO_COUNTS if v is not None), 0),
    ),
    "unreplicate": (lambda v, **_: kc.unreplicate(v), (*NO_MODELS, [])),
    "memory(model)": (lambda v, **_: kc.memory(v), (*NO_MODELS, [])),
    "memory(batch)": (
        lambda v, model, **_: kc.memory(model, v),
        ("x", 3, NAN, THING, [3], (np.ones(3), "y")),
    ),
    "memory(devices)": (
        lambda v, model, **_: kc.memory(model, devices=v),
        (*(x for x in NO_COUNTS if x is not None), 0),
    ),
    "devices_of": (lambda v, **_: kc.devices_of(v), (*NO_MODELS, [])),
    "synchronize": (lambda v, **_: kc.synchronize(v), NO_MODELS),
    "in_sync": (lambda v, **_: kc.in_sync(v), NO_MODELS),
    "assert_in_sync": (lambda v, **_: kc.assert_in_sync(v), NO_MODELS),
    "synchronize_batch_norm": (
        lambda v, **_: kc.synchronize_batch_norm(v),
        NO_MODELS,
    ),
    "withdevices(fn)": (lambda v, **_: kc.withdevices(v), NO_FUNCTIONS),
    "withdevices(devices)": (
        lambda v, **_: kc.withdevices(nothing, devices=v)(),
        NO_DEVICES,
    ),
    "skip_out_of_memory(fn)": (
        lambda v, **_: kc.skip_out_of_memory(v),
        NO_FUNCTIONS,
    ),
    "barrier": (lambda v, **_: kc.barrier(v), NO_SECONDS),
    "to_device(device)": (
        lambda v, **_: kc.to_device(X, v),
        (None, -1, 2.5, NAN, "", "x", [], THING),
    ),
    "statistics": (lambda v, **_: kc.statistics(v), ("", THING)),
    "assert_finite": (lambda v, **_: kc.assert_finite(v), (THING,)),
    "initialize(addresses)": (
        lambda v, **_: kc.initialize(v, 0),
        (5, "", [], [5], NAN, ["x"], [""], ["a:0"], THING),
    ),
    "initialize(index)": (
        lambda v, **_: kc.initialize(["localhost:1"], v),
        (*(v for v in NO_COUNTS if v is not None), 1),
    ),
    "initialize(heartbeat)": (
        lambda v, **_: kc.initialize(["localhost:1"], 0, heartbeat=v),
        NO_SECONDS,
    ),
    "initialize(timeout)": (
        lambda v, **_: kc.initialize(["localhost:1"], 0, timeout=v),
        NO_SECONDS,
    ),
    "Throughput(keys)": (
        lambda v, **_: kc.Throughput(v),
        (3, "", "x", NAN, THING),
    ),
}
IN_A_STEP = {
    "allreduce(op)": (
        lambda v: kc.allreduce(v, 1.0),
        (None, "", 3, NAN, "summ"),
    ),
    "allreduce(x)": (lambda v: kc.allreduce("sum", v), ("", THING)),
    "reduce(op)": (lambda v: kc.reduce(v, 1.0), (None, "", 3, NAN, "summ")),
    "reduce(root)": (
        lambda v: kc.reduce("sum", 1.0, root=v),
        (None, "", NAN, 2.5, -1, 9),
    ),
    "broadcast(root)": (
        lambda v: kc.broadcast(1.0, root=v),
        (None, "", NAN, 2.5, -1, 9),
    ),
    "allgather(axis)": (
        lambda v: kc.allgather(X, axis=v),
        ("", None, NAN, 2.5, 9, -3),
    ),
}
# They take any value, as a leaf of a tree, or no arguments, or are no calls
# that a user makes.
WITHOUT = {
    *("allreduce", "reduce", "broadcast", "allgather", "replica"),
    *("device_of", "to_cpu", "list_devices"),
    *("process_index", "process_count"),
}


def cases(calls):
    return [
        pytest.param(call, value, id=f"{name}-{str(value)[:20]!r}")
        for name, (call, values) in calls.items()
        for value in values
    ]


@pytest.mark.parametrize(("call", "value"), cases(CALLS))
def test_an_argument_that_makes_no_sense(call, value, model, tmp_path):
    with pytest.raises((TypeError, ValueError, kc.ConfluxError)) as caught:
        call(value, model=model, new=tmp_path)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert PACKAGE in pathlib.Path(last.filename).parents
    assert last.line.startswith("raise ")  # Python has not stumbled over it
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("call", "value"), cases(IN_A_STEP))
def test_an_argument_in_a_step(call, value):
    step = kc.withdevices(lambda: call(value), devices=1)
    with pytest.raises((TypeError, ValueError, kc.ConfluxError)) as caught:
        step()
    assert "raise " in str(caught.value) or "user code" not in str(caught.value)


def test_all_public_functions_are_called():
    called = {name.partition("(")[0] for name in (*CALLS, *IN_A_STEP)}
    public = {
        name
        for name in kc.__all__
        if callable(getattr(kc, name))
        and not isinstance(getattr(kc, name), type)
    }
    assert public - called - WITHOUT == set()


@pytest.mark.parametrize("value", ["soon", "", "nan", "-1", "0"])
def test_the_time_limit_of_steps_is_read_at_the_start(
    value, model, monkeypatch
):
    monkeypatch.setenv("CONFLUX_STEP_TIMEOUT", value)
    for call in (kc.initialize, kc.replicate, lambda: kc.replicate(model)):
        with pytest.raises(ValueError, match="CONFLUX_STEP_TIMEOUT is a num"):
            call()
