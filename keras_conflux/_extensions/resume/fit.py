"""`fit` with a `Resume` among its callbacks."""

import functools
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._cluster.processes import process_count
from keras_conflux._common.contexts import Setting
from keras_conflux._compat import patching
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import data_state
from keras_conflux._extensions.resume import fingerprint
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.compat import compiled_parts
from keras_conflux._extensions.resume.resumable_fit import ResumableFit
from keras_conflux._extensions.resume.resume import Resume
from keras_conflux._extensions.resume.writer import CheckpointWriter
from keras_conflux._fit.input.calls import EpochObserver
from keras_conflux._fit.input.calls import FitObserver
from keras_conflux._fit.input.calls import KerasCall
from keras_conflux._fit.input.calls import observers
from keras_conflux._replication import model_options


def install() -> None:
    """Puts it in place. Called once, at import."""
    observers.append(_FitOrResume())
    patches = (
        (private_names.BUILD_METRICS, compiled_parts.note_specs),
        (private_names.BUILD_LOSS, compiled_parts.note_specs),
        *((name, data_state.note_iterator) for name in private_names.DRAW),
        (private_names.ENUMERATE_ITERATOR, data_state.enumerate_steps),
    )
    patching.when_used(functools.partial(patching.patch_all, patches))


class _FitOrResume(FitObserver):
    def fit(self, call: KerasCall, run: Callable[[], Any]) -> Any:
        """Goes on where a `Resume` has left off, if there is one."""
        resume = _resume_among(call)
        return run() if resume is None else _resumed(call, run, resume)

    def follow(self, iterator: Any, make: Callable[[], None]) -> EpochObserver:
        """Lets the training that is going on follow an epoch iterator."""
        training = _running.get()()
        follow = training.follow if training else super().follow
        return follow(iterator, make)


def _resumed(call: KerasCall, run: Callable[[], Any], resume: Resume) -> Any:
    """Calls `fit` with callbacks that save and restore the training."""
    known = keras.callbacks.CallbackList(call.callbacks, add_history=True)
    callbacks = known.callbacks
    writer = CheckpointWriter(resume.directory)
    resume.pauses = []
    contract = model_options.data_contract_of(call.model)
    parts = process_count() if contract == "local" else 1
    with writer.open():
        saved = _saved(resume, callbacks, call.arguments, parts)
        training = ResumableFit(call, resume, callbacks, saved, parts, writer)
        call.arguments["callbacks"] = training
        with _running.to(weakref.ref(training)), training.preemption.noted():
            history = run()
        ended_here.add(resume.directory)
        return history


ended_here: set[pathlib.Path] = set()
"""The directories of trainings that have ended in this process."""
_running: Setting[Callable[[], ResumableFit | None]] = Setting(lambda: None)
"""Tells the training that is going on, of which threads keep nothing."""


def _resume_among(call: KerasCall) -> Resume | None:
    listed = call.callbacks
    found = [each for each in listed if isinstance(each, Resume)]
    if not found:
        return None
    if isinstance(call.arguments["callbacks"], keras.callbacks.CallbackList):
        raise ValueError(
            "`Resume` needs to see all callbacks. Pass `fit` a list of "
            "them. Received: a CallbackList"
        )
    backup = keras.callbacks.BackupAndRestore
    others = [each for each in listed if isinstance(each, backup)]
    if len(found) > 1 or others:
        names = [type(each).__name__ for each in (*found, *others)]
        raise ValueError(
            "One callback restores a training: `Resume` does more than "
            f"BackupAndRestore, so pass it alone. Received: {names}"
        )
    return found[0]


def _saved(
    resume: Resume, callbacks: list[Any], given: dict[str, Any], parts: int
) -> Saved | None:
    """Finds the place to go on. Logs in files go on as well."""
    saved = checkpoint_files.read_newest(resume.directory)
    resume.resumed_at = None
    if saved is None:
        return None
    if "loop" in saved.state:
        raise ValueError(
            f"{saved.path} was saved by `kc.save`, which `kc.load` restores. "
            "Pass `Resume` another directory."
        )
    fingerprint.assert_as_many_parts(saved, parts)
    epoch, step = saved.state["epoch"], saved.state["step"]
    over = saved.is_over(given["epochs"])
    ended = resume.directory in ended_here and (over or given["initial_epoch"])
    if ended or (epoch, step) > (given["epochs"], 0):
        raise ValueError(
            f"The training in {str(resume.directory)!r} is at epoch {epoch}, "
            f"step {step}, so this `fit` of {given['epochs']} epochs would not "
            "train anew. Ask for more epochs, or give each call of `fit` a "
            "directory of its own, as for each fold."
        )
    resume.resumed_at = epoch, step
    for each in callbacks:
        if isinstance(each, keras.callbacks.CSVLogger):
            each.append = True
    given["initial_epoch"] = given["epochs"] if over else epoch
    return saved
