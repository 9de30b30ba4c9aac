"""`kc.Throughput`: what is in the logs, and that it costs nothing."""

import csv
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import time

import keras
import pytest
import tensorflow as tf
from conftest import MANY
from models import dense
from models import regression
from test_callbacks import scalars

import keras_conflux as kc
from keras_conflux._extensions.throughput import slow_input
from keras_conflux._extensions.throughput.throughput import KEYS
from keras_conflux._fit.execution.step_executor import StepExecutor
from keras_conflux._fit.input import measurements
from keras_conflux._fit.input.calls import may_steer_data
from keras_conflux._fit.input.calls import needs_every_batch
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.measurements import Measurements
from keras_conflux._fit.input.measurements import Work
from keras_conflux._fit.input.step_groups import StepGroups

X, Y = regression(29)
FIT = dict(batch_size=8, epochs=2, shuffle=False, verbose=0)
ON_CPU = {"samples_per_second", "step_ms", "input_wait", "compile_s"}
SOME = min(2, MANY)


@pytest.fixture(scope="module")
def model():
    return kc.replicate(dense(), SOME)


def without_memory(logs):
    """Leaves out what only GPUs have."""
    return {key: logs[key] for key in logs if key != "peak_gib"}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but where a test sets it."""

    class Clock:
        now = 100.0

        def passes(self, owner, name, seconds):
            """Lets time pass in each call of a method."""
            original = getattr(owner, name)

            def slower(*args, **kwargs):
                self.now += seconds
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, slower)

        def callback(self, **seconds):
            """Returns a callback whose hooks take some time."""

            def hook(amount):
                def pass_time(*_, **__):
                    self.now += amount

                return pass_time

            return keras.callbacks.LambdaCallback(
                **{name: hook(amount) for name, amount in seconds.items()}
            )

    made = Clock()
    monkeypatch.setattr(measurements, "clock", lambda: made.now)
    return made


def batches():
    while True:
        for start in range(0, 29, 8):
            yield X[start : start + 8], Y[start : start + 8]


def test_the_sums_of_replicas(clock):
    model = kc.replicate(dense(jit_compile=False), SOME)
    # A callback that may steer a generator, so that nothing is drawn ahead.
    callback = clock.callback(on_train_batch_end=0.5, on_epoch_end=100)
    clock.passes(StepGroups, "_draw", 1.0)
    clock.passes(StepExecutor, "_run_with_retracing", 2.0)
    clock.passes(model, "train_step", 10.0 / SOME)  # while it is traced
    history = model.fit(
        batches(),
        steps_per_epoch=4,
        epochs=2,
        validation_data=(X, Y),
        validation_batch_size=8,
        verbose=0,
        callbacks=[callback, kc.Throughput(KEYS)],
    ).history
    # Of the first epoch, three steps and 21 samples are not the first.
    assert history["compile_s"] == [12.0, 0.0]
    assert history["samples_per_second"] == pytest.approx([21 / 12, 29 / 14])
    assert history["input_wait"] == pytest.approx([4 / 12, 4 / 14])
    assert history["step_ms"] == pytest.approx([8000 / 3, 10000 / 4])


def test_a_model_without_replicas_is_named():
    options = FIT | {"validation_data": (X, Y)}
    with pytest.warns(kc.ConfluxWarning, match=r"replicate\(model, dev"):
        history = dense().fit(X, Y, callbacks=[kc.Throughput()], **options)
    assert set(history.history) == {"loss", "mae", "val_loss", "val_mae"}


def test_an_epoch_that_only_compiles_counts_as_it_is(clock):
    model = kc.replicate(dense(), 1)
    clock.passes(StepExecutor, "_run_with_retracing", 2.0)
    callbacks = [kc.Throughput(("samples_per_second", "compile_s"))]
    history = model.fit(X[:8], Y[:8], callbacks=callbacks, **FIT).history
    assert history["samples_per_second"] == [4.0, 4.0]
    assert history["compile_s"] == [2.0, 0.0]


def test_all_that_read_logs_see_it(model, tmp_path, capsys):
    seen = []
    model.fit(
        X,
        Y,
        callbacks=[
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.TensorBoard(tmp_path / "events"),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
            ),
            kc.Throughput(KEYS),
        ],
        **FIT | {"verbose": 2},
    )
    history = without_memory(model.history.history)
    assert set(history) == {"loss", "mae"} | ON_CPU
    assert all(type(value) is float for key in ON_CPU for value in history[key])
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    shown = scalars(tmp_path / "events")
    printed = capsys.readouterr().out
    for epoch in range(2):
        for key in ON_CPU:
            value = history[key][epoch]
            assert float(rows[epoch][key]) == value
            assert seen[epoch][key] == value
            assert shown[f"epoch_{key}", epoch] == pytest.approx(value)
            assert f"{key}: {value:.4f}" in printed or f"{value:.4e}" in printed


def test_a_list_of_callbacks_of_ones_own():
    model = kc.replicate(dense(), SOME)
    seen = []
    others = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
        ),
        kc.Throughput(KEYS),
    ]
    callbacks = keras.callbacks.CallbackList(
        others, add_history=True, model=model
    )
    model.fit(X, Y, callbacks=callbacks, **FIT)
    assert len(seen) == 2
    assert all(set(logs) >= ON_CPU for logs in seen)


def test_the_progress_bar_has_no_time_of_the_compiler(model):
    history = model.fit(X, Y, callbacks=[kc.Throughput()], **FIT).history
    shown = without_memory(history).keys() - {"loss", "mae"}
    assert shown == ON_CPU - {"compile_s"}


def test_keys_and_prefix():
    model = kc.replicate(dense(), SOME)
    callback = kc.Throughput("step_ms", prefix="speed/")
    history = model.fit(X, Y, callbacks=callback, **FIT).history
    assert set(history) == {"loss", "mae", "speed/step_ms"}
    with pytest.raises(ValueError, match=r"samples_per_second.*Got: speed"):
        kc.Throughput(["step_ms", "speed"])


@pytest.mark.long
def test_nothing_else_changes(model, deterministic):
    model.fit(X, Y, **FIT)  # makes all variables
    variables = model.variables + model.optimizer.variables
    begin = [variable.numpy().copy() for variable in variables]
    found = []
    for callbacks in ([], [kc.Throughput(KEYS)]):
        for variable, value in zip(variables, begin, strict=True):
            variable.assign(value)
        history = model.fit(X, Y, callbacks=callbacks, **FIT).history
        losses = {name: history[name] for name in ("loss", "mae")}
        found.append((losses, [v.numpy().tobytes() for v in variables]))
    assert found[0] == found[1]


def test_it_looks_at_no_batch():
    assert not needs_every_batch(kc.Throughput(KEYS))
    assert not may_steer_data(kc.Throughput(KEYS))
    model = dense(jit_compile=True)
    strategy = kc.replicate(model, 1).distribute_strategy
    plan = ExecutionPlan.of_fit(model, strategy, [kc.Throughput(KEYS)])
    assert plan.chooses_steps

    class Own(kc.Throughput):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)

    assert needs_every_batch(Own())


def test_a_program_of_many_steps():
    model = kc.replicate(dense(jit_compile=True), 1)
    x, y = regression(8 * 20)
    history = model.fit(x, y, callbacks=[kc.Throughput(KEYS)], **FIT).history
    assert history["compile_s"][0] > 0 == history["compile_s"][1]
    for wait in history["input_wait"]:
        assert 0 <= wait < 1


def test_monitoring():
    model = kc.replicate(dense(), SOME)

    def fit(**options):
        stop = keras.callbacks.EarlyStopping(
            "samples_per_second", min_delta=1e12, **options
        )
        return model.fit(
            X, Y, callbacks=[stop, kc.Throughput(KEYS)], **FIT | {"epochs": 9}
        ).epoch

    assert fit(mode="max", patience=2) == [0, 1, 2]
    # Keras does not know whether more is better.
    with pytest.raises(ValueError, match="samples_per_second"):
        fit()


class Own(keras.Model):
    """A model whose `loss` is a mean over batches, which Keras shows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        self.tracker.update_state(keras.ops.mean(self(data[0])))
        return {"loss": self.tracker.result()}


