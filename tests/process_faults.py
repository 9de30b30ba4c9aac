"""Trains as one of several processes, of which process 1 does something wrong.

`process_faults.py FAULT` prints what the process has caught, after how many
seconds, and whether it can still read its weights.
"""

import functools
import os
import signal
import subprocess
import sys
import threading
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import keras_conflux as kc

fault = sys.argv[1]
# As in conftest.py.
tf.config.experimental.enable_tensor_float_32_execution(False)
kc.initialize(heartbeat=3)
from hosts import CABLE
from models import dense
from models import regression

X, Y = regression(64)
is_wrong = kc.process_index() == 1
began = time.monotonic()


class Fault(keras.callbacks.Callback):
    """Does it in the middle of the third epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        global began
        if (self.epoch, batch) != (2, 1):
            return
        began = time.monotonic()
        if is_wrong:
            self.happen()

    def happen(self):
        kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        if fault == "killed":
            kill()
        if fault == "killed while a step hangs":
            threading.Timer(1, kill).start()
        if fault == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        if fault == "stopped by a signal":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "raises":
            raise ValueError("the user's own error")
        if fault == "exits":
            sys.exit(0)
        if fault == "interrupted":
            raise KeyboardInterrupt
        if fault == "stops early":
            self.model.stop_training = True
        if fault == "evaluates":
            self.model.evaluate(X, Y, verbose=0)
        if fault == "waits at a barrier":
            kc.barrier()
        if fault == "gets stuck":
            time.sleep(1000)
        if fault == "sleeps":
            time.sleep(6)
        if fault == "cable is cut":
            cut = ["ip", "link", "set", "dev", CABLE, "down"]
            subprocess.run(cut, check=True)


class NeverEnds(keras.layers.Layer):
    """Gets stuck in process 0, after a while, where nothing can stop it."""

    calls = 0

    def call(self, x):
        waited = tf.py_function(self.wait, [], tf.float32)
        return x + tf.reshape(waited, ())

    def wait(self):
        self.calls += 1
        if not is_wrong and self.calls == 2 * 4 + 3:
            time.sleep(1000)
        return 0.0


class NotANumber(keras.layers.Layer):
    """Fails in the graph of process 1."""

    def build(self, shape):
        self.added = tf.Variable(
            float("nan" if is_wrong else 0), trainable=False
        )

    def call(self, x):
        x += self.added
        return tf.debugging.assert_all_finite(x, "not finite") * 1.0


x, y = X, Y
if fault == "other data" and is_wrong:
    x = x[::-1]
model = dense()
if fault == "fails in the graph":
    model = keras.Sequential([keras.Input((8,)), NotANumber(), *model.layers])
    model.compile("sgd", "mse", jit_compile=False)
if fault == "killed while a step hangs":
    model = keras.Sequential([keras.Input((8,)), NeverEnds(), *model.layers])
    model.compile("sgd", "mse", jit_compile=False)
if fault.startswith("eager"):  # in both processes
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = dense(accumulating, run_eagerly=True)
    if fault == "eager part":
        kc.replicate(model, devices=1, data="local")
caught = "nothing"
if fault == "killed before replicate" and is_wrong:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    kc.replicate(model, devices=1)
except kc.ProcessError as error:
    caught = f"{type(error).__name__}: {error}"
    print(f"{time.monotonic() - began:.1f} s: {caught}", flush=True)
    print("weights True", flush=True)
    sys.exit(1)
measured = []
if fault == "measures alone" and is_wrong:
    measured = [kc.Throughput()]
if fault == "first cannot write":
    measured = [kc.Resume("/dev/null/run")]
steps = 3 if fault == "fewer batches" and is_wrong else 4
data = {"x": x[: 16 * steps], "y": y[: 16 * steps], "batch_size": 16}
if fault.startswith("part"):
    kc.replicate(model, data="local")
    if fault == "part of another shape" and is_wrong:
        x = x[:, :7]
    if fault == "part of another dtype" and is_wrong:
        x = x.astype("float64")
    if fault == "part of other steps":
        data["steps_per_epoch"] = 3 if is_wrong else 4
    else:
        spec = tf.TensorSpec([None, None], x.dtype), tf.TensorSpec([None, 1])
        data = {
            "x": tf.data.Dataset.from_generator(
                lambda: iter([(x, y)]), output_signature=spec
            )
        }
try:
    model.fit(
        **data,
        epochs=6,
        shuffle=False,
        verbose=0,
        callbacks=[Fault(), *measured],
    )
except BaseException as error:
    caught = f"{type(error).__name__}: {error}"
print(f"{time.monotonic() - began:.1f} s: {caught}", flush=True)
finite = all(abs(w).max() < 1e6 for w in model.get_weights())
print("weights", finite, flush=True)
if (fault, is_wrong) in (("raises", True), ("first cannot write", False)):
    time.sleep(5)  # that it lives on keeps nobody waiting
