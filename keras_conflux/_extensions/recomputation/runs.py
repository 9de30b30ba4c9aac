"""The state of which a call is run a second time with the same result.

The first run is the one that counts. It notes the value of each variable before
the call, and after each write. In the second run variables hold just these, so
that it draws the same numbers and normalizes by the same statistics. Writes of
the second run are dropped.
"""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._extensions.recomputation import compat
from keras_conflux._extensions.recomputation.replica_effects import CallInStep
from keras_conflux._replication import state

_local = threading.local()


def current() -> "FirstRun | SecondRun | None":
    """Returns the run of a recomputed call that this thread is in."""
    if getattr(_local, "run", None) is None or compat.asks_for_shapes():
        return None
    return _local.run


def read(original: Callable, variable: keras.Variable) -> Any:
    """Reads a variable, and tells the run that is current."""
    run = current()
    if run is None:
        return original(variable)
    if state.is_in_parts(state.backing(variable)):
        return run.read_whole(original, variable)
    run.before_read(variable)
    return original(variable)


def assign(original: Callable, variable: keras.Variable, value: Any) -> Any:
    """Writes to a variable in the first run, and not in the second one."""
    run = current()
    if run is None:
        return original(variable, value)
    return run.write(original, variable, value)


@contextlib.contextmanager
def _entered(run: "FirstRun | SecondRun") -> Iterator[None]:
    _local.run = run
    try:
        yield
    finally:
        _local.run = None


class FirstRun:
    """The call that counts, which notes the state for a second one.

    Args:
        name: The name of the layer in messages.
        owner: The layer that is called, if it is one.
    """

    def __init__(self, name: str, owner: keras.layers.Layer | None) -> None:
        self.name = name
        self.graph: Any = tf.compat.v1.get_default_graph()
        self.before: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.after: dict[int, list[tf.Tensor]] = {}
        self.trained: list[tf.Tensor] = []
        self.whole: dict[tuple[int, str], tf.Tensor] = {}
        self.in_step = CallInStep()
        self.python = compat.PythonState(owner)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Returns a scope in which the call is to run."""
        return _entered(self)

    def before_read(self, variable: keras.Variable) -> None:
        """Notes the value of a variable, so that nobody reads it again.

        Weights as well, which an optimizer may update before all gradients
        are taken, as a GAN's other model's does.
        """
        self._note_value(variable)

    def read_whole(self, original: Callable, variable: keras.Variable) -> Any:
        """Reads a weight that lies in parts, as the second run will.

        Its readers in the backward pass are pointed at a second gathering, so
        that it is not kept until then.
        """
        key = id(variable), variable.dtype
        if key not in self.whole:
            found = self._here(original(variable))
            self.whole[key] = found
            if variable.trainable:
                self.trained.append(found)
        return self.whole[key]

    def _here(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor, which may be one of a graph around this one.

        Else its gradient would count twice: for it, and for its capture.
        """
        is_outside = tensor.graph is not self.graph
        return self.graph.capture(tensor) if is_outside else tensor

    def write(
        self, original: Callable, variable: keras.Variable, value: Any
    ) -> Any:
        """Writes to a variable. Notes its value before, and now."""
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise NotImplementedError(
                f"{self.name} writes the variable {variable.path!r} in a loop, "
                "a branch or a function of TensorFlow, where its former value "
                "cannot be kept for the recomputation. Write it outside of "
                "these, or leave the layer out of `keras.RematScope`."
            )
        self._note_value(variable)
        written = original(variable, value)
        held = self._held(variable)
        if held is not None:
            self.after.setdefault(id(variable), []).append(held)
        return written

    def _note_value(self, variable: keras.Variable) -> None:
        if id(variable) in self.before:
            return
        with self.graph.as_default():
            held = self._held(variable)
        if held is not None:
            self.before[id(variable)] = variable, held

    def _held(self, variable: keras.Variable) -> tf.Tensor | None:
        held = compat.value_of(variable)
        if held is not None and variable.trainable:
            self.trained.append(held)
        return held

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        """Everything is as when the call began, and nothing is written."""
        with (
            keras.StatelessScope([*self.before.values()]),
            self.python.restored(),
            self.in_step.second_run(),
            _entered(SecondRun(self)),
        ):
            yield


class SecondRun:
    """The same call for the backward pass.

    Args:
        first: The run that it repeats.
    """

    def __init__(self, first: FirstRun) -> None:
        self._first = first
        self._after = {key: iter(held) for key, held in first.after.items()}

    def before_read(self, variable: keras.Variable) -> None:
        """Refuses to read a variable that may have been written since."""
        if id(variable) not in self._first.before:
            raise NotImplementedError(
                f"{self._first.name} reads the variable {variable.path!r} only "
                "when it is computed again for the backward pass. It depends "
                "on something in Python that its first run has changed. Leave "
                "the layer out of `keras.RematScope`."
            )

    def read_whole(self, original: Callable, variable: keras.Variable) -> Any:
        """Returns the first run's value of a weight that lies in parts."""
        del original
        found = self._first.whole.get((id(variable), variable.dtype))
        if found is None:
            self.before_read(variable)
        return found

    def write(
        self, original: Callable, variable: keras.Variable, value: Any
    ) -> Any:
        """Puts the value of the first run, which is dropped at the end."""
        del original
        held = next(self._after.get(id(variable), iter(())), None)
        if held is None:
            self.before_read(variable)
        else:
            compat.put_value(variable, held)
        return compat.as_written(variable, value)
