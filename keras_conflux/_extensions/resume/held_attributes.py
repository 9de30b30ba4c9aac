"""The attributes of callbacks and data, of which a checkpoint gives some back.

A value that has changed in training is saved. A checkpoint may be a stranger's:
it gives attributes that are there values of their kinds, and no possible path.
"""

import collections
import copy
import datetime
import dis
import enum
import logging
import pathlib
import random
import re
import types
import weakref
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import held_variables
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.held_variables import FUNCTIONS
from keras_conflux._extensions.resume.held_variables import WITH_VARIABLES
from keras_conflux._extensions.resume.held_variables import held_by
from keras_conflux._replication import state

_CONTAINERS = (list, dict, set, bytearray, collections.deque)
"""The plain values that may be changed in place."""
_OF_LOGS = keras.callbacks.History | keras.callbacks.CSVLogger
"""Callbacks whose containers hold the names of logs, which may be any."""
_TOLD = "state_dict()"  # no attribute has such a name
_AND = "\n"  # between the names of one container or array
_SET_ANEW = {"params", "min_delta"}
"""Attributes that Keras sets in each training, `min_delta` by its old value."""
_WITHOUT_STATE = (
    (*FUNCTIONS, types.ModuleType, type, np.ufunc, np.dtype),
    (datetime.date, datetime.time, datetime.timedelta, range, slice),
    (enum.Enum, logging.Logger, pathlib.PurePath, re.Pattern),
    (tf.DType, tf.TensorShape, tf.TypeSpec, tf.data.Dataset),
    (keras.Loss, keras.optimizers.schedules.LearningRateSchedule),
)
RANDOM = np.random.Generator, np.random.RandomState, random.Random
SAVED: Any = (random.random.__self__, np.random.normal.__self__)
"""The global generators, which each checkpoint has."""


