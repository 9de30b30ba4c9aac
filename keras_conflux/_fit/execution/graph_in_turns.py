"""Runs the graph of a step in turns, one for each of several microbatches.

A step is traced once, for one microbatch. Where microbatches would exchange
something with each other, as replicas do, the graph is *cut*: behind a cut is
the sum, or another reduction, over all turns and all replicas. So cuts divide
the graph into phases. In each phase, operations that depend on a microbatch
become the body of a loop, whose turns add up the inputs of the cuts at its end.
All else is the same in each turn and runs once, before the loop. Earlier values
of a microbatch that a later phase needs are computed again in its loop.
"""

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._communication.transports.ops import Op
from keras_conflux._graphs import bodies
from keras_conflux._graphs import effects
from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks
from keras_conflux._graphs.effects import Effect
from keras_conflux._graphs.effects import effect_of

_WRITES_OFTEN = "writes in each turn what one device writes once"
_WRITES_BETWEEN = "writes a variable that turns read before and after it"
_RUNS_AGAIN = "would run more than once for the same samples"
_Known = dict[int, tf.Tensor]
"""By the ids of traced tensors, their counterparts where the graph runs."""
_MANY_TIMES = 3
"""How often turns may repeat a computation before a warning tells of it."""
_log = logging.getLogger("keras_conflux")
_logged: set[tuple[int, int]] = set()


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where turns exchange something."""

    value: tf.Tensor
    """The tensor in the graph: an identity of each turn's value."""
    op: Op
    """The reduction of the values of all turns."""
    stays_here: bool
    """Whether other replicas take no part."""

    @property
    def given(self) -> tf.Tensor:
        """The value of a turn."""
        return _behind_identities(self.value.op.inputs[0])


@dataclasses.dataclass(frozen=True)
class TracedTurn:
    """A step as it was traced for one microbatch."""

    graph: Any
    """Its graph, a `FuncGraph`."""
    arguments: Sequence[tf.Tensor]
    """The placeholders that differ from turn to turn."""
    cuts: Sequence[Cut]
    outputs: Sequence[tf.Tensor]
    """The results of the step, equal in all turns."""


class CannotRunInTurns(Exception):
    """A step does something in each turn that one device does once.

    Its arguments are the operation, and the reason.
    """


def run(
    traced: TracedTurn,
    count: int,
    arguments: Callable[[Any], Sequence[tf.Tensor]],
    everywhere: Callable[[Op, list[tf.Tensor]], list[tf.Tensor]],
    compiled: bool,
) -> list[tf.Tensor]:
    """Runs a step in the graph that is being traced, and returns its outputs.

    `arguments` takes the number of a turn, a tensor, and returns the values of
    the placeholders in it. `everywhere` reduces tensors with other replicas'.
    """
    plan = _Plan(traced, compiled)
    _log_if_repeated(plan.loops)
    runner = _Runner(traced, count, arguments, compiled)
    for phase, loop in enumerate(plan.loops):
        _copy(plan.once(phase), runner.known)
        pairs = list(zip(loop.cuts, runner.run_turns(loop), strict=True))
        _exchange(pairs, everywhere, runner.known)
    return [runner.known[id(each)] for each in plan.outputs]


def _log_if_repeated(loops: "list[_Loop]") -> None:
    """Logs, once a program, that turns compute the same many times."""
    computed = [each for loop in loops for each in loop.operations]
    times = len(computed) / max(1, len({*computed}))
    found = sum(bool(loop.cuts) for loop in loops), round(times)
    if times < _MANY_TIMES or found in _logged:
        return
    _logged.add(found)
    _log.warning(
        "with `microbatches=`, a step computes %d times what it has to: it "
        "exchanges something %d times, as each synchronized normalization "
        "does, and repeats all computations before that each time. Normalize "
        "by something else than the batch, or use `keras.RematScope` in place "
        "of `microbatches`.",
        *reversed(found),
    )


