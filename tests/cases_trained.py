"""Trains a case of the table, on one device or replicated."""

import keras
import numpy as np
from cases import CASES
from models import outcome

import keras_conflux as kc


class BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: np.asarray(v) for name, v in logs.items()})


def train(name, count=None, compiled=False, prepare=None, **options):
    """Trains a case on one device, or replicated, and returns the outcome.

    Args:
        name: The case.
        count: The number of replicas, or `None` for plain Keras.
        compiled: Whether XLA compiles the step.
        prepare: Called with the model before `fit`.
        **options: Of `fit`, instead of the case's.
    """
    model = CASES[name].build()
    if compiled and hasattr(model, "jit_compile"):
        model.jit_compile = not model.run_eagerly
    if count is not None:
        kc.replicate(model, count)
    if prepare is not None:
        prepare(model)
    logs = BatchLogs()
    # A callback that looks at each batch gets each; without, many a call.
    callbacks = [] if compiled else [logs]
    fit = CASES[name].fit() | options
    history = model.fit(**fit, callbacks=callbacks)
    steps = CASES[name].steps
    if steps is not None and count is None:
        assert int(model.optimizer.iterations) in (steps, steps + 1)
        model.optimizer.iterations.assign(steps)
    kc.assert_in_sync(model)
    if kc.process_count() > 1:
        # Until then, each process has a part of what is accumulated.
        kc.unreplicate(model)
    return outcome(model, history, logs.seen)
