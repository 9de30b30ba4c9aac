"""The kinds of tensors with respect to the global batch."""

import dataclasses
import enum
import functools
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf


class Role(enum.Enum):
    """The relation of a replica's tensor to the tensor of one device."""

    EQUAL = "equal on all replicas"
    RANDOM = "drawn by each replica for itself"
    ROWS = "entries of each sample, one sample after the other, along an axis"
    COUNT = "a number of samples, times a number that is equal on all replicas"
    SHAPE = "a shape with one entry that is a COUNT"
    TOTAL = "a sum over samples"
    MEAN = "a mean over samples"
    DERIVED = "computed from the above by something that is not linear"
    OPAQUE = "not known"


class Entries(enum.Enum):
    """How many entries each sample has along the axis of ROWS."""

    ONE = "one"
    SAME = "as many as each other sample"
    VARYING = "some"


@dataclasses.dataclass(frozen=True)
class Kind:
    """The relation of a tensor to the global batch."""

    role: Role
    axis: int = 0
    """The axis of the samples of ROWS, or the position in a SHAPE."""
    entries: Entries = Entries.ONE
    """How many entries of ROWS each sample has along the axis."""
    mixed: bool = False
    """Whether ROWS are such by their shape alone: the values are DERIVED, as
    they depend on other samples or are in another order."""
    divided: bool = False
    """Whether the rows were divided by a COUNT."""
    are_positions: bool = False
    """Whether the entries are positions of samples, as `tf.where` finds."""
    blocks: int = 1
    """How many tensors of rows were joined along the axis."""
    joined: tuple["Block", ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )
    """Those tensors, whose lengths are in the proportion of the blocks. Where
    they are not known, blocks are of one length."""
    are_row_splits: bool = False
    """Whether these are the row splits of a ragged tensor; otherwise OPAQUE."""
    counted: bool = False
    """Whether a TOTAL leaves out the summands of a stand-in for samples."""

    @functools.cached_property
    def form(self) -> "Form":
        """The form that rules accept, the same for rows that are mixed."""
        if self.role is not Role.ROWS:
            return Form.COUNTED if self.counted else Form[self.role.name]
        if self.are_positions:
            return Form.PLACES
        if self.divided:
            return Form.DIVIDED
        return Form.JOINED if self.blocks > 1 else Form.ROWS

    @property
    def regular(self) -> bool:
        """Whether each sample has the same number of entries."""
        return self.entries is not Entries.VARYING

    @property
    def has_several_each(self) -> bool:
        """Whether these are several rows of each sample that follow it."""
        is_rows = self.role is Role.ROWS and self.blocks == 1
        return is_rows and self.entries is Entries.SAME

    @property
    def depends_on_other_samples(self) -> bool:
        """Whether a row differs from one device's row for its sample."""
        return self.mixed or self.divided or self.are_positions

    @property
    def needs_all_samples(self) -> bool:
        """Whether replicas have to compute a value together."""
        return self.role is Role.DERIVED or self.depends_on_other_samples

    @property
    def is_out_of_order(self) -> bool:
        """Whether the replicas' rows, joined, differ from one device's."""
        return self.depends_on_other_samples or self.blocks > 1

    @property
    def are_joined(self) -> bool:
        """Whether the replicas' rows, joined, equal one device's."""
        is_first_axis = self.role is Role.ROWS and self.axis == 0
        return is_first_axis and not self.is_out_of_order

    def at(self, axis: int) -> "Kind":
        """Returns the same kind with the samples along another axis."""
        return dataclasses.replace(self, axis=axis)

    def with_entries(self, entries: Entries) -> "Kind":
        """Returns the same kind with other numbers of entries per sample."""
        return dataclasses.replace(self, entries=entries)


class Form(enum.IntFlag):
    """The kinds that rules tell apart, to be joined by `|`."""

    EQUAL = enum.auto()
    RANDOM = enum.auto()
    ROWS = enum.auto()
    JOINED = enum.auto()
    DIVIDED = enum.auto()
    PLACES = enum.auto()
    COUNT = enum.auto()
    SHAPE = enum.auto()
    TOTAL = enum.auto()
    COUNTED = enum.auto()
    MEAN = enum.auto()
    DERIVED = enum.auto()
    OPAQUE = enum.auto()