class HeldAttributes:
    """Attributes of an object, or what it tells, and changes; `None`'s none."""

    def __init__(
        self,
        owner: Any,
        digest: Callable[[Any], Any] = plain_values.digest,
        saved: Iterable[Any] = (),
    ) -> None:
        self._owner, self._digest = owner, digest
        self._any_words = isinstance(owner, _OF_LOGS)
        self._made: dict[str, Any] | None = None
        """Digests of what the first `on_epoch_begin` has set, after it."""
        self._before: dict[str, Any] = {}
        """The values of these before a later one."""
        methods = "state_dict", "load_state_dict"
        self._tells = all(hasattr(owner, name) for name in methods)
        if self._tells:
            plain_values.told_state(owner)  # which may not be saved
            return
        held = _savable(owner)
        self._digests = {k: digest(v) for k, v in _by_all_names(held).items()}
        of_classes = {k.rpartition(".")[2]: v for k, v in held.items()}
        self._forms = _forms(of_classes | held)
        self._arrays = _references(held)
        """Those that a restart finds as well, and fills in place."""
        self._objects = self._without_form(held)
        """Those that no checkpoint has, as they are no plain values."""
        self._of_keras = _set_by_keras(owner)
        known = _saved_with(owner, held.keys()) | {*map(id, saved)}
        self._code = held_variables.StateOfCode(
            _functions_in([*self._objects.values()]), lambda x: id(x) in known
        )
        self._name_what_is_lost(known)
        self._set_anew: set[str] = set()
        """Those of them that an `on_epoch_begin` sets."""
        self._changed: set[str] = set()
        """Those that were not as at the begin at some time."""
        self._named: set[str] = set()

    def _name_what_is_lost(self, known: set[int]) -> None:
        """Warns of attributes that may change in training and are not saved."""
        lost = [
            f"{name!r} (a {type(value).__name__})"
            for name, value in self._objects.items()
            if "." not in name
            and name not in self._of_keras
            and not plain_values.is_plain(value)
            and _can_lose_state(value, known)
        ]
        if lost:
            owner = self._owner
            warn(
                f"The {'callback' if _is_callback(owner) else 'PyDataset'} "
                f"{type(owner).__name__} holds values not saved, which cannot "
                "be restored if training is interrupted: "
                f"{', '.join(lost)}. If it changes in training, give it "
                "`state_dict()` and `load_state_dict(state)`, which return and "
                "take numbers, strings, arrays, and lists and dicts of them."
            )

    def end_epoch(self) -> None:
        """Called before all callbacks' `on_epoch_begin`."""
        self._before = held_by(self._owner)

    def begin_epoch(self) -> None:
        """Notes changes of an `on_epoch_begin`; the first one may declare."""
        if self._tells:
            return
        now, before = _savable(self._owner), self._before
        new = {k: v for k, v in now.items() if v is not before.get(k)}
        self._arrays |= _references(new)
        self._note_changes(now)
        every = now | self._without_form(now)
        if self._made is None:
            self._set_anew = {*self._other_objects(now)}
            made = (now.keys() - self._forms) | self._set_anew
            self._made = {name: self._digest_of(every[name]) for name in made}
            self._forms = _forms(now) | self._forms
            return
        for name in self._made.keys() & before.keys():
            # One that is set once is not set in a training that goes on.
            value = every.get(name)
            if value is before[name] and (
                isinstance(value, (*_CONTAINERS, np.ndarray))
                or self._digest_of(value) != self._made[name]
            ):
                self._forms.pop(name, None)
                self._set_anew.discard(name)

    def _digest_of(self, value: Any) -> Any:
        """Returns another one each time for an object that may change."""
        if plain_values.is_plain(value):
            return self._digest(value)
        known = _variables_of_model(self._owner)
        return object() if _can_lose_state(value, known) else None

    def changed(self, step: int = 0) -> dict[str, Any]:
        """Returns copies of the values that can be given back, and changed.

        Before step 0, `on_epoch_begin` has yet to set some anew.
        """
        if self._tells:
            return {_TOLD: copy.deepcopy(plain_values.told_state(self._owner))}
        now = _savable(self._owner)
        self._note_changes(now)
        found = {k: v for k, v in now.items() if k in self._changed}
        lost = {k for k, v in found.items() if not self._may_get(k, v)}
        arrays = {k: v for k, v in found.items() if isinstance(v, np.ndarray)}
        replaced = {k for k in arrays if not self._is_in_place(k, arrays[k])}
        others = self._other_objects(now)
        lost |= others.keys() - self._set_anew
        if step:
            lost |= {x for x in others if isinstance(others[x], WITH_VARIABLES)}
        pairs = [(k, arrays[k], v) for k in replaced for v in arrays.values()]
        shares = np.may_share_memory
        parted = {k for k, v, x in pairs if v is not x and shares(v, x)}
        every = ((lost | parted) - self._of_keras) | self._code.changed()
        if new := every - self._named:
            self._named |= new
            warn(
                f"{type(self._owner).__name__} has changed in training, and "
                f"cannot be given back {sorted(new)} if it is interrupted. A "
                "checkpoint, which may be of others, makes no attributes and "
                "no views of arrays, changes no types, and sets no texts but "
                "those that were held when training began. Set them in "
                "`__init__` to values of their types, or write `state_dict()` "
                "and `load_state_dict(state)`."
            )
        kept = {k: v for k, v in found.items() if k not in lost}
        named, here = _by_all_names(kept).items(), self._is_in_place
        return copy.deepcopy({k + _AND * here(k, v): v for k, v in named})

    def _is_in_place(self, names: str, value: Any) -> bool:
        """Whether each name has had this array since the begin."""
        held = [self._arrays.get(name) for name in names.split(_AND)]
        return all(each is not None and each() is value for each in held)

    def restore(self, saved: dict[str, Any]) -> None:
        """Gives the object the values of `changed`.

        None may be of another type, or hold a path.
        """
        if self._tells != (_TOLD in saved):
            raise ValueError(
                f"`{type(self._owner).__name__}` has got or lost the methods "
                "`state_dict` and `load_state_dict` since the checkpoint was "
                "saved. Train with the program that was saved, or use another "
                "directory."
            )
        saved = copy.deepcopy(saved)
        if self._tells:
            self._owner.load_state_dict(saved[_TOLD])
            return
        each = _with_each(saved)
        in_place = _with_each({k: 0 for k in saved if k.endswith(_AND)})
        saved = {k: each[k] for k in each if k in self._forms}
        wrong = [k for k, v in saved.items() if not self._may_get(k, v)]
        if wrong:
            raise ValueError(
                f"The checkpoint has values for {wrong} of "
                f"{type(self._owner).__name__} of types that it does not have "
                "here, or texts that it does not hold, which could be paths. "
                "Train with the program that was saved, or in a new directory."
            )
        self._changed |= saved.keys()
        _give(self._owner, saved, in_place)

    def _may_get(self, name: str, value: Any) -> bool:
        form = self._forms.get(name)
        return form is not None and form.admits(value, self._any_words)

    def _without_form(self, now: dict[str, Any]) -> dict[str, Any]:
        """Returns all that is held, or was, and is not among these."""
        every = held_by(self._owner)
        names = [x for x in _with_each(every | self._digests) if x not in now]
        return {name: every.get(name) for name in names}

    def _other_objects(self, now: dict[str, Any]) -> dict[str, Any]:
        known, found = self._objects, self._without_form(now)
        return {k: v for k, v in found.items() if v is not known.get(k, self)}

    def _note_changes(self, now: dict[str, Any]) -> None:
        for names, value in _by_all_names(now).items():
            if self._digest(value) != self._digests.get(names):
                self._changed |= {*names.split(_AND)}


