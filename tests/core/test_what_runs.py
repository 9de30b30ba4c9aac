"""A program says on which devices a model runs, once, and can be silenced."""

import logging
import os
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from models import dense
from models import regression

import keras_conflux as kc
from keras_conflux._common import notices
from keras_conflux._common.user_warnings import warn
from keras_conflux._fit.execution import step_executor
from keras_conflux._fit.execution import xla_program
from keras_conflux._fit.input.execution_plan import ExecutionPlan

X, Y = regression(10)
FIT = dict(batch_size=10, epochs=1, verbose=0)
NOUN = "GPU" if ON_GPU else "CPU device"
HOW = "XLA" if ON_GPU else "without XLA"


@pytest.fixture
def logger():
    found = logging.getLogger("keras_conflux")
    before = found.level
    yield found
    found.setLevel(before)


def trained(devices=None, **compiled):
    model = kc.replicate(dense(), devices)
    model.compile("sgd", "mse", **compiled)
    model.fit(X, Y, **FIT)
    return model


def sizes():
    large, more = divmod(10, MANY)
    parts = f"{more} x {large + 1} + " if more else ""
    return f"{parts}{MANY - more} x {large}"


@several
def test_a_model_says_once_what_runs(capsys):
    model = trained()
    said = capsys.readouterr()
    line = f"keras-conflux: {MANY} {NOUN}s, {HOW}, batches of 10 = {sizes()}\n"
    assert said.err.endswith(line)
    assert said.out == ""
    model.fit(X, Y, **FIT)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert capsys.readouterr().err == ""
    kc.replicate(kc.unreplicate(model), devices=1).fit(X, Y, **FIT)
    line = f"1 of {MANY} {NOUN}s (for all: kc.replicate(model, devices="
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "turns", "says"),
    [
        ([8, 8], 1, "XLA, batches of 16 = 2 x 8"),
        ([6, 5], 1, "without XLA where batches are uneven, batches of 11 = "),
        ([8, 8], 4, "XLA, batches of 16 = 2 x 8, each in 4 parts"),
        ([8, 8], 3, "without XLA where batches are uneven, batches of 16 = "),
    ],
)
def test_uneven_batches_run_without_xla(capsys, sizes, turns, says):
    plan = ExecutionPlan(kc.replicate(devices=1), compiled=True, turns=turns)
    step_executor.tell_what_runs(dense(), plan, sizes)
    assert f", {says}" in capsys.readouterr().err


def test_a_step_that_runs_once_says_where(capsys):
    trained(run_eagerly=True)
    said = capsys.readouterr().err
    assert f"eagerly on {DEVICES[0]} alone, batches of 10\n" in said


def test_a_model_that_is_not_replicated_says_nothing(capsys):
    dense().fit(X, Y, **FIT)
    assert capsys.readouterr().err == ""


@several
def test_the_first_process_alone_says_it(capsys, monkeypatch):
    monkeypatch.setattr(step_executor, "process_count", lambda: 2)
    trained()
    assert f"{NOUN}s in 2 processes, {HOW}" in capsys.readouterr().err
    monkeypatch.setattr(step_executor, "process_index", lambda: 1)
    trained()
    assert capsys.readouterr().err == ""


@several
def test_the_log_of_a_program_gets_it(capsys, caplog):
    with caplog.at_level(logging.INFO, "keras_conflux"):
        trained()
    assert f"{NOUN}s, {HOW}, batches of 10" in caplog.text
    assert capsys.readouterr().err == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["level", "disabled", "environment"])
def test_it_can_be_silenced(how, logger, capsys, monkeypatch):
    with warnings.catch_warnings():
        if how == "level":
            logger.setLevel(logging.WARNING)
        elif how == "disabled":
            monkeypatch.setattr(logger.manager, "disable", logging.WARNING)
        else:
            monkeypatch.setenv(notices.VARIABLE, "1")
            notices.obey_environment()
            warn("This is not seen.")
            logger.warning("This is not seen.")
        trained()
    said = capsys.readouterr()
    assert said.out == said.err == ""


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="TensorFlow sees GPUs")
def test_gpus_that_tensorflow_does_not_see_are_told(
    capsys, monkeypatch, tmp_path
):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU 0: H200\\nGPU 1: H200\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(step_executor, "_has_told_of_driver", False)
    trained()
    said = capsys.readouterr().err
    assert "the driver lists 2 GPUs, and TensorFlow sees 0. Type: pip" in said
    trained()
    assert "driver" not in capsys.readouterr().err


def test_devices_of_what_is_replicated_or_not():
    model = dense()
    assert len(kc.devices_of(model)) == 1
    for target in (model, model.optimizer, model.layers[-1]):
        kc.replicate(target, devices=MANY)
        assert kc.devices_of(target) == DEVICES[:MANY]
    assert len(kc.devices_of(kc.unreplicate(model))) == 1
    unbuilt = dense().__class__()
    assert kc.devices_of(unbuilt) == ()
    assert kc.devices_of(kc.replicate(unbuilt, MANY)) == DEVICES[:MANY]
    assert tf.is_tensor(model(np.zeros((1, X.shape[1]), "float32")))


class SlowToTrace(keras.Sequential):
    def train_step(self, data):
        time.sleep(0.2)
        return super().train_step(data)


def slow_model(compiles=True):
    model = SlowToTrace([keras.Input((3,)), keras.layers.Dense(1)], name="slow")
    model.compile("sgd", "mse", jit_compile=compiles)
    return model


@pytest.mark.long
@pytest.mark.parametrize("compiles", [True, False])
def test_a_long_wait_for_the_compiler_is_explained(
    compiles, capsys, monkeypatch
):
    monkeypatch.setattr(notices, "SLOW", 0.02)
    model = kc.replicate(slow_model(compiles), devices=1)
    for _ in range(2):  # a program that exists is not compiled again
        model.fit(np.zeros((10, 3)), np.zeros((10, 1)), **FIT)
    said = capsys.readouterr().err
    line = "slow: XLA compiles a step for float32(10, 3), float32(10, 1) on "
    assert said.count(line) == compiles


def test_another_process_does_not_explain_it(capsys, monkeypatch):
    monkeypatch.setattr(xla_program, "process_index", lambda: 1)
    monkeypatch.setattr(notices, "SLOW", 0.02)
    model = kc.replicate(slow_model(), devices=1)
    model.fit(np.zeros((10, 3)), np.zeros((10, 1)), **FIT)
    assert "compiles" not in capsys.readouterr().err


def test_an_execution_in_time_explains_nothing(capsys):
    with notices.told_if_slow("This is not seen."):
        pass
    assert capsys.readouterr().err == ""
