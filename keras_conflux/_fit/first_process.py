"""The work of the first of several processes for all.

It writes the files, and processes begin a training where it does.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.contexts import Setting
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models
from keras_conflux._fit.input.calls import KerasCall
from keras_conflux._fit.input.calls import runs_users_code
from keras_conflux._replication import parts
from keras_conflux._replication import state
from keras_conflux._replication import synchronization

_alone = Setting(False)
_WRITERS = (
    keras.callbacks.CSVLogger
    | keras.callbacks.RemoteMonitor
    | keras.callbacks.TensorBoard
)
"""Callbacks that only write. Others also decide something."""


def save(original: Callable, saver: Any, *args: Any, **kwargs: Any) -> Any:
    """Saves a model, or a callback's, in the first process; others wait."""
    is_callback = isinstance(saver, keras.callbacks.Callback)
    model: Any = saver.model if is_callback else saver
    if process_count() == 1 or _alone.get():
        return original(saver, *args, **kwargs)
    what = f"{original.__name__} of {model.name}"
    if not is_callback and not state.replicated_by(state.variables_of(model)):
        if process_index() > 0:
            warn(
                f"{what}: this is process {process_index()}, and the model is "
                "not replicated. If others write the same file, it breaks: "
                "save under `if keras_conflux.process_index() == 0:`."
            )
        return original(saver, *args, **kwargs)
    result = None
    with errors_reported_to_all(what):
        assert_same_place(what)
        state.add_up_accumulated(state.stateful_objects(model))
        with parts.led(model):
            if process_index() == 0:
                with _alone.to(True):
                    result = original(saver, *args, **kwargs)
        assert_same_place(f"the end of {what}")
    return result


def show_and_write_there(call: KerasCall, leads: bool) -> None:
    """Has only the first process show and write, and perhaps lead."""
    if process_index() > 0:
        call.arguments["verbose"] = 0
    callbacks = callbacks_of_this_process(call.callbacks)
    if leads:
        given = [x for x in callbacks if not isinstance(x, FirstProcessLeads)]
        callbacks = [*given, FirstProcessLeads(call.model, given)]
    call.callbacks = callbacks


def callbacks_of_this_process(callbacks: list[Any]) -> list[Any]:
    """Leaves out callbacks that would write the same files once more."""
    if process_index() == 0:
        return callbacks
    return [each for each in callbacks if not isinstance(each, _WRITERS)]


class FirstProcessLeads(keras.callbacks.Callback):
    """Gives all processes the first epoch and the weights of the first one.

    Callbacks restore a model from files that others may not see.
    """

    def __init__(self, model: keras.Model, callbacks: list[Any]) -> None:
        super().__init__()
        self._trained = model
        self._may_restore = any(
            isinstance(each, keras.callbacks.BackupAndRestore)
            or runs_users_code(each, "on_train_begin")
            for each in callbacks
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks at the state that the callbacks before have left."""
        own = [keras_models.initial_epoch(self._trained), self._may_restore]
        told = all_gather_json("the first epoch", own)
        keras_models.set_initial_epoch(self._trained, told[0][0])
        if any(may_restore for _, may_restore in told):
            synchronization.synchronize(self._trained)