class CallbackStates:
    """Tells which attributes of callbacks have changed in training."""

    def __init__(self, callbacks: list[Any], saved: Any = ()) -> None:
        self._callbacks = callbacks
        saved = [*callbacks, *saved]
        self._held = [HeldAttributes(each, saved=saved) for each in callbacks]

    def end_epoch(self) -> None:
        """Called before all callbacks' `on_epoch_begin`."""
        for held in self._held:
            held.end_epoch()

    def begin_epoch(self) -> None:
        """Called after all callbacks' `on_epoch_begin`."""
        for held in self._held:
            held.begin_epoch()

    def changed(self, step: int = 0) -> list[list[Any]]:
        """Returns `[class, values]` for each callback, before a step."""
        return [
            [type(callback).__name__, held.changed(step)]
            for callback, held in zip(self._callbacks, self._held, strict=True)
        ]

    def restore(self, saved: list[list[Any]]) -> None:
        """Gives the callbacks their former values."""
        here = [type(each).__name__ for each in self._callbacks]
        there = [name for name, *_ in saved]
        if here != there:
            raise ValueError(
                f"The checkpoint was saved with the callbacks {there}, and the "
                f"call has {here}. Their state belongs to the training: pass "
                "the same ones in the same order, or use another directory."
            )
        for held, (_, values) in zip(self._held, saved, strict=True):
            held.restore(values)


def _forms(values: dict[str, Any]) -> dict[str, plain_values.Form]:
    return {k: plain_values.Form(v) for k, v in values.items()}


def _savable(owner: Any) -> dict[str, Any]:
    """Returns the values of an object that are plain. These are no copies."""
    of_model = _variables_of_model(owner)
    set_anew = _SET_ANEW if _is_callback(owner) else ()
    found = {}
    for name, value in held_by(owner).items():
        if isinstance(owner, keras.callbacks.History):
            value = keras.tree.map_structure(_number_of, value)
        access = None if id(value) in of_model else plain_values.access(value)
        kept = plain_values.State(access[0]()) if access else value
        hidden = name in set_anew or ".__" in name
        if not hidden and plain_values.is_plain(kept):
            found[name] = kept
    return found


def _number_of(log: Any) -> Any:
    """Returns a log, or the value of a variable in its place."""
    access = plain_values.access(log)
    return access[0]() if access else log


def _by_all_names(values: dict[str, Any]) -> dict[str, Any]:
    """Returns once what may be changed in place and has several names."""
    names: dict[Any, list[str]] = {}
    for name, value in values.items():
        may_change = isinstance(value, (*_CONTAINERS, np.ndarray))
        names.setdefault(id(value) if may_change else name, []).append(name)
    return {_AND.join(each): values[each[0]] for each in names.values()}