EQUAL = Kind(Role.EQUAL)
RANDOM = Kind(Role.RANDOM)
COUNT = Kind(Role.COUNT)
TOTAL = Kind(Role.TOTAL)
COUNTED = Kind(Role.TOTAL, counted=True)
"""A sum over samples that leaves out the summands of a stand-in."""
MEAN = Kind(Role.MEAN)
DERIVED = Kind(Role.DERIVED)
OPAQUE = Kind(Role.OPAQUE)
ROW_SPLITS = Kind(Role.OPAQUE, are_row_splits=True)


class Block(NamedTuple):
    """Rows that were joined with others along their axis."""

    tensor: tf.Tensor
    kind: Kind

    @property
    def one_each(self) -> bool:
        """Whether it has one row per sample."""
        return self.kind.entries is Entries.ONE


def rows(axis: int, regular: bool = True) -> Kind:
    """Returns the kind of rows: one entry per sample along an axis, or some."""
    return Kind(Role.ROWS, axis, Entries.ONE if regular else Entries.VARYING)


def mixed_rows(kinds: Iterable[Kind], axis: int) -> Kind:
    """Returns the kind of DERIVED values of the shape of rows along an axis.

    The kinds are of rows that are as many along their own axes, if known.
    """
    entries = _entries_of(kinds)
    if entries is Entries.VARYING:
        return DERIVED
    return Kind(Role.ROWS, axis, entries, mixed=True)


def one_of_rows(one: Kind, other: Kind) -> Kind:
    """Returns the kind of one of two, as all replicas choose alike."""
    entries = max(one.entries, other.entries, key=list(Entries).index)
    one, other = one.with_entries(entries), other.with_entries(entries)
    if one == other and one.blocks == 1:
        return one
    return mixed_rows([one], one.axis)


def combined(kinds: list[Kind], axis: int) -> Kind:
    """Returns the kind of rows that take one row of each input."""
    first = kinds[0]
    if any(x.depends_on_other_samples or not _alike(x, first) for x in kinds):
        return mixed_rows(kinds, axis)
    entries = _entries_of(kinds)
    return dataclasses.replace(first, axis=axis, entries=entries)


def kind_of_filled(values: Kind, beginnings: Iterable[Kind]) -> Kind | None:
    """Returns the kind of ragged samples that are filled up on all replicas.

    It takes the kinds of a ragged tensor's values and of its row splits.
    """
    is_of_samples = values.are_joined and set(beginnings) == {ROW_SPLITS}
    return values.with_entries(Entries.ONE) if is_of_samples else None


def _entries_of(kinds: Iterable[Kind]) -> Entries:
    """Returns the entries per sample of rows that have as many, together."""
    each = {kind.entries for kind in kinds}
    if Entries.VARYING in each:
        return Entries.VARYING
    return Entries.ONE if Entries.ONE in each else Entries.SAME


def _alike(one: Kind, other: Kind) -> bool:
    """Whether rows are joined of blocks in the same proportions."""
    if one.blocks == 1 or one.blocks != other.blocks:
        return one.blocks == other.blocks
    return len(one.joined) == len(other.joined) and all(
        a.tensor is b.tensor
        or (a.one_each and b.one_each)
        or (a.kind.blocks > 1 and _alike(a.kind, b.kind))
        for a, b in zip(one.joined, other.joined, strict=True)
    )


def shape(axis: int, regular: bool = True) -> Kind:
    """Returns the kind of a shape whose entry at `axis` is a COUNT.

    It is a TOTAL unless each sample has the same number of entries.
    """
    return Kind(Role.SHAPE, axis, Entries.SAME if regular else Entries.VARYING)


def count(regular: bool) -> Kind:
    """Returns the kind of a number of entries, regular or not."""
    return COUNT if regular else TOTAL
