"""The ways in which something leaves a step that replicas must make global.

Gradients, writes, returns, choices and draws: whatever a step computes from a
replica's own samples stays inside of it, unless it leaves by one of these.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from keras_conflux._common.trees import Tree
from keras_conflux._replication.steps import Part


@dataclasses.dataclass
class Merged:
    """What the replicas' steps have returned, and what becomes of it."""

    outputs: list[Tree]
    """One of each replica."""
    fractions: list[Any]
    """Their samples over those of the global batch."""
    sizes: list[Any]
    """How many samples each has, or `None` if it surely has some."""
    result: Tree = None
    """What one device would have returned."""


class TraceAgain(Exception):
    """A step was traced and has to be traced again before it runs.

    Args:
        untracked: The variables that it writes and that have a single copy.
        counted: What it does with a number that may be that of its samples,
            which therefore has to be unknown then.
    """

    def __init__(
        self, untracked: Sequence[keras.Variable], counted: str | None
    ) -> None:
        super().__init__("A step has to be traced again.")
        self.untracked = untracked
        self.counted = counted


@dataclasses.dataclass
class TraceFindings:
    """What traces show that their step has to be traced otherwise for.

    It is seen only where a step writes or draws. A variable may have a single
    copy, because no layer of the model holds it. A value, or the number of
    values that are drawn, may be of constants alone, one of which may be the
    number of a replica's samples, if that is known while tracing. Nobody can
    tell it from a constant of the program, which is the same on all replicas.
    Twice as many rows as samples may be drawn for two rows of each sample, or
    for two batches, which shows where they are used.
    """

    untracked: dict[int, keras.Variable] = dataclasses.field(
        default_factory=dict
    )
    """By id, the variables with a single copy that the step writes."""
    counted: str | None = None
    """What it does with a number that may be that of its samples."""
    by_sample: set[int] = dataclasses.field(default_factory=set)
    """Which multiples of the samples' number are several rows of each."""
    built: bool = False
    """Whether it has built an optimizer, of which Python code may have asked
    before whether it is built."""

    def raise_if_any(self) -> None:
        """Raises `TraceAgain` if there is something."""
        if self.untracked or self.counted or self.by_sample or self.built:
            raise TraceAgain([*self.untracked.values()], self.counted)


class Exit(Part):
    """One of the ways out of the step of one replica."""

    def begin(self) -> None:
        """Does what goes before the step."""

    def end(self, output: Tree) -> Tree:
        """Makes global what has left, where the step has been traced.

        Args:
            output: What the step returns.

        Returns:
            What it is to return.
        """
        return output

    def report(self, findings: TraceFindings) -> None:
        """Says what speaks against the trace."""

    def after_steps(self, fraction: Any) -> None:
        """Does what is done once after many steps.

        Args:
            fraction: Of the samples of each of these steps.
        """

    def merge(self, merged: Merged) -> None:
        """Merges, outside of replicas, what these have together."""
