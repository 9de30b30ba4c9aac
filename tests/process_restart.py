"""Trains with backups; in the first attempt, process 1 is killed on its way.

`process_restart.py DIRECTORY` leaves the weights of each process there.
"""

import os
import pathlib
import signal
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf

import keras_conflux as kc

# As in conftest.py.
tf.config.experimental.enable_tensor_float_32_execution(False)
kc.initialize(heartbeat=3)
import numpy as np
from models import dense
from process_cases import X
from process_cases import Y

directory = pathlib.Path(sys.argv[1])


class Killed(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch, kc.process_index()) == (2, 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


# As on hosts that share no directory: the first process alone has a backup.
backup = directory / f"backup of {kc.process_index()}"
callbacks = [keras.callbacks.BackupAndRestore(backup)]
if os.environ["CONFLUX_ATTEMPT"] == "0":
    callbacks.append(Killed())
model = kc.replicate(dense(), devices=1)
model.fit(
    X, Y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=callbacks
)
np.savez(directory / f"{kc.process_index()}.npz", *model.get_weights())
print("trained in attempt", os.environ["CONFLUX_ATTEMPT"], flush=True)
