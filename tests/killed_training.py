"""A training that is ended at a moment, as one attempt of a script would be.

Each attempt is a process of its own. It is forked from one that has imported
TensorFlow and has not started it, so that it begins in no time. Or
`keras-conflux run` starts `killed_training.py FILE`, where the file has the
arguments of `run`.
"""

import dataclasses
import os
import pathlib
import pickle
import sys
import threading
import time
import traceback

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import resume_cases

import keras_conflux as kc
from keras_conflux._extensions.resume import model_state
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._extensions.resume.held_attributes import CallbackStates

BY_URL = os.environ.get("KILLS_BY_URL") == "1"
"""Whether checkpoints are put where nothing is renamed."""


def directory_in(folder):
    """Returns where the checkpoints of a script are."""
    return f"file://{folder}/resume" if BY_URL else folder / "resume"


@dataclasses.dataclass(frozen=True)
class End:
    """By what an attempt is ended, and when."""

    signal: int
    """It is 0 where somebody else ends the launcher, or its output."""
    moment: str
    """A method of callbacks, or `"traced"`, `"files"` or `"seconds"`."""
    count: float
    """At which of these moments, from 0; or after how many seconds."""
    process: int = 0
    """Which of the processes gets the signal."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the script."""

    processes: int
    devices: int
    """Of each process; 0 for a model that is not replicated."""
    end: End | None = None
    output: str | None = None
    """Of what kind that of the launcher is, if one starts the processes."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What the script trains."""

    data: str
    epochs: int
    every: int | str
    accumulation: int
    steps_per_execution: int
    dropout: bool
    validation: bool
    callbacks: tuple[str, ...]
    parts: bool = False
    """Whether each process draws other samples, with `data="local"`."""


MOMENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_end",
    "on_epoch_end",
    "on_train_end",
    "traced",
    "files",
    "seconds",
)
CALLBACKS = {
    "own": lambda folder: resume_cases.Own(),
    "csv": lambda folder: keras.callbacks.CSVLogger(folder / "log.csv"),
    "stopping": lambda folder: keras.callbacks.EarlyStopping(
        "loss", patience=1, restore_best_weights=True
    ),
    "plateau": lambda folder: keras.callbacks.ReduceLROnPlateau(
        "loss", patience=1, min_delta=0.1
    ),
    "best": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "best.weights.h5",
        "loss",
        save_best_only=True,
        save_weights_only=True,
    ),
    "throughput": lambda folder: kc.Throughput(),
}
# What resuming needs, switched off: the judge has to notice each.
FAULTS = {
    "generators": (random_generators, "set_states"),
    "callbacks": (CallbackStates, "restore"),
}


_FILE_EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
}


def _comes(moment):
    return lambda self, *arguments, **named: self.come(moment)


class Ending(keras.callbacks.Callback):
    """Sends this process a signal when a moment has come so many times.

    Args:
        folder: Gets a file that says how many steps had been done then.
    """

    on_train_begin = _comes("on_train_begin")
    on_epoch_begin = _comes("on_epoch_begin")
    on_train_batch_begin = _comes("on_train_batch_begin")
    on_test_batch_end = _comes("on_test_batch_end")
    on_epoch_end = _comes("on_epoch_end")
    on_train_end = _comes("on_train_end")

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.steps = 0
        self.end = None

    def on_train_batch_end(self, batch, logs=None):
        self.steps += self.params.get("steps_per_execution", 1)
        print("step", self.steps, flush=True)
        self.come("on_train_batch_end")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state.get("steps", self.steps)

    def come(self, moment):
        """Tells that a moment has come once more."""
        if self.end is None or self.end.moment != moment:
            return
        self.left -= 1
        if self.left == -1:
            self.send()

    def send(self):
        os.write(self.told, str(self.steps).encode())
        os.kill(os.getpid(), self.end.signal)

    def watch(self, end):
        """Waits for a moment from here on, if it is one of this process."""
        if end is None or end.process != kc.process_index():
            return
        self.end, self.left = end, end.count
        path = self.folder / f"signalled-{end.process}"
        self.told = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        if end.moment == "seconds":
            timer = threading.Timer(end.count, self.send)
            timer.daemon = True
            timer.start()
        elif end.moment == "files":
            sys.addaudithook(self.see)

    def see(self, event, given):
        if event in _FILE_EVENTS and str(self.folder) in str(given[0]):
            self.come("files")


