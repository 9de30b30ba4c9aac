"""The words for what a tensor is with respect to the global batch."""

import dataclasses
import enum

import tensorflow as tf


class Role(enum.Enum):
    """How a replica's tensor is related to that of one device."""

    EQUAL = "equal on all replicas"
    RANDOM = "drawn by each replica for itself"
    ROWS = "one entry per sample, along an axis"
    COUNT = "a number of samples, times a number that is equal on all replicas"
    SHAPE = "a shape with one entry that is a COUNT"
    TOTAL = "a sum over samples"
    MEAN = "a mean over samples"
    DERIVED = "computed from the above by something that is not linear"
    OPAQUE = "not known"


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows that were joined with others along their axis."""

    tensor: tf.Tensor
    axis: int
    blocks: int = 1
    joined: tuple["Block", ...] = ()
    """Of what they were joined themselves."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a tensor is with respect to the global batch."""

    role: Role
    axis: int | None = None
    """The axis of the samples of ROWS, or the position in a SHAPE. `None` if
    it is not known."""
    regular: bool = True
    """Whether each sample has the same number of entries along the axis."""
    mixed: bool = False
    """Whether the rows depend on other samples, or are in another order than
    the samples."""
    divided: bool = False
    """Whether the rows were divided by a COUNT."""
    places: bool = False
    """Whether the entries are positions of samples, as `tf.where` finds."""
    blocks: int = 1
    """How many tensors of rows were joined along the axis, one after the
    other."""
    joined: tuple[Block, ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )
    """Those tensors, whose lengths are in the proportion of the blocks. Where
    they are not known, blocks are of one length."""
    beginnings: bool = False
    """Whether it is OPAQUE but for saying where the values of each sample of a
    ragged tensor begin."""

    @property
    def is_unknown(self) -> bool:
        """Whether one cannot tell which entries belong to which samples."""
        without_axis = self.role is Role.ROWS and self.axis is None
        return self.role is Role.OPAQUE or without_axis

    @property
    def is_entangled(self) -> bool:
        """Whether a row is not what one device would have for its sample."""
        return self.mixed or self.divided or self.places

    @property
    def is_tangled(self) -> bool:
        """Whether the replicas' rows, joined, are not those of one device."""
        return self.is_entangled or self.blocks > 1

    def at(self, axis: int | None) -> "Kind":
        """Returns the same kind with the samples along another axis."""
        return dataclasses.replace(self, axis=axis)


EQUAL = Kind(Role.EQUAL)
RANDOM = Kind(Role.RANDOM)
COUNT = Kind(Role.COUNT)
TOTAL = Kind(Role.TOTAL)
COUNTED = Kind(Role.TOTAL, regular=False)
"""A sum over samples that leaves out what a stand-in for samples adds."""
MEAN = Kind(Role.MEAN)
DERIVED = Kind(Role.DERIVED)
OPAQUE = Kind(Role.OPAQUE)
BEGINNINGS = Kind(Role.OPAQUE, beginnings=True)


def rows(axis: int | None, regular: bool = True, mixed: bool = False) -> Kind:
    """Returns the kind of a tensor with one entry per sample."""
    return Kind(Role.ROWS, axis, regular, mixed)


def count(regular: bool) -> Kind:
    """Returns the kind of a number of entries along the axis of the samples.

    Args:
        regular: Whether each sample has the same number of them.
    """
    return COUNT if regular else TOTAL


def combined(kinds: list[Kind], axis: int | None, mixed: bool = False) -> Kind:
    """Returns the kind of rows each of which is made of one row of several.

    Args:
        kinds: Of the role ROWS.
        axis: The axis of the samples in the result.
        mixed: Whether the rows of the result depend on other samples.
    """
    regular = all(kind.regular for kind in kinds)
    blocks = {kind.blocks for kind in kinds}
    mixed = mixed or any(kind.is_entangled for kind in kinds)
    if len(blocks) > 1:
        return rows(axis, regular, mixed=True)
    return dataclasses.replace(
        rows(axis, regular, mixed), blocks=blocks.pop(), joined=kinds[0].joined
    )


def shape(axis: int, regular: bool = True) -> Kind:
    """Returns the kind of a shape whose entry at `axis` is a COUNT."""
    return Kind(Role.SHAPE, axis, regular)
