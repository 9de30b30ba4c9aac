"""Trains as one of several processes, of which one may do something wrong.

`process_lot.py DRAW DIRECTORY START` writes what the process computes, what it
does wrong and how it ends to a file in the directory, a line of JSON each, and
prints their numbers. START says how often all have been started before.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
import warnings

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from strangers import strangers

import keras_conflux as kc


def call(port):
    """Calls where process 0 waits for the others."""
    with contextlib.suppress(AssertionError, OSError), strangers(port, 60):
        time.sleep(10)


draw = json.loads(sys.argv[1])
directory = pathlib.Path(sys.argv[2])
attempt = int(sys.argv[3]) + int(os.environ.get("CONFLUX_ATTEMPT", "0"))
task = json.loads(os.environ["TF_CONFIG"])
is_wrong = task["task"]["index"] == draw["wrong"] and attempt == 0
if is_wrong and draw["ignores"]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
if is_wrong and draw["strangers"]:
    address = task["cluster"]["worker"][0]
    threading.Thread(
        target=call, args=(int(address.partition(":")[2]),), daemon=True
    ).start()
kc.devices(draw["devices"])
# As in conftest.py.
tf.config.experimental.enable_tensor_float_32_execution(False)
kc.initialize(heartbeat=draw["heartbeat"])

import functools
import itertools

import numpy as np
from local_cases import Parts
from lot_training import Training

index, count = kc.process_index(), kc.process_count()
report = (directory / f"{index}-{attempt}.jsonl").open("w", buffering=1)
lines = itertools.count()
visits: dict[str, int] = {}


def write(**line):
    print(json.dumps(line | {"at": time.monotonic()}), file=report)
    print("line", attempt, next(lines), flush=True)


def tell(name, value):
    write(name=name, value=np.asarray(value, "float64").tolist())


def at(place, model=None):
    """Returns whether what is drawn here is to be other data."""
    visit = visits[place] = visits.get(place, -1) + 1
    is_here = is_wrong and [place, visit] == [draw["place"], draw["visit"]]
    if is_here:
        happen(draw["fault"], model)
    return is_here and draw["fault"] == "other data"


def happen(fault, model=None):
    write(fault=fault)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "gets stuck":
        time.sleep(10_000)
    elif fault == "cut off":
        os.kill(int(os.environ["CONFLUX_TEST_CABLE"]), signal.SIGSTOP)
    elif fault == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    elif fault == "leaves":
        os._exit(0)
    elif fault == "exits":
        sys.exit(0)
    elif fault == "raises":
        raise ValueError("the user's own error")
    elif fault == "sleeps":
        time.sleep(draw["heartbeat"] + 2)
    elif fault == "stops early":
        model.stop_training = True
    elif fault == "evaluates":
        model.evaluate(*Parts(2).batches()[0], verbose=0)
    elif fault == "predicts":
        model.predict(Parts(2).batches()[0][0], verbose=0)
    elif fault == "saves":
        model.save(directory / "alone.keras")
    elif fault == "fits":
        model.fit(*Parts(2).batches()[0], verbose=0)
    elif fault == "waits at a barrier":
        kc.barrier()
    elif fault == "learning rate by one process":
        model.optimizer.learning_rate = 0.2
    elif fault == "set_weights by one process":
        model.set_weights([weight + 0.01 for weight in model.get_weights()])
    elif fault == "fails in the graph":
        model.layers[0].is_bad.assign(True)
    elif fault == "a branch of its own":
        model.layers[0].has_branch.assign(True)
    elif fault == "a step of its own":
        step = kc.withdevices(lambda x: kc.allreduce("sum", x))
        step(tf.constant(1.0))


write(pid=os.getpid())
if is_wrong and draw["place"] == "any time":
    timer = threading.Timer(draw["visit"], happen, [draw["fault"]])
    timer.daemon = True
    timer.start()
is_local = draw["data"] == "local"
warnings.filterwarnings("error", category=kc.ConfluxWarning)
try:
    strange = is_wrong and draw["fault"] == "fewer batches"
    differs = is_wrong and draw["place"] == "start"
    if strange or differs:
        write(fault=draw["fault"])
    Training(
        draw["form"],
        Parts(count, index if is_local else None),
        tell,
        at,
        directory,
        draw["resumes_with"],
        fewer=int(strange),
        other=draw["fault"] if differs else None,
    ).run(
        functools.partial(
            kc.replicate, devices=draw["devices"], data=draw["data"]
        )
    )
except BaseException as error:
    write(
        error=type(error).__name__,
        text=str(error),
        ours=isinstance(error, kc.ConfluxError),
    )
    raise
write(ended=True)
