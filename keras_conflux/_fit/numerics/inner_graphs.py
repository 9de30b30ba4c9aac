"""Tells the arguments of loops and functions inside of a step."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import Role
from keras_conflux._common.contexts import having
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics.choices import Choices
from keras_conflux._fit.numerics.writes import Writes
from keras_conflux._replication import steps


def while_loop(
    original: Callable,
    cond: Callable,
    body: Callable,
    loop_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Traces a loop, and notes its turns for draws in it.

    Rows that a loop begins with are rows in each turn, as a loop keeps the
    shapes of its values. Integers are taken to count turns.
    """
    step = steps.current_fit_step()
    if step is None:
        return original(cond, body, loop_vars, *args, **kwargs)
    loop = _Loop(step, [step.kinds.of(x) for x in _flat(loop_vars)])
    loop.note_turns(kwargs.get("maximum_iterations"))

    def traced_cond(*inside: Any) -> Any:
        loop.mark(inside)
        goes_on = cond(*inside)
        loop.note_turns(goes_on)
        return goes_on

    def traced_body(*inside: Any) -> Any:
        loop.mark(inside)
        written = Writes.of(step).count
        around = Loops.of(step)
        over_samples = around.over_samples or loop.may_be_over_samples
        with having(around, over_samples=over_samples):
            turned = body(*inside)
        if Writes.of(step).count > written:
            loop.warn_of_writes(turned)
        return turned

    return original(traced_cond, traced_body, loop_vars, *args, **kwargs)


class Loops(steps.Part):
    """The loops around the graph that a step traces now."""

    over_samples = False
    """Whether one of them may have a turn for each sample."""


class _Loop:
    """The facts about a loop, of which the initial values have some kinds."""

    def __init__(self, step: steps.Step, kinds: list[Kind]) -> None:
        self.may_be_over_samples = step.kinds.is_blind
        self._step = step
        self._kinds = kinds

    def note_turns(self, tells: Any) -> None:
        """Notes a value that determines the number of turns."""
        if tells is not None and self._step.kinds.of(tells) != EQUAL:
            self.may_be_over_samples = True

    def mark(self, inside: Any) -> None:
        """Marks the kinds of a turn's tensors, as far as they are known."""
        for tensor, kind in self._kept(inside):
            self._step.kinds.mark(tensor, kind)

    def warn_of_writes(self, turned: Any) -> None:
        """Warns of later turns' writes, if they are not of the assumed kind."""
        if self._step.kinds.is_blind:
            return
        for tensor, kind in self._kept(turned):
            found = self._step.kinds.of(tensor)
            mixes = found.depends_on_other_samples
            if found.role is not kind.role or (
                mixes and not kind.depends_on_other_samples
            ):
                self._step.warn_once(
                    "writes in a loop",
                    "the step writes a variable or updates a metric in a loop "
                    "whose next turn needs a value of all samples, and a "
                    "replica has only its own. Write it after the loop, or "
                    "give the loop the value of all replicas, with "
                    "`keras_conflux.allreduce` before it.",
                )
                return

    def _kept(self, values: Any) -> Iterator[tuple[tf.Tensor, Kind]]:
        """Yields the tensors of a turn that have one kind in all turns."""
        tensors = _flat(values)
        pairs = zip(tensors, self._kinds, strict=False)
        for tensor, kind in pairs if len(tensors) == len(self._kinds) else ():
            if tf.is_tensor(tensor) and tensor.dtype != tf.variant:
                counts = kind == EQUAL and tensor.dtype.is_integer
                if counts or kind.role is Role.ROWS:
                    yield tensor, kind


def call(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a `tf.function`, and notes its arguments.

    Its writes and collectives are noted while it is traced. So each step traces
    it anew for each place of a call, and in `fit` for all kinds that arguments
    have, and values that the step has written to variables.
    """
    step = steps.current()
    if keras_optimizers.stateless_scope() is not None:
        # No trace of a build may be called in a step: it lacks all writes.
        return original(tensorflow_tracing.untraced(function), *args, **kwargs)
    if step is None or tf.executing_eagerly():
        return original(function, *args, **kwargs)
    flat = _flat((args, kwargs))
    # A function has a placeholder for each of these.
    given = [
        x for x in flat if tf.is_tensor(x) or type(x).__module__ == "numpy"
    ]
    own = _Functions.of(step).own(function, given)
    if step.kinds is None:  # of a loop
        return original(own, *args, **kwargs)
    with Choices.of(step).calling(), step.kinds.calling(given):
        return original(own, *args, **kwargs)


class _Functions(steps.Part):
    """The functions that a step calls in place of the program's."""

    def __init__(self, step: steps.Step) -> None:
        super().__init__(step)
        self._own: dict[Any, Any] = {}
        self._known: list[Any] = []

    def own(self, function: Any, given: list[Any]) -> Any:
        """Returns the one for a function that is called here."""
        graph = tf.compat.v1.get_default_graph()
        key: tuple[Any, ...] = id(function), id(graph)
        if self.step.kinds is not None:
            held = self.step.kinds.held(graph).items()
            key += frozenset(held), *map(self._identity, given)
        if key not in self._own:
            self._own[key] = tensorflow_tracing.untraced(function)
            self._known.append((function, graph, given))  # ids stay theirs
        return self._own[key]

    def _identity(self, leaf: Any) -> Any:
        """Returns the key by which traces for an argument are told apart.

        A value of several samples may have been made of other inputs before.
        """
        kind = self.step.kinds.of(leaf)
        return (kind, id(leaf)) if kind.needs_all_samples else kind


def _flat(tree: Any) -> list[Any]:
    return tf.nest.flatten(tree, expand_composites=True)