def _with_each(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the same by each name."""
    return {k: v for names, v in values.items() for k in names.split(_AND)}


def _variables_of_model(owner: Any) -> set[int]:
    """Returns the identities of variables that are saved with the model."""
    model = getattr(owner, "model", None) if _is_callback(owner) else None
    return {id(variable) for variable in state.variables_of(model)}


def _references(values: dict[str, Any]) -> dict[str, weakref.ref]:
    """Returns references to arrays, by names."""
    found = values.items()
    return {k: weakref.ref(v) for k, v in found if isinstance(v, np.ndarray)}


def _give(owner: Any, values: dict[str, Any], in_place: Container[str]) -> None:
    """Sets attributes, and fills objects that others may hold, too.

    Arrays are filled if they are named as ones `in_place`.
    """
    held = held_by(owner)
    filled = {}
    for name, value in values.items():
        now = held.get(name)
        if not isinstance(value, plain_values.State):
            is_array = isinstance(now, np.ndarray)
            is_filled = (name in in_place or not is_array) and _fill(now, value)
            if is_filled or id(value) not in filled:
                filled[id(value)] = now
        elif access := plain_values.access(now):
            access[1](value.value)
    for name, value in values.items():
        # It was no container, or two names had the same one and no longer do.
        now = filled.get(id(value))
        same = plain_values.is_plain(now) and plain_values.digest(now) == (
            plain_values.digest(value)
        )
        now = now if same else value
        if id(value) in filled and held.get(name, _AND) is not now:
            _set(owner, name, now)


def _set(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute, past a `__setattr__`, in the class that has it."""
    of_class, _, name = name.rpartition(".")
    for each in type(owner).__mro__:
        if each.__name__ == of_class:
            return setattr(each, name, value)
    return object.__setattr__(owner, name, value)


def _fill(container: Any, value: Any) -> bool:
    """Gives a container the content of another one of its kind, if it is."""
    if isinstance(container, np.ndarray) and isinstance(value, np.ndarray):
        kinds = [(x.shape, x.dtype) for x in (container, value)]
        if is_filled := container.flags.writeable and kinds[0] == kinds[1]:
            container[...] = value
        return is_filled
    is_of_kind = type(container) is type(value)
    if is_container := is_of_kind and isinstance(container, _CONTAINERS):
        container.clear()
        is_keyed = isinstance(container, dict | set)
        (container.update if is_keyed else container.extend)(value)
    return is_container


def _is_callback(owner: Any) -> bool:
    return isinstance(owner, keras.callbacks.Callback)


def _functions_in(values: Any) -> list[Any]:
    """Returns the functions among values, and in their lists."""
    if isinstance(values, list | tuple):
        return [each for value in values for each in _functions_in(value)]
    return [values] if isinstance(values, FUNCTIONS) else []


def _set_by_keras(owner: Any) -> set[str]:
    """Returns the attributes that methods of Keras or this package set."""
    if isinstance(owner, keras.callbacks.History):  # as callbacks may, too
        return set()
    return {
        step.argval
        for each in type(owner).__mro__
        if each.__module__.startswith(held_variables.OF_KERAS)
        for function in vars(each).values()
        if isinstance(function, types.FunctionType)
        for step in dis.get_instructions(function)
        if step.opname == "STORE_ATTR"
    }


def _saved_with(owner: Any, names: Iterable[str]) -> set[int]:
    """Returns the identities of what is saved with it, or with its model."""
    model = getattr(owner, "model", None) if _is_callback(owner) else None
    saved = [owner, *type(owner).__mro__, *SAVED]
    saved += [model, *state.stateful_objects(model)]
    every = map(held_by(owner).get, names)
    saved += [x for x in every if isinstance(x, (*_CONTAINERS, *RANDOM))]
    return {*map(id, saved)} | _variables_of_model(owner)


def _can_lose_state(value: Any, known: set[int]) -> bool:
    if isinstance(value, list | tuple):
        return any(_can_lose_state(each, known) for each in value)
    if isinstance(value, WITH_VARIABLES):
        return not all(id(each) in known for each in value.variables)
    return id(value) not in known and not isinstance(value, _WITHOUT_STATE)
