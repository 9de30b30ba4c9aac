"""One call of `fit` that can be taken up again where it was left.

"Before step n" means that n steps are done and that there is a step n.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.failures import ExitOfAllProcesses
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_iterators
from keras_conflux._compat import keras_models
from keras_conflux._extensions.resume import data_state
from keras_conflux._extensions.resume import fingerprint
from keras_conflux._extensions.resume import held_variables
from keras_conflux._extensions.resume import model_state
from keras_conflux._extensions.resume import varying_data
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.checkpoint_files import gathered
from keras_conflux._extensions.resume.compat import private_state
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._extensions.resume.held_attributes import RANDOM
from keras_conflux._extensions.resume.held_attributes import CallbackStates
from keras_conflux._extensions.resume.input_position import InputPosition
from keras_conflux._extensions.resume.input_position import Place
from keras_conflux._extensions.resume.resume import Resume
from keras_conflux._extensions.resume.resume import SavingInterval
from keras_conflux._extensions.resume.signals import Preemption
from keras_conflux._extensions.resume.trainable_layers import TrainableLayers
from keras_conflux._extensions.resume.writer import CheckpointWriter
from keras_conflux._extensions.resume.writer import write
from keras_conflux._fit import first_process
from keras_conflux._fit.input.calls import EpochObserver
from keras_conflux._fit.input.calls import KerasCall
from keras_conflux._fit.input.calls import LogSource

_log = logging.getLogger("keras_conflux")
# Clocks of another process mean nothing here.
_STATELESS = Resume | keras.callbacks.ProgbarLogger | LogSource
_VARIES = (
    "This training cannot be resumed exactly, because its {what} is another "
    "each time: {causes}. Where a seed is missing, call "
    "keras.utils.set_random_seed(...) before the data set is made, or give "
    "`shuffle` one."
)
_FURTHER_ON = (
    "This training does not go on exactly where it was, because its data or "
    "validation data have been shuffled more often in this process than when "
    "the checkpoint was saved. Make the data set anew, or start the program "
    "again, and call `fit` before anything else uses the data."
)


class ResumableFit(keras.callbacks.CallbackList):
    """Saves and restores the state that a call of `fit` needs to go on."""

    def __init__(
        self,
        call: KerasCall,
        resume: Resume,
        callbacks: list[Any],
        saved: Saved | None,
        parts: int,
        writer: CheckpointWriter,
    ) -> None:
        given = call.arguments
        super().__init__(
            first_process.callbacks_of_this_process(callbacks),
            add_progbar=given["verbose"] != 0 and process_index() == 0,
        )
        self._trained = call.model
        validation = data_state.ValidationData(given["validation_data"])
        self._data_given = [given["x"], validation.source]
        self._stateful = [x for x in callbacks if not isinstance(x, _STATELESS)]
        self._held = [*map(held_variables.held_by, self._stateful)]
        held = [*self._held, *self._data_given]
        others = [*held_variables.reachable(held, tf.data.Dataset)]
        others += held_variables.reachable(self._held, keras.utils.PyDataset)
        self._saved = saved
        self._redrawn: Saved | None = None
        """The checkpoint, before the first step after batches drawn again."""
        self._parts = parts
        self._resume = resume
        self._interval = SavingInterval(resume.every)
        self._writer = writer
        self.preemption = Preemption(resume.signals)
        self._verbose = given["verbose"]
        self._epochs = given["epochs"]
        self._taken: tuple[int, Callable[[], str] | None, int] | None = None
        """After so many steps of all epochs, what writes the checkpoint that is
        copied, in the first process, and the signal that came or 0."""
        self._done = 0
        """How many steps former epochs had."""
        self._begun: set[int] | None = None
        """The variables, by ids, of a built model when training began."""
        self._epoch = 0
        self._ended = 0
        """How many steps of this epoch have ended."""
        self._validated = bool(saved and saved.state["validated"])
        """Whether Keras has drawn validation data to see their shapes."""
        self._draws_again = self._validated and validation.is_py_dataset
        self._is_in_step = True
        start = None if saved is None else _place(saved)
        self.position = InputPosition(
            start, validation, others, parts > 1, self._warn_or_raise
        )

    def follow(self, iterator: Any, make: Callable[[], None]) -> EpochObserver:
        """Follows the first epoch iterator that Keras makes, the training's.

        Undoes what Keras draws where `fit` makes validation's.
        """
        if self._is_in_step or not self._draws_again:
            make()
        else:
            validation = self.position.validation
            state, generators = validation.state(), random_generators.states()
            make()
            validation.restore(state)
            random_generators.set_states(generators)
        if self.position.iterator is not None:
            return EpochObserver()
        self.position.attach(iterator)
        return self.position

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores, or begins."""
        iterator = self.position.iterator
        # Callbacks get both when the training begins, as in any `fit`.
        self.set_model(self._trained)
        known = {"verbose": self._verbose, "epochs": self._epochs}
        self.set_params(known | {"steps": iterator.num_batches})
        super().on_train_begin(logs)
        self._states = CallbackStates(self._stateful, self._data_given)
        self._layers = TrainableLayers(self._trained)
        self.position.varies = self._name_what_varies()
        self._data = fingerprint.of_data(iterator)
        # Keras finds out that other data has ended when it tries the next step.
        # A state taken before that one is then none to go on from.
        known = iterator.num_batches is not None
        self._is_certain = known and iterator.steps_per_epoch is None
        compiled = fingerprint.of_compile(self._trained)
        self._rates = {x: compiled[x] for x in compiled if "learning_rate" in x}
        if self._saved is None:
            self._name_what_is_not_built()
            if self._trained.built:  # else a restart builds all of it
                beside = model_state.beside_weights(self._trained)
                self._begun = {id(variable) for variable in beside}
            return
        fingerprint.assert_same_data(self._saved, self._data)
        keras_models.symbolic_build(
            self._trained, keras_iterators.batch_spec(iterator), at_once=True
        )  # all that a checkpoint has values for
        model_state.build_optimizer(self._trained, self._saved)
        model_state.assert_same(self._saved, self._trained)
        named = fingerprint.of_metrics(self._trained)
        fingerprint.name_changed_settings(self._saved, compiled | named)
        state = self._saved.state
        is_over = self._saved.is_over(self._epochs)
        if not self.position.restore(is_over) and not is_over:
            self._warn_or_raise(_FURTHER_ON)
        self._done = state["done"]
        self._epoch = state["epoch"]
        self._interval.restart(self._done + state["step"])
        self._restore(self._saved)
        if not self.position.skipped:
            data = private_state.dataset_of(iterator)
            random_generators.set_states(_place(self._saved).generators, data)
        self._say_where(self._saved)

    def _say_where(self, saved: Saved) -> None:
        epoch, step = saved.state["epoch"], saved.state["step"]
        text = f"{saved.path}: going on in epoch {epoch + 1}, step {step}."
        if saved.is_over(self._epochs):
            stopped = saved.state["stopped"]
            ended = "a callback had ended it" if stopped else "done"
            text = (
                f"{self._resume.directory}: already trained for {epoch} "
                f"epochs, {ended}. To train anew, remove the directory."
            )
        _log.info(text)
        if self._verbose and process_index() == 0:
            print(text)

    def _name_what_varies(self) -> bool:
        """Returns whether the data of the training varies."""
        position, validation = self.position, self.position.validation
        dataset = private_state.dataset_of(position.iterator)
        found = {
            "data": varying_data.causes(
                dataset,
                private_state.py_dataset_of(position.iterator)
                or data_state.used_before(self._data_given[0]),
                anew=data_state.draws_again(data_state.shuffles_of([dataset])),
                is_cut=position.iterator.steps_per_epoch is not None,
            ),
            "validation data": varying_data.causes(
                validation.dataset, validation.source, anew=True
            ),
        }
        of_callbacks = [id(x) for each in self._held for x in each.values()]
        attributes = map(held_variables.held_by, self._data_given)
        of_data = [x for each in attributes for x in each.values()]
        if any(id(x) in of_callbacks for x in of_data if isinstance(x, RANDOM)):
            found["data"].append(
                "a callback may draw from its random generator as well (give "
                "each a generator of its own)"
            )
        for what, causes in found.items():
            if causes:
                self._warn_or_raise(
                    _VARIES.format(what=what, causes="; ".join(causes))
                )
        return bool(found["data"])

    def _name_what_is_not_built(self) -> None:
        unbuilt = model_state.unbuilt_optimizers(self._trained)
        if unbuilt:
            self._warn_or_raise(
                "This training cannot be resumed, because a step of the "
                f"model's own builds these optimizers: {', '.join(unbuilt)}. "
                "A script that builds them before can go on from its "
                f"checkpoints. For each, {model_state.HOW_TO_BUILD}."
            )

    def _name_what_is_not_held(self) -> None:
        if self._resume.pauses:
            return  # the first checkpoint has told
        made = model_state.names_of_made(self._trained, self._begun)
        if said := held_variables.said_of_lost(self._trained, made):
            self._warn_or_raise(said)

    def _warn_or_raise(self, message: str) -> None:
        if self._resume.strict:
            raise ValueError(message)
        warn(message)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores values that callbacks and Keras have set anew."""
        self._states.end_epoch()
        self._layers.note_made()
        super().on_epoch_begin(epoch, logs)
        self._epoch, self._ended = epoch, 0
        self._states.begin_epoch()
        if not self._done:
            self._layers.note_traced()  # by the first step
        # Callbacks and Keras have begun an epoch, in whose middle this is.
        if self._saved is not None and self.position.skipped:
            self._restore(self._saved)
            self._redrawn = self._saved
        self._saved = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Saves, if it is time. A signal ends the process after that."""
        private_state.flush_callbacks(self)
        if self._redrawn is not None:  # data may share what callbacks hold
            self._states.restore(self._redrawn.state["callbacks"])
        self._redrawn = None
        self._ended, self._is_in_step = batch, True
        if batch:
            self._save_if_due(batch, self._interval.is_over(self._done + batch))
            if self._is_certain:
                self._put_down()
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps, to the last one of an execution."""
        super().on_train_batch_end(batch, logs)
        self._ended, self._is_in_step = batch + 1, False
        self._put_down()

    def on_test_begin(self, logs: Any = None) -> None:
        """Notes that Keras has drawn validation data."""
        super().on_test_begin(logs)
        self._validated, self._draws_again = True, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves, if it is time."""
        super().on_epoch_end(epoch, logs)
        self._taken = None  # before a step that did not come
        self._done += self._ended
        self._epoch, self._ended = epoch + 1, 0
        is_last = self._trained.stop_training or self._epoch == self._epochs
        self._save_if_due(0, is_last or self._interval.is_over(self._done))
        self._put_down()
        if is_last:
            self._writer.wait()

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the process on a signal. All is saved by then."""
        if self._saved is not None:  # there was no epoch left
            logged = self._trained.history.history.items()
            logs = {k: v[-1] for k, v in logged if v and isinstance(v, list)}
            self._trained.stop_training = bool(self._saved.state["stopped"])
        super().on_train_end(logs)
        _, signal = self._wanted("at the end", False)
        if signal:
            self._exit(signal)

    def _save_if_due(self, step: int, due: bool) -> None:
        due, signal = self._wanted(f"before step {step}", due)
        if due or signal:
            self._take(step, signal)

    def _wanted(self, where: str, due: bool) -> tuple[bool, int]:
        """Returns whether any process wants to save, and a signal that came."""
        # Each process has its own clock and signals.
        asked = [due, self.preemption.received or 0]
        wanted = all_gather_json(f"whether to save {where}", asked)
        return any(each for each, _ in wanted), max(each for _, each in wanted)

    def _take(self, step: int, signal: int) -> None:
        """Copies all that a checkpoint has, for `_put_down` to write."""
        began = time.monotonic()
        self._writer.wait()
        self._name_what_is_not_held()
        what = f"the place in the data before step {step}"
        place = dict(vars(self.position.place_before(step)))
        own = {"place": place, "data": self._data}
        parts = gathered(what, own) if self._parts > 1 else [own]
        copied = None
        with model_state.gathered(self._trained):
            if process_index() == 0:
                copied = self._copied(step, parts)
        self._resume.pauses.append(time.monotonic() - began)
        self._taken = self._done + step, copied, signal

    def _copied(self, step: int, parts: list[Any]) -> Callable[[], str]:
        """Returns a function that writes a checkpoint of this moment."""
        weights, beside = model_state.copied_from(self._trained)
        compiled = fingerprint.of_compile(self._trained) | self._rates
        state = beside | {
            "epoch": self._epoch,
            "done": self._done,
            "stopped": bool(self._trained.stop_training),
            "step": step,
            "validated": self._validated,
            "parts": parts,
            "callbacks": self._states.changed(step),
            "compiled": compiled | fingerprint.of_metrics(self._trained),
            "trainable": self._layers.changed(),
        }
        position = self._done + step, self._epoch
        root, keep = self._resume.directory, self._resume.keep
        return functools.partial(write, root, position, weights, state, keep)

    def _put_down(self) -> None:
        """Writes the state that was taken, if any. After a signal, it ends."""
        if self._taken is None:
            return
        (steps, copied, signal), self._taken = self._taken, None
        self._interval.restart(steps)
        if copied is not None:
            self._writer.start(copied)
        if signal:
            self._exit(signal)

    def _exit(self, signal: int) -> None:
        self._writer.wait()
        # Launchers end all processes soon after the first one has ended.
        all_gather_json("the end of the last checkpoint", None)
        _log.warning(
            "Training stops after %d steps, on signal %d.",
            self._done + self._ended,
            signal,
        )
        raise ExitOfAllProcesses(128 + signal)

    def _restore(self, saved: Saved) -> None:
        model_state.restore(self._trained, saved)
        self._layers.restore(saved.state["trainable"])
        self._states.restore(saved.state["callbacks"])


def _place(saved: Saved) -> Place:
    return Place(**fingerprint.own_part(saved)["place"])
