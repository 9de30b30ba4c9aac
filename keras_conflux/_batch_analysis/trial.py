"""Finds out by running it how a graph computes from samples."""

import contextlib
import itertools
from collections.abc import Container
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.derivation import MAX_OPERATIONS
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.trial_program import RandomValues
from keras_conflux._batch_analysis.trial_program import Results
from keras_conflux._batch_analysis.trial_program import TrialProgram
from keras_conflux._graphs import bodies
from keras_conflux._graphs import walks

_TRIALS = (
    *(((2, 3), 1), ((4, 1), 0.1), ((1, 4), 30), ((3, 2), None)),
    *(((1, 2), 1), ((1, 1), 3), ((11, 6), 1), ((60, 200), 1)),
)
"""The numbers of samples of the parts, and the scale of their values. Positions
of the best of few samples may all look the same to later operations."""
_STEPS = 1e6
"""A number of steps after which all gates are open, or closed, that steps open
or close."""
_LARGE = 1 << 26
"""Of programs that compute more entries of all samples, the first is run."""
_INTEGERS = (*((0, n) for n in (1000, 100, 30, *range(16, 1, -1))), (1, 3))
"""The limits of integers. The first are taken that can be run: integers may be
places, or numbers of steps, of which there is at least one."""
_MAX_TRIALS = 12
"""The most tensors to try out, for the kind of a tensor made of them."""


def kind_by_trial(tensor: tf.Tensor, kinds: KindInference) -> Kind:
    """Returns the kind of a tensor, by a trial if no rule tells."""
    kind = kinds.of(tensor)
    is_tried = kinds.is_blind or id(tensor) in kinds.tried
    if kind.role is not Role.OPAQUE or is_tried:
        return kind
    _show_rows_behind(tensor, kinds)
    kind = kinds.of(tensor)
    if kind.role is Role.OPAQUE and tensor.shape.rank == 0:
        kind = statistic_by_trial(tensor, kinds) or kind
        if kind.role is not Role.OPAQUE:
            kinds.mark(tensor, kind)
    kinds.tried[id(tensor)] = tensor
    return kind


def _show_rows_behind(tensor: tf.Tensor, kinds: KindInference) -> None:
    """Says of tensors of which one is made that they are rows, if they are.

    Those next to it come first, such as the losses of samples before their sum.
    """
    waiting, seen, trials, found = [tensor], set(), 0, False
    while waiting and trials < _MAX_TRIALS and len(seen) < MAX_OPERATIONS:
        each = waiting.pop(0)
        kind = kinds.of(each)
        if id(each) in seen or kind.role is not Role.OPAQUE:
            continue
        seen.add(id(each))
        if each.shape.rank and each.shape[0] is None:
            trials += 1
            with contextlib.suppress(NotDerivable):
                rows = rows_by_trial(each, kinds)
                if rows is not None:
                    kinds.mark(each, rows)
                    found = True
                    continue
        waiting.extend(each.op.inputs)
    if found:
        kinds.read_again()


def rows_by_trial(
    output: tf.Tensor,
    kinds: KindInference,
    given: Iterable[tf.Tensor] = (),
    is_deep: bool = True,
) -> Kind | None:
    """Returns the kind of rows that a tensor of samples is found to be.

    It is `None` if samples touch each other. See `TrialProgram`, which
    raises `NotDerivable` for a tensor that cannot be run.
    """
    program = TrialProgram(output, kinds, given, is_deep)
    results = _results(program)
    found = [_entries(each, program.is_precise) for each in results]
    if None in found or not _have_chosen(program, results):
        return None
    entries = found[0] if len({*found}) == 1 else None
    return Kind(Role.ROWS, entries=entries or Entries.VARYING)


def statistic_by_trial(
    output: tf.Tensor, kinds: KindInference, given: Iterable[tf.Tensor] = ()
) -> Kind | None:
    """Returns MEAN or TOTAL for what is found to be one, or `None`."""
    for is_deep in (False, True):
        with contextlib.suppress(NotDerivable):
            program = TrialProgram(output, kinds, given, is_deep)
            results = _results(program)
            if _have_chosen(program, results):
                for kind in (MEAN, TOTAL):
                    if all(_adds_up(each, kind) for each in results):
                        return kind
    return None