def test_a_step_of_ones_own():
    model = Own()
    model.compile("sgd", jit_compile=False)
    model = kc.replicate(model, SOME)
    history = model.fit(X, Y, callbacks=[kc.Throughput(KEYS)], **FIT).history
    assert len(history["samples_per_second"]) == 2


def test_an_epoch_that_a_callback_ends(model):

    def stop(batch, logs):
        model.stop_training = batch == 1

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=stop),
        kc.Throughput(KEYS),
    ]
    history = model.fit(X, Y, callbacks=callbacks, **FIT).history
    assert set(history) >= ON_CPU
    assert history["samples_per_second"][0] > 0


def test_input_that_limits_is_told_once(monkeypatch, caplog):
    caplog.set_level("WARNING", "keras_conflux")
    monkeypatch.setattr(slow_input, "_has_told", False)
    monkeypatch.setattr(slow_input, "MINIMUM_SECONDS", 0.2)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)

    def slow():
        for batch in batches:
            time.sleep(0.1)
            yield batch

    spec = batches.element_spec
    data = tf.data.Dataset.from_generator(slow, output_signature=spec)
    model = kc.replicate(dense("sgd"), 2)
    for _ in range(2):
        model.fit(data, verbose=0)
    (line,) = [text for text in caplog.messages if "its data" in text]
    assert "num_parallel_calls" in line


