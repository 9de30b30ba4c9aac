"""Runs cases as one of several processes: `process_worker.py OUT CASE ...`.

Where the others are is told by `TF_CONFIG`; `CONFLUX_TEST_DEVICES` says how
many devices each process has.
"""

import gc
import os
import pathlib
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import keras_conflux as kc

DEVICES = int(os.environ.get("CONFLUX_TEST_DEVICES", "1"))
kc.devices(DEVICES)
# As in conftest.py.
tf.config.experimental.enable_tensor_float_32_execution(False)
kc.initialize(heartbeat=5)

import functools

import numpy as np
from local_cases import LOCAL_CASES
from local_cases import MORE_LOCAL_CASES
from local_cases import Parts
from process_cases import CASES
from process_cases import CHECKS
from process_cases import MORE_CASES
from process_cases import MORE_CHECKS

strategy = kc.replicate(devices=DEVICES)
out = pathlib.Path(sys.argv[1])
for name in sys.argv[2:]:
    if name in CASES | MORE_CASES:
        found = (CASES | MORE_CASES)[name](kc.replicate)
        np.savez(out / f"{name}-{kc.process_index()}.npz", **found)
    elif name in LOCAL_CASES | MORE_LOCAL_CASES:
        replicate = functools.partial(kc.replicate, data="local")
        parts = Parts(kc.process_count(), kc.process_index())
        found = (LOCAL_CASES | MORE_LOCAL_CASES)[name](replicate, parts)
        np.savez(out / f"{name}-{kc.process_index()}.npz", **found)
    else:
        (CHECKS | MORE_CHECKS)[name](out)
        (out / f"{name}-{kc.process_index()}.passed").touch()
    print(name, flush=True)
    # TensorFlow deletes an iterator, now and then, when its tuning thread
    # wakes, which is after as long as the iterator has lived.
    gc.collect()
kc.barrier()
