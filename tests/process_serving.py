"""Trains, as one of several processes, what the lines of its input ask for.

Where the others are is told by `TF_CONFIG`; `CONFLUX_TEST_DEVICES` says how
many devices each process has. See `serving.py`.
"""

import ast
import os
import pathlib
import sys
import warnings

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import keras_conflux as kc

kc.devices(int(os.environ["CONFLUX_TEST_DEVICES"]))
# As in conftest.py.
tf.config.experimental.enable_tensor_float_32_execution(False)
kc.initialize(heartbeat=5)

import cases_trained
import drawn_runs
import numpy as np

for line in sys.stdin:
    kind, what, devices, directory = ast.literal_eval(line)
    train = {"case": cases_trained.train, "drawn": drawn_runs.train}[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(what, count=devices)
    warned = any(issubclass(w.category, kc.ConfluxWarning) for w in caught)
    np.savez(pathlib.Path(directory, f"{kc.process_index()}.npz"), **found)
    print("answer:", "warned" if warned else "trained", flush=True)