def test_a_short_share_of_a_long_time_is_not_told(monkeypatch, caplog):
    monkeypatch.setattr(slow_input, "_has_told", False)
    measured = Measurements(waited=19.0, first=Work(100, 1, 1))
    measured.other = Work(81.0, 100, 100)
    slow_input.tell("model", measured)
    assert not caplog.messages
    measured.waited = 21.0
    slow_input.tell("model", measured)
    assert "for 21 of 102 s" in caplog.text


def test_the_waits_of_all_epochs_are_told(monkeypatch, caplog):
    monkeypatch.setattr(slow_input, "_has_told", False)
    measured = Measurements()
    for _ in range(2):
        measured.reset()  # as `kc.Throughput` does when an epoch begins
        measured.waited = 6.0
        measured.other = Work(1.0, 1, 1)
    slow_input.tell("model", measured)
    assert "for 12 of 14 s" in caplog.text


RECIPES = pathlib.Path(__file__).parents[2] / "docs" / "recipes.md"
LOGGERS = {
    "wandb": """
folder, = pathlib.Path("wandb").glob("offline-run-*")
file, = folder.glob("*.wandb")
assert b"samples_per_second" in file.read_bytes()
""",
    "mlflow": """
found = mlflow.MlflowClient().get_metric_history(
    run.info.run_id, "samples_per_second")
assert [each.step for each in found] == [0, 1, 2]
assert all(each.value > 0 for each in found)
""",
}


@pytest.mark.parametrize("name", LOGGERS)
def test_the_recipe_of_a_logger(name, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    blocks = re.findall(r"```py\n(.*?)```", RECIPES.read_text(), re.DOTALL)
    (recipe,) = (each for each in blocks if f"import {name}" in each)
    begin = "from docs_setup import *\nimport os, pathlib\n"
    begin += 'os.environ["WANDB_MODE"] = "offline"\n'
    begin += (
        'model = kc.replicate(build_model(), 2)\nmodel.compile("sgd", "mse")'
    )
    script = tmp_path / "recipe.py"
    script.write_text(f"{begin}\n{recipe}\n{LOGGERS[name]}")
    path = [str(pathlib.Path(__file__).parents[1]), *filter(None, sys.path)]
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