def _exchange(
    given: list[tuple[Cut, tf.Tensor]], everywhere: Callable, known: _Known
) -> None:
    """Adds the results of cuts to the known tensors."""
    by_op: dict[Op, list[tuple[Cut, tf.Tensor]]] = {}
    for cut, own in given:
        if cut.stays_here:
            known[id(cut.value)] = own
        else:
            by_op.setdefault(cut.op, []).append((cut, own))
    for op, pairs in by_op.items():
        reduced = everywhere(op, [own for _, own in pairs])
        for (cut, _), value in zip(pairs, reduced, strict=True):
            known[id(cut.value)] = value


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The computation of the turns of a phase."""

    cuts: list[Cut]
    outputs: list[tf.Tensor]
    operations: list[tf.Operation]
    """All that a turn runs, in order."""


class _Plan:
    """Which operations run when."""

    def __init__(self, traced: TracedTurn, compiled: bool) -> None:
        self._cuts = {cut.value.op: cut for cut in traced.cuts}
        self.outputs = [*map(_behind_identities, traced.outputs)]
        self._order = walks.to_run(traced.graph)
        self._positions = {each: at for at, each in enumerate(self._order)}
        self._before = {op: [x.op for x in _inputs(op)] for op in self._order}
        self._effects = [op for op in self._order if _must_run(op, compiled)]
        self._varying = {each.op for each in traced.arguments}
        """The operations that depend on the microbatch."""
        for operation in self._order:
            is_same = self._varying.isdisjoint(self._before[operation])
            if operation not in self._cuts and not is_same:
                self._varying.add(operation)
        self._needed = self._behind(
            [*(each.op for each in self.outputs), *self._effects]
        )
        for operation in self._needed:
            writes = effect_of(operation) & (Effect.WRITES | Effect.WAITS)
            if operation in self._varying and writes:
                raise CannotRunInTurns(operation, _WRITES_OFTEN)
        self._earliest: dict[tf.Operation, int] = {}
        self._find_phases()
        latest = self._latest_phases()
        # Cuts, as for a metric, share the last possible loops.
        self._earliest = {cut: latest[cut] for cut in self._cuts}
        self._schedule()

    def _behind(
        self, wanted: Iterable[tf.Operation], of_turns: bool = False
    ) -> list[tf.Operation]:
        """Returns operations and all that they depend on, in order."""

        def kept(found: Iterable[tf.Operation]) -> list[tf.Operation]:
            return [x for x in found if x in self._varying or not of_turns]

        found = walks.walked(kept(wanted), lambda x: kept(self._before[x]))
        return sorted(found, key=self._positions.__getitem__)

    def _latest_phases(self) -> dict[tf.Operation, int]:
        """Returns in which phases operations have to run at last."""
        last = len(self.loops) - 1
        latest = dict.fromkeys(self._order, last)
        for operation in reversed(self._order):
            before = latest[operation] - (operation in self._cuts)
            for each in self._before[operation]:
                latest[each] = min(latest[each], before)
            if operation not in self._cuts:
                for each in operation.control_inputs:
                    waits = self._waits(operation, each)
                    latest[each] = min(latest[each], before - waits)
        return latest

    def _schedule(self) -> None:
        """Finds the phases. No variable is written before all have read it."""
        for _ in range(len(self._cuts) + 2):
            self._find_phases()
            too_early = self._written_too_early()
            if not too_early:
                self._refuse_tables_in_several_loops()
                return
            self._earliest.update(too_early)
        operation = next(iter(too_early))
        raise CannotRunInTurns(operation, _WRITES_BETWEEN)

    def _find_phases(self) -> None:
        self._phases: dict[tf.Operation, int] = {}
        for operation in self._order:
            self._phases[operation] = self._phase(operation)
        last = max((self._phases[each] for each in self._needed), default=0)
        self.loops = [self._loop(phase) for phase in range(last + 1)]

    def _phase(self, operation: tf.Operation) -> int:
        """Returns in which phase an operation can run first."""
        phases = [self._phases[each] for each in self._before[operation]]
        if operation in self._cuts:
            return max(phases[0] + 1, self._earliest.get(operation, 0))
        for before in operation.control_inputs:
            waits = self._waits(operation, before)
            phases.append(self._phases[before] + waits)
        return max([*phases, self._earliest.get(operation, 0)])

    def _waits(self, operation: tf.Operation, before: tf.Operation) -> bool:
        """Whether an operation run once waits for the end of all turns."""
        return (
            before in self._varying
            and operation not in self._varying
            and before.op_def.is_stateful
        )

    def _loop(self, phase: int) -> _Loop:
        cuts = [
            self._cuts[each]
            for each in self._needed
            if each in self._cuts and self._phases[each] == phase + 1
        ]

        def is_here(operation: tf.Operation) -> bool:
            varies = operation in self._varying
            return varies and self._phases[operation] == phase

        outputs = [each for each in self.outputs if is_here(each.op)]
        ends = [cut.given.op for cut in cuts] + [x.op for x in outputs]
        ends += filter(is_here, self._effects)
        return _Loop(cuts, outputs, self._behind(ends, of_turns=True))

    def _written_too_early(self) -> dict[tf.Operation, int]:
        """Returns the phases of writes that have to wait for reads."""
        readers: dict[int, list[tuple[tf.Operation, int]]] = {}
        for phase, loop in enumerate(self.loops):
            for operation in loop.operations:
                for each in operation.inputs:
                    if each.dtype == tf.resource:
                        found = readers.setdefault(id(each), [])
                        found.append((operation, phase))
        positions, late = self._positions, dict[tf.Operation, int]()
        for operation in self._effects:
            if effects.only_reads(operation):
                continue
            for each in effects.ordered_by(operation):
                for reader, phase in readers.get(id(each), ()):
                    is_before = positions[reader] < positions[operation]
                    if is_before and self._phases[operation] <= phase:
                        late[operation] = phase + 1
        return late

    def _refuse_tables_in_several_loops(self) -> None:
        """Raises where replicas would wait for each other in a circle.

        TensorFlow runs a replica's loops that use a table one after another.
        """
        seen: dict[int, int] = {}
        for phase, loop in enumerate(self.loops):
            for operation in loop.operations:
                for each in effects.ordered_by(operation):
                    if seen.setdefault(id(each), phase) != phase:
                        raise CannotRunInTurns(operation, _RUNS_AGAIN)

    def once(self, phase: int) -> list[tf.Operation]:
        """Returns operations that run once in a phase, before its turns."""
        return [
            each
            for each in self._needed
            if each not in self._cuts
            and each not in self._varying
            and self._phases[each] == phase
        ]


class _Runner:
    """Puts the operations of a plan into the graph that is being traced."""

    def __init__(
        self, traced: TracedTurn, count: int, given: Callable, compiled: bool
    ) -> None:
        self._placeholders = traced.arguments
        self._count = count
        self._arguments = given
        self._compiled = compiled
        self._has_run: set[tf.Operation] = set()
        self.known: _Known = dict(bodies.captures(traced.graph))

    def run_turns(self, loop: _Loop) -> list[tf.Tensor]:
        """Runs the turns of a phase. Returns each cut's reduction over them."""
        if not loop.operations and not loop.cuts:
            return []
        self._note(loop.operations)
        sums = [_Accumulator(cut.given, cut.op) for cut in loop.cuts]
        lasts = [_Accumulator(each, None) for each in loop.outputs]
        found = self._loop(loop.operations, [*sums, *lasts])
        for each, value in zip(loop.outputs, found[len(sums) :], strict=True):
            self.known[id(each)] = value
        return found[: len(sums)]

    def _note(self, operations: list[tf.Operation]) -> None:
        """Raises if an operation that has run would have another result."""
        for each in operations:
            if effect_of(each) & ~effects.HARMLESS:
                if each in self._has_run:
                    raise CannotRunInTurns(each, _RUNS_AGAIN)
                self._has_run.add(each)

    def _loop(
        self, operations: list[tf.Operation], kept: list["_Accumulator"]
    ) -> list[tf.Tensor]:
        def turn(number: Any) -> list[tf.Tensor]:
            known = dict(self.known)
            given = self._arguments(number)
            keys = map(id, self._placeholders)
            known.update(zip(keys, given, strict=True))
            _copy(operations, known)
            return [known[id(each.given)] for each in kept]

        first: list[Any] = [None] * len(kept)
        if self._compiled and not all(each.is_known for each in kept):
            # XLA knows the shapes, and computes nothing for these.
            first = turn(tf.constant(0, tf.int64))
        begin = [each.begin(one) for each, one in zip(kept, first, strict=True)]

        def body(number: Any, before: list[tf.Tensor]) -> Any:
            new = turn(number)
            is_first = tf.equal(number, 0)
            after = [
                each.add(old, one, is_first, self._compiled)
                for each, old, one in zip(kept, before, new, strict=True)
            ]
            return number + 1, after

        shapes = [each.invariant(self._compiled) for each in kept]
        found = tf.while_loop(
            lambda number, _: number < self._count,
            body,
            (tf.constant(0, tf.int64), begin),
            shape_invariants=(tf.TensorShape([]), shapes),
            parallel_iterations=1,
        )[1]
        return [
            tf.cast(one, each.given.dtype)
            for each, one in zip(kept, found, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    """The value that a loop keeps of its turns' values."""

    given: tf.Tensor
    """The value of a turn, as traced."""
    op: Op | None
    """The reduction of two values; `None` keeps the latter."""

    @property
    def is_known(self) -> bool:
        """Whether the graph knows its shape."""
        return self.given.shape.is_fully_defined()

    @property
    def kept_dtype(self) -> tf.DType:
        """The kept dtype. Floats of 16 bits are rounded once, at last."""
        given = self.given.dtype
        is_rounded = given in (tf.float16, tf.bfloat16) and self.op is not None
        return tf.float32 if is_rounded else given

    def begin(self, first: tf.Tensor | None) -> tf.Tensor:
        """Returns the first value, of the shape of `first` if unknown."""
        dtype = self.kept_dtype
        neutral = self.op.neutral(dtype) if self.op else tf.zeros([], dtype)
        if self.is_known:
            return tf.fill(self.given.shape.as_list(), neutral)
        if first is not None:
            return tf.fill(tf.shape(first), neutral)
        return tf.fill([0] * (self.given.shape.rank or 0), neutral)

    def invariant(self, compiled: bool) -> tf.TensorShape:
        """Returns the shape that it has in all turns, as the graph knows it."""
        shape = self.given.shape
        if self.is_known or compiled or shape.rank is None:
            return shape
        return tf.TensorShape([None] * shape.rank)

    def add(
        self, old: tf.Tensor, new: tf.Tensor, is_first: Any, compiled: bool
    ) -> tf.Tensor:
        """Returns the value after a turn."""
        if self.op is None:
            return new
        new = tf.cast(new, self.kept_dtype)
        of_two = self.op.of_two
        if self.is_known or compiled:
            return of_two(old, new)
        return tf.cond(is_first, lambda: new, lambda: of_two(old, new))


def _copy(operations: Iterable[tf.Operation], known: _Known) -> None:
    """Puts operations into the graph that is being traced."""
    rewriting.copy_to_other(
        {x: _inputs(x) for x in operations if x.type != "Placeholder"}, known
    )


def _inputs(operation: tf.Operation) -> list[tf.Tensor]:
    return [*map(_behind_identities, operation.inputs)]


def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor behind operations that join cuts, for gradients."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _must_run(operation: tf.Operation, compiled: bool) -> bool:
    """Whether an operation has to run even if nothing uses its results."""
    # XLA leaves assertions out, and loops cannot be given their texts.
    passive = effects.HARMLESS if compiled else Effect.READS
    return bool(effect_of(operation) & ~passive)