class Traced(keras.layers.Layer):
    """Tells when a step is traced."""

    def __init__(self, ending):
        super().__init__()
        self.ending = ending

    def call(self, x):
        self.ending.come("traced")
        return x


def train(training, devices, folder, end=None, resume=True):
    """Runs the script of a user once; returns what it leaves behind."""
    keras.utils.set_random_seed(7)
    layers, ending = keras.layers, Ending(folder)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            Traced(ending),
            layers.Dense(6, "tanh"),
            layers.BatchNormalization(epsilon=0.1),
            layers.Dropout(0.3 if training.dropout else 0),
            layers.Dense(1),
        ]
    )
    if devices:
        data = "local" if training.parts else None
        kc.replicate(kc.synchronize_batch_norm(model), devices, data=data)
    count = training.accumulation
    optimizer = keras.optimizers.Adam(
        0.01,
        epsilon=0.01,
        gradient_accumulation_steps=None if count == 1 else count,
        use_ema=True,
        ema_overwrite_frequency=5,
        global_clipnorm=1.0,
    )
    model.compile(
        optimizer,
        "mse",
        metrics=["mae"],
        jit_compile=False,
        steps_per_execution=training.steps_per_execution,
    )
    callbacks = [CALLBACKS[name](folder) for name in training.callbacks]
    x, y = resume_cases.X[:8], resume_cases.Y[:8]
    if training.parts:
        keras.utils.set_random_seed(kc.process_index())
    if resume:
        again = kc.Resume(directory_in(folder), every=training.every)
        callbacks = [ending, *callbacks[:1], again, *callbacks[1:]]
        ending.watch(end)
    history = model.fit(
        **resume_cases.DATA[training.data](),
        epochs=training.epochs,
        validation_data=(x, y) if training.validation else None,
        callbacks=callbacks,
        verbose=0,
    )
    logs = {
        name: values
        for name, values in history.history.items()
        if name in ("loss", "mae", "val_loss", "val_mae", "learning_rate")
    }
    if not resume:
        model_state.gather(model)  # as for the last checkpoint
    variables = [*model.variables, *optimizer.variables]
    found = {f"{i} {v.path}": v.numpy() for i, v in enumerate(variables)}
    found |= {f"history of {name}": values for name, values in logs.items()}
    for callback in callbacks:
        if isinstance(callback, resume_cases.Own):
            found["own"] = [callback.seen, *callback.losses]
    if "csv" in training.callbacks and "throughput" not in training.callbacks:
        rows = np.genfromtxt(
            folder / "log.csv", delimiter=",", skip_header=1, ndmin=2
        )
        # Those of an epoch that was trained again come twice.
        _, first = np.unique(rows[:, 0], return_index=True)
        found["csv"] = rows[first]
    if "best" in training.callbacks:
        model.load_weights(folder / "best.weights.h5")
        for index, weight in enumerate(model.get_weights()):
            found[f"best {index}"] = weight
    return found


def run(training, attempt, folder, log, addresses, index, fault, resume):
    """Runs as one of the processes of an attempt.

    Args:
        training: What is trained.
        attempt: On what, and how it is ended.
        folder: Of the script. The first process leaves `result.npz` there.
        log: The file that gets what is printed, unless the launcher does.
        addresses: Those of all processes, unless the launcher tells them.
        index: Which of them this is.
        fault: One of `FAULTS`, or `None`.
        resume: Whether the script has a `kc.Resume`.
    """
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    if fault is not None:
        setattr(*FAULTS[fault], lambda *arguments: None)
    try:
        kc.devices(attempt.devices or 1)
        if attempt.processes > 1:
            kc.initialize(addresses, index, heartbeat=3)
        found = kc.checkpoints(directory_in(folder))
        # A file may be half-written there, where an object of a bucket is not.
        damaged = [x for x in found if x.damage and not BY_URL]
        assert not damaged, damaged
        found = train(training, attempt.devices, folder, attempt.end, resume)
        if kc.process_index() == 0:
            np.savez(folder / "result.npz", **found)
        kc.barrier()
        time.sleep(0.5)  # a forked process ends at once, and with it its server
        print("done", flush=True)
    except Exception:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    run(*pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()))
