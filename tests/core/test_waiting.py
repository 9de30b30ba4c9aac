"""Calls that hang, and the end of a process that waits for none of them."""

import signal
import subprocess
import sys
import textwrap

import forked
import pytest

PROGRAM = """
    import atexit, sys, time
    from keras_conflux._common import waiting

    atexit.register(print, "the user's own end")
    call = waiting.DaemonCall(lambda: time.sleep({seconds}))
    assert not call.wait(0.1)
    call.abandon()
    atexit.register(call.wait, {wait})
    sys.exit(3)
"""


def ended(**times):
    program = textwrap.dedent(PROGRAM).format(**times)
    return forked.run("-c", program, timeout=100)


def test_a_process_does_not_wait_for_a_call_that_is_abandoned():
    hanging = ended(seconds=1000, wait=0)
    assert hanging.returncode == 1
    assert hanging.stdout == "the user's own end\n"


def test_a_process_whose_abandoned_call_has_ended_ends_as_it_wants():
    late = ended(seconds=0.5, wait=50)
    assert late.returncode == 3
    assert late.stdout == "the user's own end\n"


INTERRUPTED = """
import signal, time
from keras_conflux._common import waiting

def work():
    time.sleep(0.5)
    print("the call has ended", flush=True)

signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
waiting.DaemonCall(work).result()
"""


def test_a_call_whose_wait_is_interrupted_ends_before_python():
    """TensorFlow aborts a process to whose end a call comes back."""
    interrupted = forked.run("-c", INTERRUPTED, timeout=100)
    assert "KeyboardInterrupt" in interrupted.stderr
    assert interrupted.stdout == "the call has ended\n"


DRAWING = """
import os, signal, sys, time
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np
import keras_conflux as kc

class Slow(keras.utils.PyDataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.3)
        return np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")

class Ending(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and number:
            os.kill(os.getpid(), number)

number, directory = int(sys.argv[1]), sys.argv[2]
devices = kc.devices(2)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
callbacks = [Ending()]
if number == signal.SIGTERM:
    callbacks.append(kc.Resume(directory))
else:
    kc.replicate(model, devices)
model.compile("sgd", "mse", jit_compile=False)
model.fit(Slow(), steps_per_epoch=3, callbacks=callbacks, verbose=0)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (0, 0),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_process_ends_while_a_batch_is_drawn(tmp_path, number, code):
    """Not in a fork, which ends without the end of Python."""
    words = "-c", DRAWING, str(int(number)), str(tmp_path)
    ended = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == code, ended.stderr[-2000:]