def _results(program: TrialProgram) -> list[Results]:
    """Returns the results of a program for samples on which it can run."""
    small = [x for x in _TRIALS if sum(x[0]) * program.entries <= _LARGE]
    for integers in _INTEGERS:
        few = integers[0], min(integers[1], 10)  # of which some come twice
        trials = [
            (sizes, RandomValues(scale, few if seed % 2 else integers, seed))
            for seed, (sizes, scale) in enumerate(small or _TRIALS[:1])
        ]
        others = [RandomValues(1, integers, 99, rare=x) for x in program.rare]
        if not program.has_loops:
            others.append(RandomValues(1, integers, 99, steps=_STEPS))
        try:
            results = program.results(trials, [((6, 5), x) for x in others])
        except tf.errors.DeadlineExceededError:
            break
        except tf.errors.OpError:  # as of a place that is not there
            continue
        telling = [
            each
            for each in results
            if each.whole.dtype.kind in "biu" or np.isfinite(each.whole).any()
        ]
        if telling:
            return telling
    raise NotDerivable(program.name)


def uses(
    output: tf.Tensor, given: Iterable[tf.Tensor], types: Container[str]
) -> bool:
    """Whether operations of some types are between tensors and a result."""
    ends = {id(tensor) for tensor in given}

    def needed(tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
        return [each.op for each in tensors if id(each) not in ends]

    walked = walks.walked(needed([output]), lambda x: needed(x.inputs))
    return any(
        bodies.is_or_runs(operation, lambda each: each.type in types)
        for operation in itertools.islice(walked, MAX_OPERATIONS)
    )


def _entries(result: Results, is_precise: bool) -> Entries | None:
    """Returns how many entries samples have; `None` if they are mixed.

    Entries that jump where samples change by a rounding are left out.
    """
    whole = result.whole
    if any(part.shape[1:] != whole.shape[1:] for part in result.parts):
        return None
    joined = np.concatenate(result.parts)
    if joined.shape != whole.shape:
        return None
    stable = np.all([_is_close(x, whole) for x in result.nudged], axis=0)
    if 2 * stable.sum() < stable.size:
        return None
    if not _is_close(joined, whole)[stable].all():
        return None
    if is_precise and not _is_rounded(joined, result, stable):
        return None
    lengths = [len(part) for part in result.parts]
    if lengths == [*result.sizes]:
        return Entries.ONE
    pairs = zip(lengths, result.sizes, strict=True)
    one, other = (n / size for n, size in pairs)
    return Entries.SAME if one == other else Entries.VARYING


def _is_rounded(joined: Any, result: Results, stable: Any) -> bool:
    """Whether parts differ from the whole by no more than roundings.

    These are smaller than nudges, and what is computed amplifies both alike.
    """
    whole = result.whole
    if whole.dtype.kind in "biu":
        return True
    compared = stable & np.isfinite(whole)
    numbers = whole[compared]
    found, *noise = (
        np.abs(x[compared] - numbers).max(initial=0)
        for x in (joined, *result.nudged)
    )
    return found <= 10 * max(noise) + 1e-5 * np.abs(numbers).max(initial=0)


def _have_chosen(program: TrialProgram, results: list[Results]) -> bool:
    """Whether parts have once chosen otherwise than the whole, in each choice.

    Else random samples may all take one branch, or a loop's most turns. Each
    comparison has to be true once, and false once.
    """
    told = zip(*(each.told for each in results), strict=True)
    return all(
        any(not np.array_equal(x[0], y) for x in found for y in x)
        if is_choice
        else np.any([x[0] for x in found], 0).all()
        for is_choice, found in zip(program.are_choices, told, strict=True)
    )


def _adds_up(result: Results, kind: Kind) -> bool:
    """Whether the parts add up, or average, to the result of the whole."""
    numbers = [np.asarray(part, np.float64) for part in result.parts]
    scale = np.max(np.abs(numbers), initial=1e-6)
    found = np.sum(numbers, axis=0)
    if kind == MEAN:
        found = np.average(numbers, axis=0, weights=result.sizes)
    return np.allclose(found, result.whole, 1e-4, 1e-5 * scale)


def _is_close(one: Any, other: Any) -> Any:
    """Returns where numbers are equal up to roundings, as an array."""
    if one.dtype.kind in "biu":
        return one == other
    one, other = (
        np.asarray(x, complex if x.dtype.kind == "c" else float)
        for x in (one, other)
    )
    scale = np.abs(other[np.isfinite(other)]).max(initial=1e-6)
    return np.isclose(one, other, 1e-3, 1e-4 * scale, equal_nan=True)
