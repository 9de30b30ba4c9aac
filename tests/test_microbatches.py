"""`microbatches=k` changes memory, and nothing else."""

import functools
import os
import re
import subprocess
import sys

import pytest
from cases import CASES
from cases_trained import train
from conftest import COUNTS
from conftest import RUN_LONG_TESTS
from models import assert_same_outcome
from test_equal import on_one_device
from test_equal import roundings

import keras_conflux as kc

IN_CI = (
    "accumulation of 2",
    "accumulation with loss scaling",
    "convolution and synchronized statistics",
    "embedding, mask and LSTM",
    "global_clipnorm",
    "last batch of one sample",
    "learning-rate schedule",
    "loss sum",
    "moving average of a layer",
    "own train_step",
    "sample_weight",
    "several inputs, outputs and losses",
    "steps_per_execution 3",
)


def in_parts(model, microbatches):
    return kc.replicate(model, microbatches=microbatches)


def assert_equals_one_device(name, count, microbatches, compiled=False):
    prepare = functools.partial(in_parts, microbatches=microbatches)
    got = train(name, count, compiled, prepare)
    wanted = on_one_device(name)
    if compiled:
        wanted = {k: v for k, v in wanted.items() if " of batch " not in k}
    assert_same_outcome(wanted, got, CASES[name].rtol, lambda: roundings(name))


def runs():
    names = CASES if RUN_LONG_TESTS else IN_CI
    for index, name in enumerate(names):
        for count in COUNTS[:2]:
            for microbatches in (2, 3):
                one_of_four = (count + 2 * microbatches) % 4 == index % 4
                if RUN_LONG_TESTS or one_of_four:
                    yield name, count, microbatches


@pytest.mark.parametrize(("name", "count", "microbatches"), list(runs()))
def test_equals_one_device(name, count, microbatches):
    if name == "strings" and kc.devices()[0].kind != "GPU":
        pytest.skip("looks words up, and has sparse gradients")
    assert_equals_one_device(name, count, microbatches)


@pytest.mark.parametrize("name", ["several inputs, outputs and losses"])
def test_compiled(name):
    """The last batch of 13 runs as a graph, and others are compiled."""
    assert_equals_one_device(name, 1, 2, compiled=True)


STEPS = """
import sys
import keras
import numpy as np
import keras_conflux as kc

for microbatches in (1, 4):
    model = keras.Sequential([keras.layers.Input((64,))])
    for _ in range(6):
        model.add(keras.layers.Dense(256, "gelu"))
    model.compile("sgd", "mse", jit_compile=True)
    kc.replicate(model, "CPU:0", microbatches=microbatches)
    x = np.ones((2048, 64), "float32")
    model.fit(x, np.ones((2048, 256), "float32"), 2048, verbose=0)
"""


def test_a_compiled_step_needs_less_memory(tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    subprocess.run(
        [sys.executable, "-c", STEPS],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "CONFLUX_EXTENSIONS": "0",
            "CUDA_VISIBLE_DEVICES": "",
        },
        check=True,
    )
    reports = sorted(tmp_path.glob("*many_steps*memory-usage-report.txt"))
    whole, in_turns = (
        int(re.findall(r"Total bytes used: (\d+)", each.read_text())[0])
        for each in sorted(reports, key=lambda path: path.stat().st_mtime)
    )
    assert in_turns < 0.5 * whole
