"""Claims that are made wrong in one place."""

import dataclasses

from kinds_in_numbers import fault

from keras_conflux._batch_analysis.kinds import COUNT
from keras_conflux._batch_analysis.kinds import COUNTED
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows


def wrong_claims(kind, rank):
    """Yields names of other claims, which say as much or more, and them."""
    if kind.role is Role.ROWS:
        yield from _wrong_rows(kind, rank)
        return
    if kind.role is Role.SHAPE:
        yield "EQUAL", EQUAL
        yield "place", kind.at(1 if kind.axis == 0 else kind.axis - 1)
        if not kind.regular:
            yield "regular", kind.with_entries(Entries.SAME)
        return
    others = {
        Role.EQUAL: (("TOTAL", TOTAL), ("COUNT", COUNT)),
        Role.MEAN: (("EQUAL", EQUAL), ("TOTAL", TOTAL), ("COUNTED", COUNTED)),
        Role.COUNT: (("EQUAL", EQUAL), ("MEAN", MEAN), ("COUNTED", COUNTED)),
        Role.TOTAL: (
            *(("EQUAL", EQUAL), ("MEAN", MEAN), ("COUNT", COUNT)),
            ("TOTAL", TOTAL) if kind.counted else ("COUNTED", COUNTED),
        ),
    }
    yield from others.get(kind.role, ())
    if rank and kind.role in others:
        yield "ROWS", rows(0)


def _wrong_rows(kind, rank):
    yield "EQUAL", EQUAL
    yield "TOTAL", TOTAL
    yield "MEAN", MEAN
    if rank > 1:
        yield "axis", kind.at((kind.axis + 1) % rank)
    if kind.mixed:
        yield "not mixed", dataclasses.replace(kind, mixed=False)
    elif not kind.are_positions:
        yield "places", dataclasses.replace(kind, are_positions=True)
    if kind.are_positions:
        yield "no places", dataclasses.replace(kind, are_positions=False)
    if kind.blocks > 1:
        yield "one block", dataclasses.replace(kind, blocks=1, joined=())
    elif not kind.mixed and not kind.are_positions:
        divided = not kind.divided
        yield "divided", dataclasses.replace(kind, divided=divided)
    for entries in _more_regular(kind.entries):
        yield entries.name, kind.with_entries(entries)


def _more_regular(entries):
    order = [Entries.ONE, Entries.SAME, Entries.VARYING]
    return order[: order.index(entries)]


def class_of(kind):
    """Returns what is claimed, without the axis."""
    words = [kind.role.name, kind.entries.name if _has_entries(kind) else ""]
    claims = {
        "mixed": kind.mixed,
        "divided": kind.divided,
        "places": kind.are_positions,
        "counted": kind.counted,
    }
    words += [name for name, holds in claims.items() if holds]
    return " ".join([*filter(None, words), *["joined"] * (kind.blocks > 1)])


def _has_entries(kind):
    return kind.role in (Role.ROWS, Role.SHAPE)


def of_claims(walk):
    """Returns whether numbers refute what is made of the claims of a walk."""
    refuted = {}
    for call in walk.calls:
        for i, kind in enumerate(call.kinds):
            numbers = walk.numbers[id(call)][i]
            rank = len(getattr(numbers.whole, "shape", ()))
            for name, wrong in wrong_claims(kind, rank):
                key = f"rule {call.fired}, output {i}: {class_of(kind)}, {name}"
                if not refuted.get(key):
                    refuted[key] = fault(wrong, numbers) is not None
    return refuted
